"""`--against-sglang` with a stand-in for the package `sglang`: what it is given, and what its answers become."""

import json
import subprocess
import sys

import pytest
from helpers_engine import oracle

from jaxoverlap.compare import against_sglang
from jaxoverlap.compare.measure import Comparison, Run
from jaxoverlap.config import EngineConfig
from jaxoverlap.trace.events import Trace

STAND_IN = '''
import sys
class Engine:
    """Of sglang.Engine what the load needs; answers with the checksum rule, one token of each request a step."""
    def __init__(self, **settings):
        if settings["page_size"] == 16:
            raise RuntimeError("no kernel for page size 16")
        print("noise of a start")
        assert "jax" not in sys.modules
        assert set(settings) >= {"model_path", "dtype", "disable_overlap_schedule", "max_running_requests"}
        self.late = settings["disable_overlap_schedule"]
    def flush_cache(self):
        pass
    def shutdown(self):
        pass
    def generate(self, *, input_ids, sampling_params, stream):
        assert stream and sampling_params == {"max_new_tokens": 4, "temperature": 0.0}
        outs = [[] for _ in input_ids]
        for step in range(4):
            for i, ids in enumerate(input_ids):
                h = 7
                for at, t in enumerate([*ids, *outs[i]]):
                    h = (h * 31 + (t + 1) * (at % 13 + 1)) % 1_000_003
                outs[i].append(0 if self.late and step == 3 else 10 + h % 900)
                yield {"index": i, "output_ids": list(outs[i])}
'''
PROMPTS = [[5, 6, 7], [8, 9]]
PARAMS = {"max_new_tokens": 4, "temperature": 0.0, "sampling_seed": 0}


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    (tmp_path / "sglang.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return tmp_path


def test_the_rows(stand_in):
    ours = [oracle(p, 4) for p in PROMPTS]
    comparison = Comparison(PROMPTS, {"normal": [Run(ours, [], 1.0, Trace())]})
    rows = against_sglang.measure(EngineConfig(model_path=str(stand_in)), comparison, PARAMS, 2)
    assert list(rows) == ["normal", "overlap"]
    assert [rows[loop]["same_tokens"] for loop in rows] == [6, 8]
    assert all(rows[loop]["tokens"] == 8 for loop in rows)
    for row in rows.values():
        assert row["ttft_ms"]["p50"] > 0
        assert row["step_ms"]["p50"] >= 0
        assert row["tokens_per_s"]["min"] <= row["tokens_per_s"]["median"] <= row["tokens_per_s"]["max"]
    assert json.loads(json.dumps(rows)) == rows
    assert against_sglang.table(rows).row_count == 2


def test_what_it_said_when_it_failed_is_told(stand_in):
    comparison = Comparison(PROMPTS, {"normal": [Run([[1], [2]], [], 1.0, Trace())]})
    with pytest.raises(OSError, match="no kernel for page size 16"):
        against_sglang.measure(EngineConfig(model_path=str(stand_in), page_size=16), comparison, PARAMS, 1)


def test_a_model_without_weights_is_refused(monkeypatch):
    monkeypatch.setattr(against_sglang.importlib.util, "find_spec", lambda name: object())
    for config in (EngineConfig(model_path="checksum"), EngineConfig(device="simulated")):
        with pytest.raises(ValueError, match="model with weights"):
            against_sglang.check(config)


def test_its_process_loads_no_jax():
    code = f"import sys, {against_sglang.PROCESS}; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
