"""Layout: named fields of one flat int32 array, the same for the host that writes it and the program that reads it."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np


class Layout:
    """Named int32 fields, one behind the other in one flat array."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        self.shapes = shapes
        ends = list(itertools.accumulate((math.prod(s) for s in shapes.values()), initial=0))
        self.spans = {name: (ends[i], ends[i + 1]) for i, name in enumerate(shapes)}
        self.size = ends[-1]

    def empty(self) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """A zeroed array and its fields as views. Zeros are padding: slot 0, length 0, page 0 of slot 0."""
        packed = np.zeros(self.size, np.int32)
        return packed, self.fields(packed)

    def fields(self, packed: Any) -> dict[str, Any]:
        """Fields of a NumPy array or of a traced one."""
        return {name: packed[a:b].reshape(self.shapes[name]) for name, (a, b) in self.spans.items()}
