"""`python -m jaxoverlap.compare.sglang_process`: a load as JSON on stdin, its runs through sglang.Engine as the
last line of stdout; see against_sglang.py. Imports no jax, so that the device is SGLang's alone."""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def run(engine: Any, prompts: list[list[int]], params: dict[str, Any]) -> dict[str, Any]:
    """All requests at once, streamed."""
    engine.flush_cache()
    outputs: list[list[int]] = [[] for _ in prompts]
    arrivals: list[list[float]] = [[] for _ in prompts]
    begin = time.perf_counter()
    for chunk in engine.generate(input_ids=prompts, sampling_params=params, stream=True):
        i = chunk.get("index", 0)
        if len(chunk["output_ids"]) > len(outputs[i]):
            outputs[i] = list(chunk["output_ids"])
            arrivals[i].append(time.perf_counter() - begin)
    return {"output_ids": outputs, "arrivals": arrivals}


def main() -> None:
    import sglang

    load = json.load(sys.stdin)
    engine = sglang.Engine(**load["engine"])
    try:
        run(engine, load["prompts"], load["params"])
        runs = [run(engine, load["prompts"], load["params"]) for _ in range(load["repeats"])]
    finally:
        engine.shutdown()
    print(json.dumps(runs))


if __name__ == "__main__":
    main()
