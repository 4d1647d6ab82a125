import numpy as np
import pytest
from helpers_engine import byte_level_tokenizer

from jaxoverlap.core import RequestError
from jaxoverlap.request_input import RequestInput, split
from jaxoverlap.requests import Limits, RequestFactory
from jaxoverlap.sampling_params import SamplingParams

LIMITS = Limits(
    vocab_size=257,
    context_length=64,
    max_total_tokens=128,
    max_prompt_len=57,
    eos_token_ids=(256,),
    max_logprobs=4,
    no_grammars="needs a grammar backend",
)
ASKED = {"input_ids": [1, 2], "return_logprob": True}


def factory(tokenizer=True, seed=0, **limits):
    values = {name: getattr(LIMITS, name) for name in LIMITS.__slots__} | limits
    return RequestFactory(Limits(**values), byte_level_tokenizer() if tokenizer else None, seed)


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ({"input_ids": []}, ["input_ids is empty"]),
        ({"prompt": ""}, ["prompt is empty"]),
        ({}, ["one of prompt and input_ids"]),
        ({"prompt": "a", "input_ids": [1]}, ["one of prompt and input_ids"]),
        ({"prompt": 5}, ["prompt", "string", "int"]),
        ({"prompt": "x" * 58}, ["prompt has 58 tokens", "57", "context_length 64", "max_total_tokens 128"]),
        ({"input_ids": [1] * 58}, ["input_ids has 58 tokens", "57"]),
        ({"input_ids": "abc"}, ["input_ids must be a list of ints", "str"]),
        ({"input_ids": 7}, ["input_ids must be a list of ints", "int"]),
        ({"input_ids": [1, 2.0]}, ["input_ids must hold ints", "float"]),
        ({"input_ids": [1, True]}, ["input_ids must hold ints", "bool"]),
        ({"input_ids": [1, 257]}, ["input_ids holds 257", "0 to 256"]),
        ({"input_ids": [-1, 1]}, ["input_ids holds -1", "0 to 256"]),
        ({"input_ids": [1 << 80]}, ["input_ids holds", "0 to 256"]),
        ({"input_ids": np.array([1.5])}, ["input_ids", "float64"]),
        ({"input_ids": np.array([300])}, ["input_ids holds 300", "0 to 256"]),
        ({"input_ids": [1], "rid": ""}, ["rid", "non-empty string"]),
        ({"input_ids": [1], "rid": 3}, ["rid", "non-empty string", "3"]),
        ({"input_ids": [1], "rid": "live"}, ["rid 'live'", "in use"]),
        ({"input_ids": [1], "stream": 1}, ["stream", "bool"]),
        ({"input_ids": [1], "return_logprob": "yes"}, ["return_logprob", "bool"]),
        ({"input_ids": [1], "logprob_start_len": 0}, ["logprob_start_len needs return_logprob"]),
        ({"input_ids": [1], "top_logprobs_num": 1}, ["top_logprobs_num needs return_logprob"]),
        ({"input_ids": [1], "token_ids_logprob": [1]}, ["token_ids_logprob needs return_logprob"]),
        ({**ASKED, "logprob_start_len": -2}, ["logprob_start_len", "-1", "-2"]),
        ({**ASKED, "logprob_start_len": 3}, ["logprob_start_len", "at most 2", "the prompt's", "not 3"]),
        ({**ASKED, "logprob_start_len": 0.0}, ["logprob_start_len", "float"]),
        ({**ASKED, "logprob_start_len": False}, ["logprob_start_len", "bool"]),
        ({**ASKED, "top_logprobs_num": -1}, ["top_logprobs_num", "at least 0"]),
        ({**ASKED, "top_logprobs_num": 5}, ["top_logprobs_num asks for 5 ids, above the setting max_logprobs 4"]),
        ({**ASKED, "token_ids_logprob": 7}, ["token_ids_logprob", "list of ints"]),
        ({**ASKED, "token_ids_logprob": [1.0]}, ["token_ids_logprob", "ints"]),
        ({**ASKED, "token_ids_logprob": [257]}, ["token_ids_logprob holds 257", "256"]),
        ({**ASKED, "token_ids_logprob": [1] * 5}, ["token_ids_logprob asks for 5 ids", "max_logprobs 4"]),
        ({"input_ids": [1], "priority": 1.0}, ["priority", "int"]),
        ({"input_ids": [1], "priority": 1}, ["priority", "enable_priority_scheduling"]),
        ({"input_ids": [1], "response_format": {"type": "json_object"}}, ["response_format needs a grammar backend"]),
        ({"input_ids": [1], "response_format": {"type": "xml"}}, ["response_format", "type", "'xml'", "json_schema"]),
    ],
)
def test_refused(given, parts):
    with pytest.raises(RequestError) as e:
        factory().make(RequestInput(**given), live={"live"})
    for part in parts:
        assert part in str(e.value)


