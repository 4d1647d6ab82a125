"""Details of log-probabilities on the device, against float64 and by order of calls; launches built by hand."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import monitoring

from jaxoverlap.config import EngineConfig
from jaxoverlap.core import Sample
from jaxoverlap.device import fetching
from jaxoverlap.device.compile_guard import COMPILE_EVENT
from jaxoverlap.device.runner import JaxRunner
from jaxoverlap.logprobs import LogprobDetails
from jaxoverlap.models.checksum import ChecksumConfig, ChecksumModel
from jaxoverlap.replay.device import ToySpeculator

from .helpers import ConstantModel, Driver, SlowModel, make_request, make_runner

VOCAB, K, CHUNK = 50, 4, 150  # more tokens in a chunk than places in a block
TABLE = np.random.default_rng(0).normal(0, 3, (VOCAB, VOCAB)).astype(np.float32)


class BigramModel(nnx.Module):
    """The logits behind a token are that token's row of a table."""

    def __init__(self, table):
        self.table = nnx.Param(jnp.asarray(table))
        self.config = ChecksumConfig(vocab_size=len(table), span=1, offset=0)

    def cache_shapes(self, num_locs):
        return (jax.ShapeDtypeStruct((num_locs,), jnp.int32),)

    def __call__(self, ids, context, cache):
        return ids[:, None], (cache[0].at[context.token_locs].set(ids),)

    def logits(self, hidden):
        return self.table[...][hidden[:, 0]]


def log_softmax(token):
    """float64 [V]"""
    x = TABLE[token].astype(np.float64)
    return x - np.log(np.exp(x - x.max()).sum()) - x.max()


def check(table, row, before, token_ids):
    """A row of a LogprobTable against the truth behind the token `before`."""
    want = log_softmax(before)
    order = np.argsort(-want, kind="stable")[:K]
    assert table.top_ids[row].tolist() == order.tolist()
    np.testing.assert_allclose(table.top[row], want[order], rtol=0, atol=1e-5)
    np.testing.assert_allclose(table.chosen[row, : len(token_ids)], want[list(token_ids)], rtol=0, atol=1e-5)


def wants(prompt, start=-1, top=K, token_ids=(), **more):
    request = make_request(prompt, **more)
    request.return_logprob = True
    request.details = LogprobDetails(request.prompt_ids, start, top, token_ids)
    return request


@pytest.fixture(scope="module")
def runner():
    settings = {"total": 800, "context": 400, "chunked_prefill_size": CHUNK, "max_logprobs": K}
    runner = make_runner(BigramModel(TABLE), poison_future_map=True, **settings)
    runner.warm_up()
    yield runner
    runner.shutdown()


@pytest.fixture
def compiles():
    events = []

    def listen(event, duration, **_):
        if event == COMPILE_EVENT:
            events.append(event)

    monitoring.register_event_duration_secs_listener(listen)
    yield events
    monitoring.unregister_event_duration_listener(listen)


