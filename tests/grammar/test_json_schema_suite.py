"""JSON Schema's own test suite, token by token: every schema is enforced exactly, or refused with a reason."""

import collections
import itertools
import json
import lzma
import re
from pathlib import Path

import pytest
from helpers_grammar import SPACES, grammar, takes, texts

from jaxoverlap.grammar.backend import LLGuidanceBackend
from jaxoverlap.tokenizer import Tokenizer

SUITE = Path(__file__).parents[1] / "data" / "json_schema_suite.json.xz"
TEXTS = 200  # of one value

# Why schemas are refused, and how many of the suite's. The first are counted by keyword; a schema may have several.
UNIMPLEMENTED = r"Unimplemented keys: \[(.*)\]"
REFUSED = {
    UNIMPLEMENTED: 158,
    "Resource '[^']+' is not present in a registry": 25,
    "Unknown format": 20,
    "oneOf constraints are not supported": 8,
    r"Expected positive integer for '\w+', got \d\.0": 6,
    "Unsatisfiable schema": 5,
    "Failed to generate regex for float range": 4,
    "patternProperty regexes .* are not disjoint": 3,
    "regex parse error": 2,
    "Value for 'multipleOf' has too many digits": 1,
    "json_schema is false": 1,
}
KEYWORDS = {
    "unevaluatedProperties": 42,
    "unevaluatedItems": 27,
    "contains": 18,
    "if": 18,
    "$dynamicRef": 13,
    "then": 13,
    "not": 12,
    "else": 11,
    "minContains": 9,
    "propertyNames": 8,
    "dependentSchemas": 7,
    "maxContains": 7,
    "dependencies": 7,
    "uniqueItems": 6,
    "$dynamicAnchor": 5,
    "dependentRequired": 4,
}
# format.json takes a format for an annotation; here it is enforced, as in optional/format/.
ANNOTATIONS = ("format.json", "is only an annotation by default")


@pytest.fixture(scope="module")
def backend(demo_model):
    return LLGuidanceBackend(Tokenizer.from_dir(demo_model), 49152, (2,), SPACES)


def accepts(backend, schema, value):
    """Whether any text of the value is a whole output."""
    tokenizer = backend.tokenizer
    for text in itertools.islice(texts(value), TEXTS):
        if takes(backend, "json_schema", schema, tokenizer.tokenize_str(text)):
            return True
    return False


@pytest.mark.demo
def test_every_schema_is_enforced_or_refused(backend):
    reasons, keywords = collections.Counter(), collections.Counter()
    schemas = instances = annotations = 0
    wrong = []
    for file, cases in json.loads(lzma.decompress(SUITE.read_bytes())).items():
        for case in cases:
            text = json.dumps(case["schema"])
            try:
                grammar(backend, "json_schema", text)
            except ValueError as e:
                reason = next(r for r in REFUSED if re.search(r, str(e)))
                reasons[reason] += 1
                if reason == UNIMPLEMENTED:
                    keywords.update(json.loads(f"[{re.search(reason, str(e))[1]}]"))
                continue
            schemas += 1
            for test in case["tests"]:
                if file == ANNOTATIONS[0] and test["description"].endswith(ANNOTATIONS[1]):
                    annotations += 1
                    assert not accepts(backend, text, test["data"])
                    continue
                instances += 1
                if accepts(backend, text, test["data"]) != test["valid"]:
                    wrong.append((file, case["description"], test["description"]))
    print(f"{schemas} schemas enforced on {instances} instances, {reasons.total()} refused: {dict(reasons)}")
    assert wrong == []
    assert (schemas, instances, annotations) == (205, 983, 10)
    assert reasons == REFUSED
    assert keywords == KEYWORDS