@pytest.mark.parametrize(
    ("params", "parts"),
    [
        (5, ["sampling_params", "dict", "int"]),
        ({"temprature": 1}, ["unknown", "'temprature'"]),
        ({3: 1}, ["unknown", "3"]),
        ({"temperature": -0.1}, ["temperature", "0", "-0.1"]),
        ({"temperature": float("nan")}, ["temperature"]),
        ({"temperature": "hot"}, ["temperature"]),
        ({"stop": 5}, ["stop", "int"]),
        ({"stop": [5]}, ["stop", "int"]),
        ({"stop": ""}, ["stop", "empty"]),
        ({"max_new_tokens": -1}, ["max_new_tokens", "-1"]),
        ({"max_new_tokens": 1.5}, ["max_new_tokens", "float"]),
        ({"top_p": 0.0}, ["top_p"]),
        ({"top_k": 0}, ["top_k"]),
        ({"json_schema": "{}"}, ["json_schema", "grammar"]),
        ({"regex": "a"}, ["regex", "grammar"]),
        ({"ebnf": "a"}, ["ebnf", "grammar"]),
        ({"frequency_penalty": 2.1}, ["frequency_penalty", "-2", "2.1"]),
        ({"presence_penalty": -2.1}, ["presence_penalty", "-2", "-2.1"]),
        ({"repetition_penalty": 0.0}, ["repetition_penalty", "at least 1.17"]),
        ({"repetition_penalty": 2.1}, ["repetition_penalty", "at most 2", "2.1"]),
        ({"min_new_tokens": 9, "max_new_tokens": 8}, ["min_new_tokens 9", "max_new_tokens 8"]),
        ({"min_new_tokens": -1}, ["min_new_tokens", "-1"]),
        ({"logit_bias": [5]}, ["logit_bias", "dict", "list"]),
        ({"logit_bias": {257: 1.0}}, ["logit_bias holds 257", "257 ids"]),
        ({"logit_bias": {"-1": 1.0}}, ["logit_bias", "int", "str"]),
        ({"logit_bias": {"9" * 5000: 1.0}}, ["logit_bias", "int", "str"]),
        ({"logit_bias": {-1: 1.0}}, ["logit_bias", "-1"]),
        ({"logit_bias": {5: float("inf")}}, ["logit_bias", "id 5", "inf"]),
        ({"logit_bias": {5: float("nan")}}, ["logit_bias", "id 5", "nan"]),
        ({"logit_bias": {5: None}}, ["logit_bias", "id 5", "NoneType"]),
        ({"logit_bias": {5: 1.0, "5": 2.0}}, ["logit_bias", "id 5 twice"]),
        ({"n": 0}, ["n must be at least 1", "0"]),
        ({"n": 1 << 20}, ["n must be", "at most 16384"]),
        ({"structural_tag": "{}"}, ["structural_tag"]),
        ({"custom_params": {"a": 1}}, ["custom_params"]),
        ({"stop_regex": "("}, ["stop_regex '('", "not a regular expression"]),
        ({"stop_regex": ["a", 5]}, ["stop_regex", "int"]),
        ({"stop_regex": ""}, ["stop_regex", "empty"]),
        ({"spaces_between_special_tokens": 0}, ["spaces_between_special_tokens", "bool"]),
        ({"stop_token_ids": [257]}, ["stop_token_ids holds 257", "257 ids"]),
        ({"sampling_seed": 1 << 32}, ["sampling_seed", "4294967295"]),
        ({"stop": ["a\ud800"]}, ["stop", "Unicode"]),
        ({"stream_interval": 1 << 31}, ["stream_interval", "2147483647"]),
        ({"temperature": 10**400}, ["temperature", "3.4"]),
        ({"temperature": True}, ["temperature", "bool"]),
        ({"n": True}, ["n "]),
    ],
)
def test_refused_sampling_params(params, parts):
    with pytest.raises(RequestError) as e:
        factory().make(RequestInput(input_ids=[1], sampling_params=params))
    for part in parts:
        assert part in str(e.value)