@pytest.mark.parametrize("lengths", [(3, 1, 2), (20, 4, 9), (64, 1, 64), (100, 20, 30), (1, 148, 1)])
def test_inputs_and_outputs_of_an_extend_launch(runner, compiles, lengths):
    """Every place of several rows, over one block and several, whole and not."""
    rng = np.random.default_rng(sum(lengths))
    prompts = [rng.integers(0, VOCAB, n).tolist() for n in lengths]
    chosen = [(7, 3, 49), (), (0, 0, 0, 1)]
    d = Driver(runner)
    for slot, (prompt, ids) in enumerate(zip(prompts, chosen), 1):
        d.start(slot, wants(prompt, 0, token_ids=ids))
    spans = np.array([(n // 3, n - 1) for n in lengths], np.int32)
    result = d.run([(slot, n) for slot, n in enumerate(lengths, 1)], output_details=True, input_spans=spans)
    row = 0
    for i, (prompt, ids) in enumerate(zip(prompts, chosen)):
        check(result.output_details, i, prompt[-1], ids)
        assert result.tokens[i] == np.argmax(TABLE[prompt[-1]])
        for place in range(*spans[i]):
            check(result.input_details, row, prompt[place], ids)
            following = log_softmax(prompt[place])[prompt[place + 1]]
            np.testing.assert_allclose(result.input_details.following[row], following, rtol=0, atol=1e-5)
            row += 1
    assert len(result.input_details.top) == row
    assert compiles == []


def test_decode_launches(runner, compiles):
    """A row that wants details, and one that does not, in both orders; then none."""
    d = Driver(runner)
    d.start(1, wants([4, 8], token_ids=(9, 1)))
    d.start(3, make_request([6]))
    d.run([(1, 2), (3, 1)])
    for slots in ([1, 3], [3, 1], [1]):
        before = [d.outputs[slot][-1] for slot in slots]
        result = d.run((), slots, output_details=True)
        check(result.output_details, slots.index(1), before[slots.index(1)], (9, 1))
        assert len(result.output_details.top) == len(slots)
        assert result.input_details is None
    assert d.run((), [3]).output_details is None
    assert compiles == []


def test_a_chunk_without_its_prompts_last_token(runner):
    """The place before a chunk's end tells of a token that comes with the next chunk."""
    prompt = np.random.default_rng(5).integers(0, VOCAB, 40).tolist()
    d = Driver(runner)
    d.start(2, wants(prompt, 0))
    for begin, end in ((0, 16), (16, 32), (32, 40)):
        spans = np.array([(0, min(end, 39) - begin)], np.int32)
        table = d.run([(2, end - begin)], input_spans=spans).input_details
        want = [log_softmax(prompt[p])[prompt[p + 1]] for p in range(begin, min(end, 39))]
        np.testing.assert_allclose(table.following, want, rtol=0, atol=1e-5)


def test_equal_logits_come_by_id():
    runner = make_runner(ConstantModel(np.array([1, 5, 2, 5, 5, 0.0])), max_logprobs=6)
    d = Driver(runner)
    d.start(1, wants([1, 2]))
    assert d.run([(1, 2)], output_details=True).output_details.top_ids[0].tolist() == [1, 3, 4, 2, 0, 5]
    runner.shutdown()


@pytest.mark.parametrize("delay", [False, True])
def test_a_mask_does_not_reach_the_details(runner, delay):
    d = Driver(runner)
    prompt = [3, 30, 12]
    d.start(1, wants(prompt, 0))
    bits = np.zeros((1, 1, 64), bool)
    bits[0, 0, 11] = True
    mask = np.packbits(bits, axis=-1, bitorder="little").view(np.int32)
    fields = {"delay_sample": True} if delay else {"mask": mask}
    launched = d.launch([(1, 3)], output_details=True, input_spans=np.array([(0, 2)], np.int32), **fields)
    if delay:
        runner.sample([Sample(launched[0], launched[1], mask)])
    result = d.take(launched)
    assert result.tokens.tolist() == [11]
    check(result.output_details, 0, 12, ())
    check(result.input_details, 1, 30, ())


def test_launches_without_details_run_the_plain_programs(runner, monkeypatch):
    names, call = [], type(runner)._call
    monkeypatch.setattr(
        type(runner), "_call", lambda self, program, *args: names.append(program.name) or call(self, program, *args)
    )
    d = Driver(runner)
    d.start(1, wants([4, 8, 1], 0))
    d.run([(1, 3)], output_details=True, input_spans=np.array([(0, 2)], np.int32))
    d.run((), [1], output_details=True)
    d.run((), [1])
    assert names == [
        *("forward_extend_10", "sample_4", "output_logprobs_4", "input_logprobs_10"),
        *("forward_decode_1", "sample_1", "output_logprobs_1", "decode_1"),
    ]


def test_all_programs_are_known(runner):
    assert sorted(n for n in runner.programs if "logprobs" in n) == [
        *("input_logprobs_10", "input_logprobs_150", "input_logprobs_38"),
        *("output_logprobs_1", "output_logprobs_2", "output_logprobs_4"),
    ]
    bare = make_runner(BigramModel(TABLE))
    assert not any(n.startswith(("forward", "sample", "input", "output")) for n in bare.programs)
    bare.shutdown()


def test_copies_start_with_the_launch_and_are_read_in_wait(runner, monkeypatch):
    copied, fetched = [], []
    start, fetch = fetching.start, fetching.fetch
    monkeypatch.setattr(fetching, "start", lambda array: copied.append(array) or start(array))
    monkeypatch.setattr(fetching, "fetch", lambda array: fetched.append(array) or fetch(array))
    d = Driver(runner)
    d.start(1, wants([4, 8, 1], 0))
    launched = d.launch([(1, 3)], output_details=True, input_spans=np.array([(0, 2)], np.int32))
    assert (len(copied), fetched) == (3, [])
    d.take(launched)
    assert [id(x) for x in fetched] == [id(x) for x in copied]


def test_a_step_is_ready_when_its_details_are(runner):
    d = Driver(runner)
    d.start(1, wants([4, 8, 1]))
    launched = d.launch([(1, 3)], output_details=True)
    runner.block(launched[1])
    assert runner.is_ready(launched[1])
    launched[1].details = SimpleNamespace(arrays=[SimpleNamespace(is_ready=lambda: False)])
    assert not runner.is_ready(launched[1])


@pytest.mark.slow
def test_the_host_is_ahead_of_a_slow_device():
    """By order: launches return while the step before runs, and a result is taken while the next one runs."""
    turns = 60 if jax.default_backend() == "cpu" else 6000
    slow = make_runner(SlowModel(turns), max_running_requests=2, chunked_prefill_size=8, max_logprobs=K)
    slow.warm_up()
    d = Driver(slow)
    d.start(1, wants([1, 2, 3], 0, token_ids=(5,)))
    pending = d.launch([(1, 3)], output_details=True, input_spans=np.array([(0, 2)], np.int32))
    for _ in range(5):
        following = d.launch((), [1], output_details=True)
        assert not slow.is_ready(following[1])
        assert not slow.is_ready(pending[1])
        result = d.take(pending)
        assert slow.is_ready(pending[1])
        assert not slow.is_ready(following[1])
        assert result.output_details.top_ids[0, 0] == result.tokens[0]
        pending = following
    slow.block(pending[1])
    assert slow.is_ready(pending[1])
    d.take(pending)
    assert d.outputs[1] == ChecksumConfig().oracle([1, 2, 3], 6)
    slow.shutdown()


def test_what_is_refused(runner):
    with pytest.raises(ValueError, match="max_logprobs 51 is above the vocabulary of 50 ids"):
        make_runner(BigramModel(TABLE), max_logprobs=51)
    bare = make_runner(BigramModel(TABLE))
    for fields in ({"output_details": True}, {"input_spans": np.array([(0, 1)], np.int32)}):
        d = Driver(bare)
        d.start(1, wants([4, 8], 0))
        with pytest.raises(ValueError, match="launch 1 wants details of log-probabilities, but max_logprobs is 0"):
            d.launch([(1, 2)], **fields)
    bare.shutdown()
    for more in ({"top": K + 1}, {"token_ids": (1,) * (K + 1)}):
        d = Driver(runner)
        d.start(1, wants([4, 8], **more))
        with pytest.raises(ValueError, match="r wants more logprobs than max_logprobs 4"):
            d.launch([(1, 2)], output_details=True)


def test_a_verify_step_gives_none():
    drafts = {"speculative_algorithm": "EAGLE", "speculative_num_draft_tokens": 2}
    config = EngineConfig(model_path="checksum", max_running_requests=2, max_logprobs=K, **drafts)
    speculating = JaxRunner(
        ChecksumModel(), config, max_total_tokens=64, context_length=32, speculator=ToySpeculator(2)
    )
    d = Driver(speculating)
    d.start(1, wants([4, 8]))
    result = d.run([(1, 2)], output_details=True)
    assert result.output_details.top_ids[0, 0] == result.tokens[0]
    with pytest.raises(ValueError, match="launch 2 wants details of log-probabilities, but verify steps give none"):
        d.launch((), [1], output_details=True)
    speculating.shutdown()
