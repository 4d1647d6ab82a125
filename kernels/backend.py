"""Which implementation of an op runs. The one place that decides, and the one that knows the Pallas backend.

The setting (`config.kernels`) names what to use where an op has it; an op without a Pallas version runs its XLA form
under every setting. "auto" follows the platform: see `AUTO`.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton

TRITON_DEPRECATED = "The Pallas Triton backend is deprecated"
Implementation = Literal["pallas", "xla", "interpret"]

# Ops with more than one implementation; every other op is plain XLA. The scatter's "interpret" on CPU keeps a kernel's
# own code in the path of every test, at the price of some microseconds a step.
AUTO: dict[str, dict[str, Implementation]] = {
    "future_map_scatter": {"gpu": "pallas", "cuda": "pallas", "cpu": "interpret"},
    "future_map_gather": {"gpu": "pallas", "cuda": "pallas", "cpu": "xla"},
    "kv_write": {"gpu": "pallas", "cuda": "pallas", "cpu": "xla"},
    "decode_attention": {"gpu": "pallas", "cuda": "pallas", "cpu": "xla"},
    "extend_attention": {"gpu": "pallas", "cuda": "pallas", "cpu": "xla"},
    "grouped_matmul": {"gpu": "pallas", "cuda": "pallas", "cpu": "xla"},
    "sample": {"gpu": "pallas", "cuda": "pallas", "cpu": "xla"},
}


@dataclass(frozen=True, slots=True)
class Kernels:
    """The implementation of each op of AUTO."""

    future_map_scatter: Implementation
    future_map_gather: Implementation
    kv_write: Implementation
    decode_attention: Implementation
    extend_attention: Implementation
    grouped_matmul: Implementation
    sample: Implementation

    @classmethod
    def choose(cls, setting: str, platform: str) -> Kernels:
        """Raises ValueError as `choose` does."""
        return cls(**{op: choose(op, setting, platform) for op in AUTO})


def choose(op: str, setting: str, platform: str) -> Implementation:
    """The implementation of `op` under `config.kernels` = `setting` on a JAX platform ("cpu", "gpu", ...).

    Raises ValueError for a setting that is unknown or cannot run on the platform.
    """
    if setting not in ("auto", *get_args(Implementation)):
        raise ValueError(f"kernels must be one of auto, {', '.join(get_args(Implementation))}, not {setting!r}")
    if setting == "pallas" and platform not in ("gpu", "cuda"):
        raise ValueError(f"kernels='pallas' needs a CUDA device; on {platform} use 'interpret' or 'xla'")
    if setting == "auto":
        return AUTO[op].get(platform, "xla")
    return setting  # type: ignore[return-value]


def check_implementation(implementation: str) -> None:
    if implementation not in get_args(Implementation):
        raise ValueError(f"implementation must be one of {', '.join(get_args(Implementation))}, not {implementation!r}")


def triton_params(num_warps: int, num_stages: int) -> Any:
    """Compiler parameters that send a `pallas_call` to the Triton backend, the one that updates in place on every
    supported jax; without them 0.10 lowers through Mosaic GPU."""
    return triton.CompilerParams(num_warps=num_warps, num_stages=num_stages)


def dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """Inside a kernel: a [M, K] times b [K, N] in float32, and float32 operands as such (no TF32)."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return lax.dot_general(a, b, (((1,), (0,)), ((), ())), precision=precision, preferred_element_type=jnp.float32)


@contextlib.contextmanager
def quiet_lowering() -> Iterator[None]:
    """Silences what jax 0.11 says of the Triton backend (deprecated) whenever a kernel is lowered."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=TRITON_DEPRECATED, category=DeprecationWarning)
        yield


def check_shape(name: str, array: jax.Array, shape: tuple[int | None, ...], dtype: Any = None) -> None:
    """Raises ValueError unless `array` has the shape (None: any size) and, where given, the dtype."""
    wrong = array.ndim != len(shape) or any(w is not None and w != s for w, s in zip(shape, array.shape))
    if wrong:
        want = ", ".join("?" if s is None else str(s) for s in shape)
        raise ValueError(f"{name} must have shape [{want}], not {list(array.shape)}")
    if dtype is not None and array.dtype != dtype:
        raise ValueError(f"{name} must be {jax.numpy.dtype(dtype).name}, not {array.dtype.name}")
