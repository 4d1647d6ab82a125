"""Scenarios and the NumPy device for the tests of the replay."""

from pathlib import Path

from host_runner import HostRunner

from jaxoverlap.replay.scenario import CONTEXT_LENGTH, parse_scenario

TRACES = Path(__file__).parents[1] / "conformance" / "traces"


def host_runner(config, scenario, rank):
    pages = config.max_total_tokens // config.page_size
    rows, drafts = config.max_running_requests + 1, config.speculative_num_draft_tokens
    return HostRunner(rows, CONTEXT_LENGTH, pages, config.page_size, scripts=scenario.force, drafts=drafts)


def raw(*ops, force=None, **config):
    """A scenario as a file has it. An op is (turn, name, fields)."""
    settings = {"max_running_requests": 4, "max_total_tokens": 256, "chunked_prefill_size": -1, **config}
    return {
        "name": "mine",
        "config": settings,
        "ops": [{"at": at, "op": op, **fields} for at, op, fields in ops],
        "force": force or {},
    }


def request(rid, n=4, max_new_tokens=3, first=100, **more):
    return {"rid": rid, "prompt_ids": list(range(first, first + n)), "max_new_tokens": max_new_tokens, **more}


def scenario(*ops, **config):
    return parse_scenario(raw(*ops, **config))
