"""Engine.update_weights: the new weights answer at once, nothing compiles, what is in flight ends as asked."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from helpers_engine import check_all_back, host_engine
from helpers_models import TINY_CONFIG, make_hf_dir, tiny_weights
from jax import monitoring

from jaxoverlap import Engine
from jaxoverlap.checkpoint.convert import convert
from jaxoverlap.checkpoint.errors import CheckpointError
from jaxoverlap.config import EngineConfig
from jaxoverlap.engine import EngineError
from jaxoverlap.loading import load
from jaxoverlap.models import registry

sys.path.insert(0, str(Path(__file__).parent / "models"))
from test_llama import CASES, reference_logits

PROMPT = [5, 250, 17, 17, 3, 99, 0, 42, 8]
LOOPS = pytest.mark.parametrize("off", [False, True], ids=["overlap", "normal"])
SETTINGS = {
    "context_length": 64,
    "max_total_tokens": 256,
    "max_running_requests": 4,
    "chunked_prefill_size": 16,
    "page_size": 1,
    "random_seed": 0,
    "audit": True,
}


def params(n, **more):
    return {"max_new_tokens": n, "temperature": 0.0, "ignore_eos": True, **more}


def greedy(seed, prompt, n):
    """The n tokens that follow a prompt by the float64 forward of the tiny model drawn from `seed`."""
    weights, ids = tiny_weights(TINY_CONFIG, seed), list(prompt)
    for _ in range(n):
        ids.append(int(np.argmax(reference_logits(TINY_CONFIG, weights, ids)[-1])))
    return ids[len(prompt) :]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """The same configuration with other weights: directories by seed, and "orbax" for seed 1 in that format."""
    folder = tmp_path_factory.mktemp("models")
    directories = {seed: make_hf_dir(folder / str(seed), seed=seed) for seed in (0, 1)}
    convert(directories[1], folder / "orbax", registry.parameter_tree(directories[1]))
    return {**directories, "orbax": folder / "orbax"}


@pytest.fixture(scope="module")
def warm(models):
    """Loaded and compiled once, for all tests here that do not end the engine."""
    model, runner, total = load(EngineConfig(model_path=str(models[0]), **SETTINGS))
    yield model, runner, total
    runner.shutdown()


@pytest.fixture
def make_engine(models, warm):
    """An engine with the weights of seed 0."""
    model, runner, total = warm
    runner.update_weights(flat(arrays(models, 0)))
    return lambda **more: Engine.from_parts(
        EngineConfig(model_path=str(models[0]), **{**SETTINGS, **more}), model, runner, total
    )


def new_engine(models, **more):
    return Engine(str(models[0]), skip_warmup=True, **{**SETTINGS, **more})


def module(models, seed):
    return registry.load(EngineConfig(model_path=str(models[seed]))).module


def arrays(models, seed):
    return nnx.state(module(models, seed))


def nested(state):
    return nnx.to_pure_dict(state)


def flat(state, prefix=""):
    out = {}
    for key, inner in (nested(state) if isinstance(state, nnx.State) else state).items():
        out |= flat(inner, f"{prefix}{key}.") if isinstance(inner, dict) else {f"{prefix}{key}": np.asarray(inner)}
    return out


def ids(engine, prompt=PROMPT, n=8):
    return engine.generate(input_ids=prompt, sampling_params=params(n))["output_ids"]


class Compiles:
    """Counts the compiles of the whole process inside the `with`."""

    def __enter__(self):
        self.count = 0
        monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def __exit__(self, *_):
        monitoring.unregister_event_duration_listener(self._listen)

    def _listen(self, event, duration, **_):
        self.count += event == "/jax/core/compile/backend_compile_duration"


@LOOPS
def test_the_new_weights_answer_at_once_and_nothing_compiles(make_engine, models, off):
    """From both formats, from an nnx state, nested and flat dictionaries, and a module; there and back."""
    old, new = greedy(0, PROMPT, 8), greedy(1, PROMPT, 8)
    assert old != new
    states = {seed: arrays(models, seed) for seed in (0, 1)}
    with make_engine(disable_overlap_schedule=off) as engine:
        assert ids(engine) == old
        given = [models["orbax"], str(models[0]), states[1], nested(states[0]), flat(states[1]), module(models, 0)]
        with Compiles() as compiles:
            for i, weights in enumerate(given):
                engine.update_weights(weights)
                result = engine.generate(input_ids=PROMPT, sampling_params=params(8))
                assert result["output_ids"] == (old if i % 2 else new), i
                assert result["meta_info"]["cached_tokens"] == 0  # the old ones' prefixes are gone
        assert compiles.count == 0
        check_all_back(engine)
        assert [np.array_equal(a, b) for a, b in zip(leaves(engine.model.module), leaves(states[0]))] == [True] * 14


def leaves(module):
    return jax.tree.leaves(nnx.state(module) if isinstance(module, nnx.Module) else module)


def test_nothing_compiles_anew_for_programs_compiled_on_first_use(models):
    states = [arrays(models, 1), arrays(models, 0)]
    with new_engine(models) as engine:
        before = ids(engine), ids(engine)
        assert before[0] == before[1]
        with Compiles() as compiles:
            for weights in (models[1], models["orbax"], *states, flat(states[0])):
                engine.update_weights(weights)
                ids(engine)
                ids(engine)
        assert compiles.count == 0


def test_the_giver_may_change_or_donate_its_arrays(make_engine, models):
    new = greedy(1, PROMPT, 8)
    mine = flat(arrays(models, 1))
    mine = {name: aligned_copy(array) for name, array in mine.items()}
    on_device = jax.tree.map(lambda x: jax.device_put(np.array(x)), nested(arrays(models, 1)))
    step = jax.jit(lambda x: jax.tree.map(lambda y: y * 0, x), donate_argnums=0)
    with make_engine() as engine:
        engine.update_weights(mine)
        for array in mine.values():
            array[...] = 0
        assert ids(engine) == new
        engine.update_weights(on_device)
        jax.block_until_ready(step(on_device))
        assert ids(engine) == new
        with pytest.raises(ValueError, match=r"parameter embedding was donated or deleted"):
            engine.update_weights(on_device)
        assert ids(engine) == new


def aligned_copy(array):
    """In memory that JAX may alias."""
    buffer = np.empty(array.nbytes + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    out = buffer[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    out[...] = array
    return out


@LOOPS
def test_finish(make_engine, models, off):
    """What runs or waits ends on the old weights, whoever reads it; what comes behind gets the new ones."""
    prompts = [[7 + i, 9, i] for i in range(7)]
    with make_engine(disable_overlap_schedule=off) as engine:
        streams = [engine.generate(input_ids=p, sampling_params=params(9), stream=True) for p in prompts]
        next(streams[0])
        engine.update_weights(models[1], in_flight="finish")
        assert engine.metrics()["unfinished"] == 0
        assert ids(engine) == greedy(1, PROMPT, 8)
        for stream, p in zip(streams, prompts):
            assert list(stream)[-1]["output_ids"] == greedy(0, p, 9)
        check_all_back(engine)


@LOOPS
def test_finish_while_others_call(make_engine, models, off):
    """Every answer is wholly the old weights' or wholly the new ones', and the new ones' from the update on."""
    prompts = [[11 + i, 3] for i in range(40)]
    started, found = threading.Event(), {}
    old, new = ([greedy(seed, p, 5) for p in prompts] for seed in (0, 1))
    with make_engine(disable_overlap_schedule=off) as engine:

        def call():
            for i, p in enumerate(prompts):
                found[i] = ids(engine, p, 5)
                started.set()

        thread = threading.Thread(target=call)
        thread.start()
        started.wait()
        engine.update_weights(models[1])
        after = len(found)  # the one that `found` lacks yet may have been answered before
        thread.join()
        which = [0 if found[i] == old[i] else 1 if found[i] == new[i] else None for i in range(len(prompts))]
        assert which == sorted(which)
        assert which[0] == 0
        assert set(which[after + 1 :]) <= {1}
        assert ids(engine) == greedy(1, PROMPT, 8)
        check_all_back(engine)


