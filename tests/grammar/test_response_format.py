"""OpenAI's response_format objects, and schemas given as dicts."""

import json

import pytest

from jaxoverlap.grammar.response_format import schema_of
from jaxoverlap.sampling_params import SamplingParams

SCHEMA = {"type": "object", "properties": {"b": {}, "a": {}}}


@pytest.mark.parametrize(
    ("given", "want"),
    [
        (None, None),
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"type": "object"}),
        ({"type": "json_schema", "json_schema": {"schema": SCHEMA}}, SCHEMA),
        ({"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}, SCHEMA),
        ({"type": "json_schema", "json_schema": {"schema": True}}, True),
    ],
)
def test_what_is_asked_for(given, want):
    got = schema_of(given)
    assert (None if got is None else json.loads(got)) == want


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ("json", "must be an object with a type, not str"),
        ({}, "type must be one of text, json_object, json_schema, not None"),
        ({"type": "xml"}, "not 'xml'"),
        ({"type": "text", "schema": {}}, "unknown field 'schema' of type text"),
        ({"type": "json_schema"}, "json_schema must be an object with a schema"),
        ({"type": "json_schema", "json_schema": {"schema": "{}"}}, "json_schema must be an object with a schema"),
        ({"type": "json_schema", "json_schema": {"schema": {}, "mode": 1}}, "unknown field json_schema.mode"),
        ({"type": "json_schema", "json_schema": {"schema": {"const": float("nan")}}}, "json_schema.schema is not JSON"),
        ({"type": "json_schema", "json_schema": {"schema": {"const": {1, 2}}}}, "json_schema.schema is not JSON"),
    ],
)
def test_what_is_wrong_is_named(given, part):
    with pytest.raises(ValueError, match=part):
        schema_of(given)


def test_a_schema_may_be_a_dict_and_keeps_its_order():
    kind, text = SamplingParams(json_schema=SCHEMA).grammar_key
    assert kind == "json_schema"
    assert list(json.loads(text)["properties"]) == ["b", "a"]
    with pytest.raises(ValueError, match="json_schema is not JSON"):
        SamplingParams(json_schema={"const": {1}})
    with pytest.raises(ValueError, match="only one grammar at a time: json_schema and regex"):
        SamplingParams(json_schema=SCHEMA, regex="a")
