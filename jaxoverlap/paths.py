"""Where jaxoverlap keeps what it fetches, and how much a folder holds."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def cache_dir() -> Path:
    """`JAXOVERLAP_CACHE_DIR`, else `$XDG_CACHE_HOME/jaxoverlap`, else `~/.cache/jaxoverlap`. Creates nothing.

    A relative XDG_CACHE_HOME is ignored, as the XDG base directory specification asks.
    """
    own = os.environ.get("JAXOVERLAP_CACHE_DIR")
    if own:
        return Path(own).expanduser().absolute()
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(xdg) if os.path.isabs(xdg) else Path.home() / ".cache"
    return base / "jaxoverlap"


def bytes_below(folder: Path) -> int:
    """Bytes in the files of a folder that others write to meanwhile."""
    total = 0
    for inner, _, files in os.walk(folder):
        for file in files:
            with contextlib.suppress(OSError):  # files are moved and removed
                total += os.stat(os.path.join(inner, file)).st_size
    return total
