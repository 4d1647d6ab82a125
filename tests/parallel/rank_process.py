"""One process of several that hold ranks together; run by test_processes.py.

Arguments: process, processes, ranks of each, port, what ("loads", "engine", "refused", "killed", "raises"), number.
"""

import json
import os
import signal
import sys
from pathlib import Path

import jax

tests = Path(__file__).parent.parent
sys.path[:0] = [str(tests / folder) for folder in ("parallel", "scheduler", "")]
process, processes, local, port = (int(x) for x in sys.argv[1:5])
what, number = sys.argv[5], int(sys.argv[6])

from jaxoverlap.parallel.processes import join  # noqa: E402

jax.config.update("jax_platforms", "cpu")
join(f"127.0.0.1:{port}", processes, process)

import numpy as np  # noqa: E402
from helpers_parallel import CONTEXT, LOOPS, Asked, Ranks, config_of, random_load, rows_of  # noqa: E402

from jaxoverlap.config import EngineConfig  # noqa: E402
from jaxoverlap.core import RequestError  # noqa: E402
from jaxoverlap.engine import Engine  # noqa: E402
from jaxoverlap.models.checksum import ChecksumModel  # noqa: E402
from jaxoverlap.parallel.load import rank_devices  # noqa: E402
from jaxoverlap.parallel.mesh import RankMesh  # noqa: E402
from jaxoverlap.parallel.runner import RankRunner  # noqa: E402
from jaxoverlap.parallel.sync import FactExchange  # noqa: E402

dp_size = processes * local


def make_runner():
    config = config_of(dp_size, poison_future_map=True)
    devices = rank_devices(dp_size)  # asks for virtual ones
    runner = RankRunner(
        ChecksumModel(),
        config,
        RankMesh(devices),
        max_total_tokens=config.max_total_tokens,
        context_length=CONTEXT,
        exchange=FactExchange(devices),
        cut=True,
    )
    runner.warm_up()
    return runner


def loads():
    """Every process draws the same loads and serves its own ranks' requests."""
    runner = make_runner()
    for seed in range(number):
        load = random_load(np.random.default_rng(seed), dp_size)
        busy = {one.rank for one in load}
        idle = [i for i, rank in enumerate(runner.ranks) if rank not in busy]
        before = [rows_of(runner, i) for i in idle]
        ranks = Ranks(runner, config_of(dp_size, LOOPS[seed % 2]))
        outputs = ranks.run(load)
        assert outputs == {one.rid: one.want for one in load if one.rank in runner.ranks}, seed
        for i, rows in zip(idle, before):
            for old, new in zip(rows, rows_of(runner, i), strict=True):
                np.testing.assert_array_equal(old, new)
        launches = {s.counters.launches for s in ranks.schedulers}
        assert len(launches) == 1
        print(json.dumps({"seed": seed, "launches": launches.pop(), "requests": len(outputs), "idle": len(idle)}))


def engine(spoil=None):
    settings = {"max_running_requests": 4, "max_total_tokens": 320, "context_length": CONTEXT, "audit": True}
    config = EngineConfig(
        model_path="checksum", chunked_prefill_size=16, dp_size=dp_size, enable_dp_attention=True, **settings
    )
    with Engine.from_config(config) as e:
        if spoil is not None:
            spoil(e)
        for turn in range(number):
            asked = [Asked(str(i), 0, None, [5 + process + turn] * (20 * i + 1), 12) for i in range(process * 2)]
            results = (
                e.generate(
                    input_ids=[one.prompt for one in asked], sampling_params={"temperature": 0.0, "max_new_tokens": 12}
                )
                if asked
                else e.generate([])
            )
            assert [r["output_ids"] for r in results] == [one.want for one in asked]
            print(json.dumps({"launches": e.metrics()["launches"], "requests": len(results)}))


def refused():
    """Process 0's requests are malformed, in one way or another; the others' are served all the same."""
    config = EngineConfig(
        model_path="checksum", max_total_tokens=320, context_length=CONTEXT, dp_size=dp_size, enable_dp_attention=True
    )
    bad = [{"input_ids": []}, {"input_ids": [5], "stream": True}, {"input_ids": [[5], [6]], "rid": ["a"]}]
    with Engine.from_config(config) as e:
        for wrong in bad:
            good = Asked("good", 0, None, [5, 6, 7], 12)
            if process == 0:
                try:
                    e.generate(sampling_params={"temperature": 0.0}, **wrong)
                except RequestError as error:
                    print(json.dumps({"refused": str(error)}))
            else:
                params = {"temperature": 0.0, "max_new_tokens": 12}
                assert e.generate(input_ids=good.prompt, sampling_params=params)["output_ids"] == good.want
                print(json.dumps({"served": 1}))


def killed(e):
    """In the middle of a turn: the others have met this rank, and launch."""
    launch = e.runner.launch

    def last(launches):
        if launches[0].number == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        return launch(launches)

    if process == int(os.environ["VICTIM"]):
        e.runner.launch = last


def raises(e):
    from jaxoverlap.scheduler import Scheduler

    turn = Scheduler.turn

    def last(self):
        if self.counters.launches == 7:
            raise KeyError("a fault of this rank")
        return (yield from turn(self))

    if process == int(os.environ["VICTIM"]):
        Scheduler.turn = last


def left(e):
    """Process 0 makes one call more than the others."""
    if process == 0:
        print(json.dumps({"calls": number}), flush=True)
        for _ in range(number):
            e.generate([])
        e.generate([])


def unlike():
    """One setting, or the weights, of process 1 are others."""
    from helpers_models import make_hf_dir

    folder = Path(os.environ["FOLDER"])
    same = make_hf_dir(folder / str(process), seed=process if number else 0)
    settings = {"max_running_requests": 2, "max_total_tokens": 128, "context_length": 64, "grammar_backend": "none"}
    chunk = 16 if number else 16 + process
    Engine(str(same), chunked_prefill_size=chunk, dp_size=dp_size, enable_dp_attention=True, **settings)


match what:
    case "left":
        engine(left)
    case "unlike":
        unlike()
    case "loads":
        loads()
    case "engine":
        engine()
    case "refused":
        refused()
    case "killed":
        engine(killed)
    case "raises":
        engine(raises)
