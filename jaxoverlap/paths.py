"""Where jaxoverlap keeps what it fetches."""

from __future__ import annotations

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
