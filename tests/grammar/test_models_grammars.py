"""Grammars on real models: SmolLM2 with half its requests constrained, and a tiny random one through Engine's front."""

import dataclasses
import json
from pathlib import Path

import jsonschema
import pytest
from helpers_models import make_hf_dir

from jaxoverlap.config import EngineConfig
from jaxoverlap.core import RequestError
from jaxoverlap.device.buckets import Bucket, Buckets
from jaxoverlap.device.runner import JaxRunner
from jaxoverlap.engine import Engine
from jaxoverlap.loading import load_grammar_backend
from jaxoverlap.models import registry

GOLDENS = json.loads((Path(__file__).parents[1] / "data" / "smollm2_goldens.json").read_text())["cases"]


def an_object(**properties):
    names = list(properties)
    return {"type": "object", "properties": properties, "required": names, "additionalProperties": False}


# None can take more than CAP tokens, were every character written as an escape.
CAP = 110
WORD = {"type": "string", "maxLength": 8}
NUMBER = {"type": "integer", "minimum": 0, "maximum": 999}
ASKED = [
    ("Name a car brand and a number.", an_object(brand=WORD, n=NUMBER)),
    ("Describe a cat.", an_object(name=WORD, age=NUMBER, colour={"enum": ["black", "white", "red"]})),
    ("List some colours.", {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 4}),
    ("Is the sky blue?", an_object(answer={"type": "boolean"})),
    ("When was the moon landing?", an_object(date={"type": "string", "format": "date"})),
    ("Give me three numbers.", {"type": "array", "items": NUMBER, "minItems": 3, "maxItems": 3}),
    ("What is the capital of France?", {"anyOf": [WORD, {"type": "null"}]}),
    ("Where are you?", an_object(point=an_object(x=NUMBER, y=NUMBER), label=WORD)),
]


@pytest.fixture(scope="module")
def smollm2(demo_model):
    config = EngineConfig(
        model_path=str(demo_model),
        dtype="float32",
        context_length=160,
        max_total_tokens=2560,
        max_running_requests=16,
        chunked_prefill_size=128,
    )
    model = registry.load(config)
    one_shape_each = Buckets((Bucket(16, 16, 16, True),), (Bucket(128, 16, 144, False),))
    lengths = {"max_total_tokens": 2560, "context_length": 160}
    runner = JaxRunner(model.module, config, cut=True, buckets=one_shape_each, **lengths)
    runner.warm_up()
    backend = load_grammar_backend(config, model)
    yield config, model, runner, 2560, backend
    backend.shutdown()
    runner.shutdown()


@pytest.mark.slow
@pytest.mark.demo
def test_sixteen_at_once_half_of_them_constrained(smollm2):
    """H7 and H8 on a real model. The free ones' tokens are the reference's, each alone."""
    config, *parts = smollm2
    outputs = {}
    for off in (True, False):
        engine = Engine.from_parts(dataclasses.replace(config, disable_overlap_schedule=off), *parts)
        prompts, sampling = [], []
        for golden, (question, schema) in zip(GOLDENS, ASKED):
            prompts += [golden["prompt_ids"], engine.tokenizer.encode_chat([{"role": "user", "content": question}])]
            sampling += [
                {"temperature": 0.0, "max_new_tokens": 48},
                {"temperature": 0.0, "max_new_tokens": CAP, "json_schema": schema},
            ]
        before = engine.runner.compiles
        results = engine.generate(input_ids=prompts, sampling_params=sampling)
        engine.wait_idle()
        assert engine.runner.compiles == before
        for golden, result in zip(GOLDENS, results[0::2]):
            assert result["output_ids"] == golden["output_ids"], golden["prompt"]
        for (_, schema), result in zip(ASKED, results[1::2]):
            assert result["meta_info"]["finish_reason"]["type"] == "stop"
            jsonschema.validate(json.loads(result["text"]), schema, format_checker=jsonschema.FormatChecker())
        outputs[off] = [result["output_ids"] for result in results]
        assert (engine.metrics()["sampling_delayed"] > 0) != off
    assert outputs[True] == outputs[False]


def constrained_chat(directory, **settings):
    """Both loops on a tiny random model, whose vocabulary is wider than its tokenizer's: the answers."""
    schema, outputs = ASKED[1][1], []
    for off in (False, True):
        settings = {"max_running_requests": 2, "context_length": 128, "max_total_tokens": 256, **settings}
        with Engine(str(directory), disable_overlap_schedule=off, **settings) as engine:
            messages = [{"role": "user", "content": "A cat?"}]
            wanted = {"type": "json_schema", "json_schema": {"schema": schema}}
            params = {"temperature": 1.0, "sampling_seed": 7, "max_new_tokens": 100}
            result = engine.chat(messages, params, response_format=wanted)
            assert result["meta_info"]["finish_reason"] == {"type": "stop"}
            jsonschema.validate(json.loads(result["text"]), schema)
            free = engine.generate("abc", {"temperature": 0.0, "max_new_tokens": 4, "ignore_eos": True})
            outputs.append((result["output_ids"], free["output_ids"]))
    return outputs


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_hf_dir(tmp_path_factory.mktemp("tiny"))


@pytest.mark.slow
def test_chat_with_a_response_format(tiny):
    overlap, normal = constrained_chat(tiny, skip_warmup=True, dtype="float32")
    assert overlap == normal


def test_no_cut_programs_where_there_are_no_grammars(tiny):
    settings = {"max_running_requests": 1, "context_length": 64, "max_total_tokens": 64, "skip_warmup": True}
    with Engine(str(tiny), grammar_backend="none", **settings) as engine:
        assert not any(name.startswith(("forward", "sample")) for name in engine.runner.programs)
        with pytest.raises(RequestError, match="json_schema needs grammar_backend llguidance, not none"):
            engine.generate("a", {"json_schema": "{}"})


@pytest.mark.gpu
def test_constrained_chat_on_a_gpu(tiny):
    overlap, normal = constrained_chat(tiny, dtype="float32")
    assert overlap == normal
