"""JAX's persistent compilation cache, switched on for this process. Called by the engine, never at import."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import jax

logger = logging.getLogger(__name__)
_MIN_TIME = "jax_persistent_cache_min_compile_time_secs"


def enable_compilation_cache(folder: str | Path) -> Path | None:
    """Keeps compiled programs in `folder` (made if missing), short compiles included; gives the folder in use.

    A user's own choice stands: a cache folder or a minimum compile time set through JAX's configuration or environment
    is left as it is, and a cache switched off (jax_enable_compilation_cache) stays off: None. A folder that cannot be
    made is warned of, and there is no cache.
    """
    if not jax.config.values["jax_enable_compilation_cache"]:
        return None
    if (users := jax.config.values["jax_compilation_cache_dir"]) is not None:
        return Path(users)
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as e:
        logger.warning("programs are compiled anew in every process: no cache in %s (%s)", folder, e)
        return None
    jax.config.update("jax_compilation_cache_dir", str(folder))
    if _MIN_TIME.upper() not in os.environ:
        jax.config.update(_MIN_TIME, 0.0)
    return Path(folder)