def test_without_a_tokenizer():
    with pytest.raises(RequestError, match=r"prompt needs a tokenizer.*input_ids"):
        factory(tokenizer=False).make(RequestInput(prompt="a"))
    for name in ("stop", "stop_regex"):
        with pytest.raises(RequestError, match=rf"{name} needs a tokenizer.*stop_token_ids"):
            factory(tokenizer=False).make(RequestInput(input_ids=[1], sampling_params={name: "a"}))


def test_the_longest_prompt_is_taken():
    assert factory().make(RequestInput(input_ids=[1] * 57)).prompt_len == 57


def test_what_a_request_holds():
    params = SamplingParams(stop_token_ids=[9, 256], temperature=0.5)
    given = RequestInput(prompt="hi", sampling_params=params, rid="a", stream=True, return_logprob=True, priority=-3)
    r = factory(priorities=True).make(given)
    assert (r.rid, r.text, r.stream, r.return_logprob, r.priority) == ("a", "hi", True, True, -3)
    assert r.prompt_ids.tolist() == [104, 105]
    assert r.prompt_ids.dtype == np.int32
    assert r.params is params
    assert r.stop_ids == (256, 9)


@pytest.mark.parametrize(
    "asked",
    [{"logprob_start_len": 1}, {"top_logprobs_num": 1}, {"token_ids_logprob": [3]}],
    ids=lambda x: next(iter(x)),
)
def test_details_need_max_logprobs(asked):
    with pytest.raises(RequestError, match=f"{next(iter(asked))} needs the setting max_logprobs, which is 0"):
        factory(max_logprobs=0).make(RequestInput(**ASKED, **asked))
    assert factory(max_logprobs=0).make(RequestInput(**ASKED, logprob_start_len=2)).details is None


@pytest.mark.parametrize(
    ("asked", "start", "limit"),
    [
        ({}, None, 2),  # -1: the outputs alone
        ({"logprob_start_len": None, "top_logprobs_num": None, "token_ids_logprob": []}, None, 2),
        ({"top_logprobs_num": 4}, 2, 2),
        ({"token_ids_logprob": [0, 256]}, -1, 5),  # as SGLang: then -1 limits no match
        ({"logprob_start_len": 0}, 0, 0),
        ({"logprob_start_len": 1, "token_ids_logprob": (5,)}, 1, 1),
        ({"logprob_start_len": 2}, None, 2),
    ],
)
def test_where_input_logprobs_begin(asked, start, limit):
    """`limit`: tokens that a prefix match may give, of six (the prompt, and outputs from before a retraction)."""
    r = factory().make(RequestInput(**ASKED, **asked))
    assert (None if r.details is None else r.details.start) == start
    assert r.max_prefix_len(6) == limit
    assert r.max_prefix_len(1) == 0
    assert factory().make(RequestInput(input_ids=[1, 2])).max_prefix_len(6) == 5


def test_ignore_eos_drops_all_stop_ids():
    given = RequestInput(input_ids=[1], sampling_params={"ignore_eos": True, "stop_token_ids": [9]})
    assert factory().make(given).stop_ids == ()


def test_the_ids_are_a_copy():
    ids = np.array([1, 2], np.int32)
    r = factory().make(RequestInput(input_ids=ids))
    ids[:] = 0
    assert r.prompt_ids.tolist() == [1, 2]


def test_sglangs_defaults_and_not_the_models():
    r = factory().make(RequestInput(input_ids=[1]))
    assert (r.params.temperature, r.params.top_p, r.params.top_k, r.params.max_new_tokens) == (1.0, 1.0, -1, 128)


def test_seeds_are_drawn_in_order_by_unseeded_requests_alone():
    f = factory(seed=42)
    rng = np.random.default_rng(42)
    want = [int(rng.integers(1 << 32, dtype=np.uint32)) for _ in range(2)]
    seeds = [f.make(RequestInput(input_ids=[1])).seed]
    assert f.make(RequestInput(input_ids=[1], sampling_params={"sampling_seed": 7})).seed == 7
    with pytest.raises(RequestError):
        f.make(RequestInput(input_ids=[]))
    seeds.append(f.make(RequestInput(input_ids=[1])).seed)
    assert seeds == want


