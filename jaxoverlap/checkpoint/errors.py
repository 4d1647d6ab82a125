"""What can be wrong with a model's files."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A model directory that cannot be loaded; the message names the file, the tensor or the field."""


class FetchError(RuntimeError):
    """A demo model that cannot be fetched; the message says what to do."""
