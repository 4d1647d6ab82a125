"""Schemas of real configuration files (check-jsonschema's): each compiles, or is refused with a reason."""

import importlib.resources
import time

from helpers_grammar import byte_backend, grammar


def test_real_schemas_compile_or_are_refused():
    folder = importlib.resources.files("check_jsonschema").joinpath("builtin_schemas", "vendor")
    files = sorted(f for f in folder.iterdir() if f.name.endswith(".json"))
    assert len(files) >= 26
    backend, reasons = byte_backend(), {}
    for file in files:
        begin = time.perf_counter()
        try:
            grammar(backend, "json_schema", file.read_text(encoding="utf-8"))
            reasons[file.name] = ""
        except ValueError as e:
            reasons[file.name] = str(e).split("\n")[0]
            assert reasons[file.name]
        ms = 1e3 * (time.perf_counter() - begin)
        print(f"{file.name:32} {ms:6.1f} ms  {reasons[file.name][:80] or 'compiled'}")
    assert reasons["codecov.json"] == ""
    assert "uniqueItems" in reasons["travis.json"]
