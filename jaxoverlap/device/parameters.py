"""A model's parameters as the flat leaves that a runner's programs take, and other arrays in their place."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxoverlap.checkpoint.load import Put
from jaxoverlap.checkpoint.tree import named_leaves


class Parameters:
    """Of `model`, whose they stay: what is replaced here is replaced there. Where ranks share them, their shapes are
    those of `whole`, and `put` brings each rank its share."""

    def __init__(self, model: nnx.Module, whole: Mapping[str, Any] | None = None, put: Put | None = None) -> None:
        variables = {
            ".".join(str(key) for key in path): node
            for path, node in nnx.iter_graph(model)
            if isinstance(node, nnx.Variable)
        }
        order = named_leaves(nnx.split(model)[1])  # the order in which a step's program rebuilds the model
        self._variables = {name: variables[name] for name in order}
        self._put = put
        held = {name: variable.get_value() for name, variable in self._variables.items()}
        self._shapes = {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in (whole or held).items()}

    def leaves(self) -> tuple[jax.Array, ...]:
        return tuple(variable.get_value() for variable in self._variables.values())

    def check(self, new: Mapping[str, Any]) -> None:
        """Raises ValueError naming the first of `new` (arrays by dotted path) that is missing, unknown, deleted, or of
        another shape or dtype than the one in its place."""
        for name, old in self._shapes.items():
            if name not in new:
                raise ValueError(f"parameter {name} is missing")
            array = new[name]
            if isinstance(array, jax.Array) and array.is_deleted():
                raise ValueError(f"parameter {name} was donated or deleted")
            if getattr(array, "shape", None) != old.shape:
                found = list(array.shape) if hasattr(array, "shape") else f"none: it is a {type(array).__name__}"
                raise ValueError(f"parameter {name} has shape {found}, the model needs {list(old.shape)}")
            if array.dtype != old.dtype:
                raise ValueError(f"parameter {name} has dtype {array.dtype}, the model needs {old.dtype}")
        for name in new:
            if name not in self._variables:
                raise ValueError(f"parameter {name} is unknown to this model")

    def replace(self, new: dict[str, Any]) -> None:
        """Takes `new`, which has been checked, one by one: a parameter's former array goes before the next comes."""
        for name, variable in self._variables.items():
            array = new.pop(name)
            if self._put is not None:
                variable.set_value(self._put(name, partial(np.array, array)))
            else:
                variable.set_value(_copied(array, variable.get_value()))


def _copied(array: Any, like: jax.Array) -> jax.Array:
    """A copy of `array`, whose owner may change or donate it, placed and committed as `like` is, since a jitted
    program would be compiled anew for another placement."""
    if not isinstance(array, jax.Array):
        array = np.array(array)  # device_put may alias a host array, whatever it is asked
    if like.committed or (isinstance(array, jax.Array) and array.committed):
        return jax.device_put(array, like.sharding, may_alias=False)
    return jax.device_put(array, may_alias=False)
