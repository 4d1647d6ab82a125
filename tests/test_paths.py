from pathlib import Path

import pytest

from jaxoverlap.paths import cache_dir


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, "/home/someone/.cache/jaxoverlap"),
        ({"XDG_CACHE_HOME": "/xdg"}, "/xdg/jaxoverlap"),
        ({"XDG_CACHE_HOME": "relative"}, "/home/someone/.cache/jaxoverlap"),
        ({"XDG_CACHE_HOME": ""}, "/home/someone/.cache/jaxoverlap"),
        ({"XDG_CACHE_HOME": "/xdg", "JAXOVERLAP_CACHE_DIR": "/own"}, "/own"),
        ({"JAXOVERLAP_CACHE_DIR": "~/own"}, "/home/someone/own"),
    ],
)
def test_cache_dir(monkeypatch, variables, expected):
    for name in ("XDG_CACHE_HOME", "JAXOVERLAP_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/someone")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_dir() == Path(expected)
