"""The runner against the oracle, through launches built by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import monitoring

from jaxoverlap.core import Sample
from jaxoverlap.device.compile_guard import COMPILE_EVENT, CompileError
from jaxoverlap.device.state import Script
from jaxoverlap.models.checksum import ChecksumConfig

from .helpers import ConstantModel, Driver, make_request, make_runner

ORACLE = ChecksumConfig().oracle


@pytest.fixture(scope="module")
def runner():
    runner = make_runner(cut=True, poison_future_map=True)
    runner.warm_up()
    yield runner
    runner.shutdown()


@pytest.fixture(scope="module", params=[1, pytest.param(4, marks=pytest.mark.slow)])
def paged_runner(request):
    runner = make_runner(page_size=request.param, poison_future_map=True)
    runner.warm_up()
    yield request.param, runner
    runner.shutdown()


def test_chunked_mixed_and_decode(paged_runner):
    page_size, runner = paged_runner
    d = Driver(runner, page_size)
    long, short = list(range(3, 76)), [900, 14]
    d.start(2, make_request(short))
    d.start(4, make_request(long))
    d.run([(2, 2)])
    d.run([(4, 31)], [2])
    d.run([(4, 32)])
    d.run([(4, 10)], [2])
    for _ in range(6):
        d.run((), [4, 2])
    assert d.outputs[2] == ORACLE(short, 9)
    assert d.outputs[4] == ORACLE(long, 7)
    assert d.logprobs[4] == [0.0] * 7


@pytest.mark.parametrize("seed", range(8))
def test_random_loads_with_results_one_launch_late(paged_runner, seed):
    """Random chunks, mixed with decodes, in random row orders; each result is taken after the next launch."""
    page_size, runner = paged_runner
    rng = np.random.default_rng(seed)
    d = Driver(runner, page_size, seed)
    todo = [rng.integers(0, 1000, rng.integers(1, 40)).tolist() for _ in range(10)]
    caps = rng.integers(1, 12, 10).tolist()
    done = {}
    live, sampled = {}, {}  # slot -> index; slot -> tokens launched
    pending = None
    while todo or live:
        for slot in range(1, 5):
            if slot not in live and todo and rng.random() < 0.6:
                live[slot], sampled[slot] = len(todo) - 1, 0
                d.start(slot, make_request(todo.pop()))
        prefill, decode, room = [], [], 32
        for slot in rng.permutation(sorted(live)).tolist():
            left = len(d.requests[slot].prompt_ids) - d.lens[slot]
            if left > 0 and room > 8:
                prefill.append((slot, int(min(rng.integers(1, left + 1), room - 4))))
                room -= prefill[-1][1]
                sampled[slot] += prefill[-1][1] == left
            elif left <= 0 and sampled[slot] < caps[live[slot]] and rng.random() < 0.9:
                decode.append(slot)
                sampled[slot] += 1
        if rng.random() < 0.5 and prefill:
            for slot in decode:
                sampled[slot] -= 1
            decode = []
        launched = d.launch(prefill, decode)
        if pending is not None:
            d.take(pending)
        pending = launched
        for slot in [s for s in live if len(d.outputs[s]) == caps[live[s]]]:
            done[live.pop(slot)] = (d.requests[slot].prompt_ids.tolist(), d.stop(slot))
    d.take(pending)
    assert len(done) == 10
    for index, (prompt, outputs) in done.items():
        assert outputs == ORACLE(prompt, caps[index])


def test_a_recycled_slot_and_its_pages(runner):
    """A ends, but one more step with its row is in flight when B's prefill takes its slot and its pages."""
    d = Driver(runner)
    d.start(1, make_request([1, 2, 3]))
    d.start(2, make_request([4, 5]))
    d.run([(1, 3), (2, 2)])
    last = d.launch((), [1, 2])
    zombie = d.launch((), [1, 2])
    d.take(last)
    d.free = d.pages.pop(1) + d.free  # reused at once
    outputs_of_a = d.outputs[1]
    d.start(1, make_request([7, 7, 8, 9]))
    first = d.launch([(1, 4)], [2])
    zombie = (zombie[0], zombie[1], [2])
    d.take(zombie)
    d.take(first)
    for _ in range(5):
        d.run((), [2, 1])
    assert outputs_of_a == ORACLE([1, 2, 3], 2)
    assert d.outputs[1] == ORACLE([7, 7, 8, 9], 6)
    assert d.outputs[2] == ORACLE([4, 5], 9)


def test_a_waiting_slot_is_not_disturbed_by_others_prefills(runner):
    d = Driver(runner)
    d.start(1, make_request([5, 6]))
    d.run([(1, 2)])
    for i in range(40):
        d.start(2, make_request([i]))
        d.run([(2, 1)])
        assert d.stop(2) == ORACLE([i], 1)
    d.start(3, make_request(range(80)))
    for _ in range(10):
        d.run([(3, 8)])
    for _ in range(7):
        d.run((), [1])
    assert d.outputs[1] == ORACLE([5, 6], 8)


