"""What about this machine's setup makes GPUs slow or unused. Touches no device."""

from __future__ import annotations

import importlib.util
import re
import warnings
from collections.abc import Mapping
from pathlib import Path

PLUGINS = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13")
_GPU_NODES = "nvidia[0-9]*"


class SetupWarning(UserWarning):
    """The machine can do better than its settings let it."""


def advice(environ: Mapping[str, str], *, devices: Path = Path("/dev"), has_plugin: bool | None = None) -> list[str]:
    """One text for each finding: what it costs and how to mend it. `has_plugin`: JAX's CUDA plugin is installed; looked
    up where not given."""
    platforms = [p.strip() for p in environ.get("JAX_PLATFORMS", "").split(",") if p.strip()]
    visible = environ.get("CUDA_VISIBLE_DEVICES", "all") not in ("", "-1") and any(devices.glob(_GPU_NODES))
    wants_gpu = not platforms or {"cuda", "gpu"} & {*platforms}
    if has_plugin is None:
        has_plugin = any(_installed(name) for name in PLUGINS)
    found = []
    if visible and wants_gpu and not has_plugin:
        found.append(
            "an NVIDIA GPU is here but JAX's CUDA plugin is not, so that everything runs on the CPU: "
            "pip install 'jaxoverlap[cuda]', or set JAX_PLATFORMS=cpu if that is what you want"
        )
    if visible and _graphs_are_off(environ.get("XLA_FLAGS", "")):
        found.append(
            "XLA_FLAGS has an empty --xla_gpu_enable_command_buffer=, so that a step is some hundred kernel launches "
            "and not one CUDA graph, and the GPU waits for the host: take the flag out"
        )
    if visible and platforms and "cpu" not in platforms:
        found.append(
            f"JAX_PLATFORMS={','.join(platforms)} hides the host platform, so that data-parallel ranks exchange their "
            f"flags behind the running step instead of beside it: set JAX_PLATFORMS={','.join([*platforms, 'cpu'])}"
        )
    return found


def warn(environ: Mapping[str, str]) -> None:
    """SetupWarning for each finding."""
    for text in advice(environ):
        warnings.warn(text, SetupWarning, stacklevel=2)


def _graphs_are_off(flags: str) -> bool:
    """The last mention of a flag counts."""
    values = re.findall(r"""--xla_gpu_enable_command_buffer=(?:"([^"]*)"|'([^']*)'|(\S*))""", flags)
    return bool(values) and not any(values[-1])


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # there is no package that it could be in
        return False
