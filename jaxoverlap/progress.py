"""Progress of what takes longer than a moment: fetching, converting, loading, compiling."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

Report = Callable[[str, int, int], None]
"""(label, done, total), in units of the reporter's choice; total 0 where it is unknown. done == total ends the bar."""


def silent(label: str, done: int, total: int) -> None:
    """The Report that shows nothing."""


@contextlib.contextmanager
def bars() -> Iterator[Report]:
    """Yields a Report that draws one bar a label on stderr; where that is no terminal, a line when a label is new."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:

        def report(label: str, done: int, total: int) -> None:
            if label not in tasks:
                if not console.is_terminal:
                    console.print(f"{label} ...", highlight=False, soft_wrap=True, markup=False)
                tasks[label] = progress.add_task(label, total=total or None)
            progress.update(tasks[label], completed=done, total=total or None)

        yield report