def test_more_page_writes_than_a_program_carries(runner):
    """A cached prefix of 90 pages comes to a slot in one launch: the pages of one row given to another."""
    d = Driver(runner)
    prompt = list(range(90))
    d.start(1, make_request(prompt))
    for n in (32, 32, 26):
        d.run([(1, n)])
    for slot in (2, 3, 4):
        d.start(slot, make_request([*prompt[:89], 77 + slot]))
        d.pages[slot], d.lens[slot] = d.pages[1][:89], 89
        d.writes += [(slot, i, page) for i, page in enumerate(d.pages[slot])]
    assert len(d.writes) > 256
    d.run([(2, 1), (3, 1), (4, 1)])
    for slot in (2, 3, 4):
        assert d.outputs[slot] == ORACLE([*prompt[:89], 77 + slot], 1)


def test_delayed_sampling_and_masks(runner):
    """Masked rows take the oracle's allowed tokens, whether the mask comes with the launch or after it; the next launch
    is made before the result is seen."""
    d = Driver(runner)
    rng = np.random.default_rng(0)
    allowed = [sorted(rng.choice(1000, 40, replace=False).tolist()) for _ in range(8)]
    free, bound = [3, 1, 4], [1, 5, 9]

    def mask(step):
        bits = np.ones((2, 1, 1024), bool)
        bits[1, 0] = False
        bits[1, 0, allowed[step]] = True
        return np.packbits(bits, axis=-1, bitorder="little").view(np.int32)

    d.start(1, make_request(free))
    d.start(2, make_request(bound))
    launches = [d.launch([(1, 3), (2, 3)], mask=mask(0))]
    for step in range(1, 8):
        if step % 2:
            launched = d.launch((), [1, 2], delay_sample=True)
            assert not runner.is_ready(launched[1])
            with pytest.raises(RuntimeError, match=rf"launch {launched[0].number} is not sampled yet"):
                runner.wait(launched[1])
            runner.sample([Sample(launched[0], launched[1], mask(step))])
            with pytest.raises(ValueError, match="is sampled already"):
                runner.sample([Sample(launched[0], launched[1], mask(step))])
        else:
            launched = d.launch((), [1, 2], mask=mask(step))
        launches.append(launched)
    for launched in launches:
        d.take(launched)
    assert d.outputs[1] == ORACLE(free, 8)
    assert d.outputs[2] == ORACLE(bound, 8, allow=lambda out: allowed[len(out)])


def test_idle(runner):
    d = Driver(runner)
    d.start(1, make_request([8]))
    d.run([(1, 1)])
    result = d.run()
    assert result.tokens.shape == (0,)
    d.run((), [1])
    assert d.outputs[1] == ORACLE([8], 2)


def test_nothing_compiles_after_warm_up(paged_runner):
    page_size, runner = paged_runner
    events = []

    def listen(event, duration, **_):
        if event == COMPILE_EVENT:
            events.append(event)

    rng = np.random.default_rng(0)
    monitoring.register_event_duration_secs_listener(listen)
    try:
        for _ in range(20):
            d = Driver(runner, page_size, int(rng.integers(100)))
            rows = rng.permutation(np.arange(1, 5))[: rng.integers(1, 5)].tolist()
            for slot in rows:
                params = {"temperature": float(rng.random()), "top_p": 0.9, "top_k": int(rng.integers(1, 9))}
                d.start(slot, make_request(rng.integers(0, 1000, 8), **params))
            d.run([(slot, int(rng.integers(1, 9))) for slot in rows])
            ready = [s for s in rows if d.lens[s] == 8]
            if ready:
                d.run((), ready[: rng.integers(1, len(ready) + 1)])
            d.run()
    finally:
        monitoring.unregister_event_duration_listener(listen)
    assert events == []


def test_state_is_updated_in_place(runner):
    d = Driver(runner)
    d.start(1, make_request([1]))
    d.run([(1, 1)])
    before = jax.tree.leaves(runner._state)
    address = runner._state.cache[0].unsafe_buffer_pointer()
    d.run((), [1])
    assert all(leaf.is_deleted() for leaf in before)
    pending = [d.launch((), [1]) for _ in range(20)]
    for launched in pending:
        d.take(launched)
        assert runner._state.cache[0].unsafe_buffer_pointer() == address
    for step in range(100):
        d.start(2, make_request([step, 5, 6]))
        d.run([(2, 3)], [1] if step < 50 else [])
        d.stop(2)
        assert runner._state.cache[0].unsafe_buffer_pointer() == address
    assert d.outputs[1] == ORACLE([1], 72)


def test_a_compile_after_warm_up_is_an_error():
    runner = make_runner(max_running_requests=1)
    d = Driver(runner)
    d.start(1, make_request([1]))
    d.run([(1, 1)])  # cold: compiles, allowed
    assert runner.compiles == 1
    told = []
    runner.warm_up(lambda *a: told.append(a))
    total = len(runner.programs)
    assert [(done, of) for done, of, _ in told] == [(i, total) for i in range(total + 1)]
    assert sorted(name for _, _, name in told) == sorted(["", *runner.programs])
    jax.config.update("jax_default_matmul_precision", "highest")  # a user's change is no reason to compile
    try:
        d.run((), [1])
    finally:
        jax.config.update("jax_default_matmul_precision", None)
    program = runner._programs["decode_1"]
    program.call = jax.jit(program.step, donate_argnums=program.donate)
    with pytest.raises(CompileError, match="program decode_1 compiled after warm-up"):
        d.launch((), [1])
    runner.shutdown()


