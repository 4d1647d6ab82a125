"""Reads what XLA's GPU compiler dumps. Imports no jax."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

OUR_KERNELS = ("future_map_scatter", "future_map_gather", "kv_write", "decode_attention", "extend_attention", "sample")
_HLO_TYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16", "int32": "s32", "uint32": "u32", "bool": "pred"}


def command_buffers(folder: Path) -> tuple[int, int]:
    """CUDA graphs of a program and operations outside of them, from the one thunk sequence dumped in `folder`.

    Raises ValueError where there is none: this version of XLA dumps something else.
    """
    files = sorted(folder.glob("*thunk_sequence_after_thunk_passes.txt")) or sorted(folder.glob("*thunk_sequence.txt"))
    if not files:
        raise ValueError("this version of XLA dumps no thunk sequence")
    kinds = re.findall(r"^\d+: (k\w+)", files[0].read_text(), re.MULTILINE)  # those inside a graph are indented
    graphs = kinds.count("kCommandBuffer")
    return graphs, len(kinds) - graphs


def copies_of(hlo: str, arrays: Sequence[Any]) -> int:
    """Copies, in a compiled module's text, of anything with an array's type and number of elements."""
    sizes = {(_HLO_TYPES[a.dtype.name], a.size) for a in arrays}
    copies = 0
    for kind, dims in re.findall(r"= \(?(\w+)\[([\d,]*)\][^=]*? copy(?:-start)?(?:[.\d]*)?\(", hlo):
        size = 1
        for dim in dims.split(","):
            size *= int(dim or 1)
        copies += (kind, size) in sizes
    return copies


def custom_calls(hlo: str) -> dict[str, int]:
    """Calls of a compiled module: Pallas kernels by their name, others by their target."""
    calls: Counter[str] = Counter()
    for line in hlo.splitlines():
        target = re.search(r'custom_call_target="([^"]+)"', line)
        if target is not None:
            name = re.search(r'\bname = "(\w+)"', line) if target[1].endswith("triton") else None
            calls[(name or target)[1]] += 1
    return dict(calls)


def collectives(hlo: str) -> dict[str, dict[str, int]]:
    """Of a compiled module: {operation: {a device's operand, as "bf16[64,1024]": how many}}."""
    shapes = dict(re.findall(r"%([\w.-]+) = (\w+\[[\d,]*\])", hlo))
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute|collective-broadcast"
    out: dict[str, Counter[str]] = {}
    for kind, operand in re.findall(rf" ({kinds})(?:-start)?\(%([\w.-]+)", hlo):
        out.setdefault(kind, Counter())[shapes.get(operand, "?")] += 1
    return {kind: dict(counts) for kind, counts in out.items()}


def spills(folder: Path) -> int | None:
    """Bytes that our kernels spill from registers, stores and loads, by ptxas on the dumped PTX; None where the version
    dumps none of theirs or there is no ptxas."""
    ptxas = find_ptxas()
    texts = {p.read_text() for p in folder.glob("*.ptx")}
    ours = [t for t in texts if re.search(rf"\.entry (?:{'|'.join(OUR_KERNELS)})\w*\(", t)]
    if ptxas is None or not ours:
        return None
    total = 0
    for text in ours:
        target = re.search(r"^\.target (\w+)", text, re.MULTILINE)
        assert target is not None
        command = [ptxas, "--gpu-name", target[1], "-v", "-", "-o", os.devnull]
        told = subprocess.run(command, input=text, capture_output=True, text=True, check=True).stderr
        total += sum(int(n) for n in re.findall(r"(\d+) bytes spill", told))
    return total


def find_ptxas() -> str | None:
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which("ptxas") or shutil.which("ptxas", path=str(Path(home) / "bin"))