@LOOPS
def test_retract(make_engine, models, off):
    """What runs keeps its tokens and goes on with the new weights, those that wait begin with them."""
    prompts = [[7 + i, 9, i] for i in range(6)]
    with make_engine(disable_overlap_schedule=off) as engine:
        streams = [engine.generate(input_ids=p, sampling_params=params(12), stream=True) for p in prompts]
        for _ in range(3):
            next(streams[0])
        engine.update_weights(models[1], in_flight="retract")
        kept = engine.metrics()
        assert kept["retracted"] == 4
        results = [list(stream)[-1] for stream in streams]
        for p, result in zip(prompts, results):
            got = result["output_ids"]
            assert any(got == [*greedy(0, p, k), *greedy(1, [*p, *greedy(0, p, k)], 12 - k)] for k in range(12)), got
        k = next(i for i, (a, b) in enumerate(zip(results[0]["output_ids"], greedy(0, prompts[0], 12))) if a != b)
        assert k >= 3
        assert [r["output_ids"] for r in results[4:]] == [greedy(1, p, 12) for p in prompts[4:]]
        check_all_back(engine)


@LOOPS
def test_retract_in_the_middle_of_a_prompt_and_of_a_cached_prefix(make_engine, models, off):
    prompt = [*range(3, 43)]
    with make_engine(disable_overlap_schedule=off) as engine:
        ids(engine, prompt[:20], 1)
        stream = engine.generate(input_ids=prompt, sampling_params=params(6), stream=True)
        other = engine.generate(input_ids=[4], sampling_params=params(3), stream=True)
        turns = engine.metrics()["turns"]
        engine._loop.drive(lambda: engine.metrics()["turns"] > turns)  # the first chunk of three is launched
        engine.update_weights(models["orbax"], in_flight="retract")
        assert list(stream)[-1]["output_ids"] == greedy(1, prompt, 6)
        assert len(list(other)[-1]["output_ids"]) == 3
        check_all_back(engine)


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_while_paused(make_engine, models, mode):
    """SGLang's way: pause, update, continue. "finish" is refused as long as something cannot finish."""
    with make_engine() as engine:
        stream = engine.generate(input_ids=PROMPT, sampling_params=params(12), stream=True)
        next(stream)
        engine.pause_generation(mode)
        with pytest.raises(EngineError, match="1 requests are paused and cannot finish: retract them"):
            engine.update_weights(models[1])
        engine.update_weights(models[1], in_flight="retract")
        turns = engine.metrics()["turns"]
        assert engine.metrics()["turns"] == turns  # still paused
        assert engine._loop.is_paused
        engine.continue_generation()
        got = list(stream)[-1]["output_ids"]
        k = next(i for i, (a, b) in enumerate(zip(got, greedy(0, PROMPT, 12))) if a != b)
        assert got[k:] == greedy(1, [*PROMPT, *got[:k]], 12 - k)
        assert ids(engine) == greedy(1, PROMPT, 8)
        check_all_back(engine)


