"""Who runs when: SGLang 0.5.14's scheduler, on the host alone. Imports no jax.

loops.py holds the two event loops; each other file is one concern of a turn.
"""

from jaxoverlap.scheduler.scheduler import Scheduler

__all__ = ["Scheduler"]
