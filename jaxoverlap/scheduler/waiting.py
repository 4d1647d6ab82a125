"""The waiting queue: in order, and with a way out for an aborted request that does not walk through the others."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator

from jaxoverlap.core import Request


class WaitingQueue:
    """Request ids are unique. All but iteration and `remove_where` takes the same time whatever the length."""

    def __init__(self, requests: Iterable[Request] = ()) -> None:
        self._by_rid = OrderedDict((r.rid, r) for r in requests)

    def __len__(self) -> int:
        return len(self._by_rid)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._by_rid.values())

    def append(self, request: Request) -> None:
        self._by_rid[request.rid] = request

    def popleft(self) -> Request:
        return self._by_rid.popitem(last=False)[1]

    def remove(self, rid: str) -> list[Request]:
        """The request of that id, or none."""
        request = self._by_rid.pop(rid, None)
        return [] if request is None else [request]

    def remove_where(self, matches: Callable[[Request], bool]) -> list[Request]:
        """In their order."""
        return [self._by_rid.pop(r.rid) for r in list(self) if matches(r)]