def test_while_paused_and_idle(make_engine, models):
    with make_engine() as engine:
        ids(engine)
        engine.pause_generation("in_place")
        engine.update_weights(models[1])
        engine.continue_generation()
        result = engine.generate(input_ids=PROMPT, sampling_params=params(8))
        assert result["output_ids"] == greedy(1, PROMPT, 8)
        assert result["meta_info"]["cached_tokens"] == 0


def without(state, name):
    return {n: a for n, a in flat(state).items() if n != name}


WRONG = {
    "missing": (lambda s: without(s, "norm.weight"), "parameter norm.weight is missing"),
    "unknown": (lambda s: {**flat(s), "head": np.zeros((272, 32), np.float32)}, "parameter head is unknown"),
    "shape": (
        lambda s: {**flat(s), "norm.weight": np.zeros(31, np.float32)},
        r"parameter norm.weight has shape \[31\], the model needs \[32\]",
    ),
    "dtype": (
        lambda s: {**flat(s), "norm.weight": np.zeros(32, ml_dtypes.bfloat16)},
        "parameter norm.weight has dtype bfloat16, the model needs float32",
    ),
    "no array": (lambda s: {**flat(s), "norm.weight": "x"}, "parameter norm.weight has shape none: it is a str"),
    "twice": (lambda s: {**flat(s), "norm": {"weight": np.zeros(32, np.float32)}}, "two leaves have the name 'norm"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_arrays_are_named_and_change_nothing(make_engine, models, kind):
    change, message = WRONG[kind]
    with make_engine() as engine:
        stream = engine.generate(input_ids=PROMPT, sampling_params=params(8), stream=True)
        next(stream)
        with pytest.raises(ValueError, match=message):
            engine.update_weights(change(arrays(models, 1)), in_flight="retract")
        assert engine.metrics()["retracted"] == 0
        assert list(stream)[-1]["output_ids"] == greedy(0, PROMPT, 8)
        assert engine.generate(input_ids=PROMPT, sampling_params=params(8))["meta_info"]["cached_tokens"] > 0


def test_wrong_directories_are_named_and_change_nothing(make_engine, models, tmp_path):
    other = make_hf_dir(tmp_path / "other", rms_norm_eps=1e-6)
    deeper = make_hf_dir(tmp_path / "deeper", num_hidden_layers=3)
    torn = make_hf_dir(tmp_path / "torn")
    (torn / "model.safetensors").write_bytes((torn / "model.safetensors").read_bytes()[:-1000])
    with make_engine() as engine:
        for path, error, message in [
            (other, CheckpointError, r"other/config.json: rms_norm_eps is 1e-06, the served model's is 1e-05"),
            (deeper, CheckpointError, r"deeper/config.json: num_layers is 3, the served model's is 2"),
            (torn, CheckpointError, r"model.safetensors: not a whole safetensors file"),
            (tmp_path, CheckpointError, r"config.json: no such file"),
            ("nowhere", ValueError, r"'nowhere' is no directory"),
        ]:
            with pytest.raises(error, match=message):
                engine.update_weights(path)
        with pytest.raises(ValueError, match="in_flight must be finish or retract, not 'abort'"):
            engine.update_weights(models[1], in_flight="abort")
        assert ids(engine) == greedy(0, PROMPT, 8)


def test_devices_and_models_without_weights():
    with host_engine() as engine, pytest.raises(ValueError, match="model test runs on a device without weights"):
        engine.update_weights({})
    with Engine("checksum", max_total_tokens=64, context_length=32, skip_warmup=True) as engine:
        with pytest.raises(ValueError, match="model checksum has no weights to update"):
            engine.update_weights("smollm2-135m")
        engine.update_weights({})


def test_weights_half_replaced_end_the_engine(models, monkeypatch):
    """It must not answer from a mixture."""
    from jaxoverlap.device import parameters

    plain, left = parameters._copied, [3]

    def copied(array, like):
        left[0] -= 1
        if left[0] < 0:
            raise MemoryError("no room")
        return plain(array, like)

    monkeypatch.setattr(parameters, "_copied", copied)
    engine = new_engine(models)
    with pytest.raises(EngineError, match="the weights are half replaced: MemoryError: no room"):
        engine.update_weights(models[1])
    with pytest.raises(EngineError, match="the weights are half replaced"):
        ids(engine)
    engine.shutdown()


def test_an_engine_that_is_shut_down(models):
    engine = new_engine(models)
    engine.shutdown()
    with pytest.raises(EngineError, match="shut down"):
        engine.update_weights(models[1])


@pytest.mark.parametrize("family", ["qwen3", pytest.param("qwen3 moe, dense layers", marks=pytest.mark.slow)])
def test_qwen3_in_bfloat16(tmp_path, family):
    """Directories are cast to the served dtype; arrays must have it."""
    sizes = {**CASES[family], "dtype": "bfloat16"}
    directories = [make_hf_dir(tmp_path / str(seed), seed=seed, **sizes) for seed in (0, 1)]
    convert(directories[1], tmp_path / "orbax", registry.parameter_tree(directories[1]))
    settings = {**SETTINGS, "dtype": "bfloat16", "skip_warmup": True}
    with Engine(str(directories[1]), **settings) as engine:
        expected = ids(engine)
    with Engine(str(directories[0]), **settings) as engine:
        assert ids(engine) != expected
        engine.update_weights(tmp_path / "orbax")
        assert ids(engine) == expected


UPDATES = """
import gc, json, os, sys
from pathlib import Path
import jax
from flax import nnx
from jaxoverlap import Engine
from jaxoverlap.config import EngineConfig
from jaxoverlap.models import registry

settings, given, choices = json.loads(sys.argv[1]), sys.argv[2], sys.argv[3:]
with Engine(choices[0], **settings) as engine:
    if given == "arrays":
        choices = [nnx.state(registry.load(EngineConfig(model_path=path)).module) for path in choices]
    answers = []

    def update(count):
        for i in range(count):
            engine.update_weights(choices[i % 2], in_flight=("finish", "retract")[i // 2 % 2])
            params = {"max_new_tokens": 4, "temperature": 0.0}
            answers.append(engine.generate(input_ids=[5, 6], sampling_params=params)["output_ids"])
        engine.wait_idle()
        gc.collect()
        resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return resident, sum(array.nbytes for array in jax.live_arrays())

    before, after = update(10), update(50)
    compiled = engine.runner.compiles == len(engine.runner.programs)
    print(json.dumps({"before": before, "after": after, "answers": answers, "compiled once": compiled}))
"""


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads Linux' /proc")
@pytest.mark.soak
@pytest.mark.parametrize("given", ["paths", "arrays"])
def test_memory_is_flat_over_50_updates(tmp_path, given):
    """In a process of its own whose freed arrays go back to the system at once, with a model of 160 MB."""
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "vocab_size": 16_384, "num_hidden_layers": 8}
    sizes |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
    directories = [make_hf_dir(tmp_path / str(seed), seed=seed, **sizes) for seed in (0, 1)]
    convert(directories[1], tmp_path / "orbax", registry.parameter_tree(directories[1]))
    command = [sys.executable, "-c", UPDATES, json.dumps(SETTINGS), given, str(directories[0]), str(tmp_path / "orbax")]
    environ = os.environ | {"JAX_PLATFORMS": "cpu", "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, capture_output=True, text=True, env=environ)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    print({name: found[name] for name in ("before", "after")})
    answers = found["answers"]
    assert answers == [answers[0], answers[1]] * 30
    assert answers[0] != answers[1]
    assert found["compiled once"]
    assert found["after"][1] == found["before"][1] > 160e6
    assert found["after"][0] <= 1.02 * found["before"][0]