def test_poison_finds_wrong_relays(runner):
    d = Driver(runner)
    d.start(1, make_request([1, 2]))
    d.start(2, make_request(range(60)))
    d.run([(1, 2)])
    d.grow(2, 60)  # never launched: its row holds what an earlier test left, of another length
    launched = d.launch((), [1, 2])
    with pytest.raises(RuntimeError, match=rf"launch {launched[0].number}: slot 2 read another length's row"):
        d.take(launched)
    runner._state = dataclasses.replace(runner._state, output_tokens=jnp.full_like(runner._state.output_tokens, -1))
    launched = d.launch((), [1])
    with pytest.raises(RuntimeError, match=rf"launch {launched[0].number}: slot 1 read a row that no step had written"):
        d.take(launched)


def test_scripts():
    """Forced tokens by output index, also for a request prefilled again with its outputs after losing its slot."""
    scripts = {"a": [5, 6, 7, 8], "b": [-1, 9]}
    runner = make_runner(max_running_requests=2, script=Script(4, lambda request: scripts.get(request.rid)))
    d = Driver(runner)
    d.start(1, make_request([1, 2], "a"))
    d.start(2, make_request([3], "b"))
    d.run([(1, 2), (2, 1)])
    d.run((), [1, 2])
    assert d.outputs == {1: [5, 6], 2: [ORACLE([3], 1)[0], 9]}
    a = d.requests[1]
    outputs = d.stop(1)
    d.start(1, make_request([4, 4], "c"))
    d.stop(2)
    d.start(2, a)
    d.outputs[2] = list(outputs)
    d.run([(1, 2), (2, 4)])
    for _ in range(3):
        d.run((), [2, 1])
    assert d.outputs[1] == ORACLE([4, 4], 4)
    assert d.outputs[2] == [5, 6, 7, 8, *ORACLE([1, 2, 5, 6, 7, 8], 2)]
    runner.shutdown()


def test_sampled_rows_do_not_depend_on_their_batch():
    """Uniform logits: seed 7 gives the same ids in every row, slot and launch shape; other seeds give others."""
    runner = make_runner(ConstantModel(np.zeros(1000)), max_running_requests=4)

    def run(seeds, slots, mine):
        d = Driver(runner)
        for slot, seed in zip(slots, seeds):
            d.start(slot, make_request([1, 2], temperature=1.0, seed=seed))
        d.run([(s, 2) for s in slots])
        for _ in range(63):
            d.run((), slots)
        return d.outputs[slots[mine]]

    alone = run([7], [1], 0)
    assert len(set(alone)) > 40
    assert run([1, 2, 3, 7], [4, 2, 1, 3], 3) == alone
    assert run([7, 8, 9], [4, 3, 1], 0) == alone
    assert run([8], [1], 0) != alone
    runner.shutdown()


def test_bad_launches_are_refused(runner):
    d = Driver(runner)
    d.start(1, make_request([1] * 40))
    with pytest.raises(ValueError, match="a prefill launch of 33 tokens is above the largest, 32"):
        d.launch([(1, 33)])
    d = Driver(runner)
    for slot in (1, 5):
        d.start(slot, make_request([1]))
    d.launch([(1, 1)])  # one in range vouches for no other
    with pytest.raises(ValueError, match=r"launch 2: slot must be at least 0 and below 5, not 5 to 5"):
        d.launch([(5, 1)])
    for write, name in [((5, 0, 1), "slot"), ((1, 96, 1), "index"), ((1, 0, 385), "page"), ((1, 0, -1), "page")]:
        d = Driver(runner)
        d.start(1, make_request([1]))
        d.writes.append(write)
        with pytest.raises(ValueError, match=f"launch 1: page_writes: {name} must be"):
            d.launch([(1, 1)])
    d = Driver(runner)
    d.start(1, make_request([1]))
    d.writes.append((1, 0, 9))
    with pytest.raises(ValueError, match="launch 1 writes an entry of the page table twice"):
        d.launch([(1, 1)])


def test_life_of_a_runner():
    with pytest.raises(ValueError, match="max_total_tokens 10 must be a multiple of page_size 4"):
        make_runner(total=10, page_size=4)
    runner = make_runner(max_running_requests=1)
    d = Driver(runner)
    d.start(1, make_request([1]))
    with pytest.raises(ValueError, match="needs the cut programs: make the runner with cut=True"):
        d.launch([(1, 1)], delay_sample=True)
    runner.shutdown()
    runner.shutdown()
    with pytest.raises(RuntimeError, match="the runner is shut down"):
        d.launch((), [1])