def test_copies_have_seeds_of_their_own():
    f = factory(seed=42)
    rng = np.random.default_rng(42)
    given = RequestInput(input_ids=[1], sampling_params={"n": 3}, rid="a")
    copies = f.copies(f.make(given))
    assert [r.rid for r in copies] == ["a_0", "a_1", "a_2"]
    assert len({id(r.kept_ids) for r in copies}) == 3
    assert len({id(r.prompt_ids) for r in copies}) == 1
    assert [r.seed for r in copies] == [int(rng.integers(1 << 32, dtype=np.uint32)) for _ in range(3)]
    seeded = RequestInput(input_ids=[1], sampling_params={"n": 3, "sampling_seed": 0xFFFFFFFF})
    assert [r.seed for r in f.copies(f.make(seeded))] == [0xFFFFFFFF, 0x9E3779B8, 0x3C6EF371]
    alone = f.make(RequestInput(input_ids=[1], sampling_params={"sampling_seed": 5}, rid="b"))
    assert [(r.rid, r.seed) for r in f.copies(alone)] == [("b", 5)]


@pytest.mark.parametrize("live", ["a", "a_0", "a_1"])
def test_no_copy_may_have_an_id_in_use(live):
    with pytest.raises(RequestError, match=f"rid '{live}' is in use"):
        factory().make(RequestInput(input_ids=[1], sampling_params={"n": 2}, rid="a"), live={live})
    assert factory().make(RequestInput(input_ids=[1], rid="a"), live={"a_0", "a_1"}).rid == "a"


def test_ids_are_made_up_and_differ():
    f = factory()
    assert len({f.make(RequestInput(input_ids=[1])).rid for _ in range(20)}) == 20


def split_(**given):
    names = ("prompt", "input_ids", "sampling_params", "rid", "stream", "return_logprob", "priority")
    more = ("logprob_start_len", "top_logprobs_num", "token_ids_logprob")
    return split(*(given.get(name) for name in names + more))


@pytest.mark.parametrize(
    "given", [{"prompt": "a"}, {"input_ids": [1, 2]}, {"input_ids": np.array([1])}, {"input_ids": []}]
)
def test_single_calls(given):
    rows, many = split_(**given)
    assert not many
    assert len(rows) == 1


def test_list_calls():
    rows, many = split_(prompt=["a", "b"], sampling_params=[{"top_k": 1}, None], rid="x", priority=4)
    assert many
    assert [r.prompt for r in rows] == ["a", "b"]
    assert [r.sampling_params for r in rows] == [{"top_k": 1}, None]
    assert [r.rid for r in rows] == ["x_0", "x_1"]
    assert [r.priority for r in rows] == [4, 4]
    rows, many = split_(input_ids=[[1], [], 5, np.array([2])])
    assert many
    assert [rows[0].input_ids, rows[1].input_ids, rows[2].input_ids] == [[1], [], 5]
    assert len(split_(input_ids=np.ones((3, 2), np.int32))[0]) == 3
    assert split_(prompt=[]) == ([], True)


def test_logprob_arguments_of_list_calls():
    rows, _ = split_(prompt=["a", "b"], logprob_start_len=3, top_logprobs_num=[1, None], token_ids_logprob=[7, 8])
    assert [(r.logprob_start_len, r.top_logprobs_num, r.token_ids_logprob) for r in rows] == [
        (3, 1, [7, 8]),
        (3, None, [7, 8]),
    ]
    rows, _ = split_(prompt=["a", "b"], token_ids_logprob=[[7, 8], None])
    assert [r.token_ids_logprob for r in rows] == [[7, 8], None]
    rows, _ = split_(prompt=["a", "b"], token_ids_logprob=[None, None])
    assert [r.token_ids_logprob for r in rows] == [None, None]
    assert len(split_(prompt=["a", "b"], token_ids_logprob=[np.array([4, 5]), None])[0]) == 2
    rows, _ = split_(prompt=["a", "b"], token_ids_logprob=np.array([4, 5]))
    assert [r.token_ids_logprob.tolist() for r in rows] == [[4, 5], [4, 5]]
    with pytest.raises(RequestError, match="token_ids_logprob has 1 entries for 2 requests"):
        split_(prompt=["a", "b"], token_ids_logprob=[[7]])


def test_a_list_of_another_length_is_refused():
    with pytest.raises(RequestError, match="sampling_params has 1 entries for 2 requests"):
        split_(prompt=["a", "b"], sampling_params=[{}])
    with pytest.raises(RequestError, match="input_ids has 1 entries for 2 requests"):
        split_(prompt=["a", "b"], input_ids=[[1]])
