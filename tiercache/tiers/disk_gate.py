"""A door that closes only when nobody is inside."""

from __future__ import annotations

import threading
from types import TracebackType

from tiercache.errors import TierUnavailable


class Gate:
    """Counts the calls inside a store, so that closing it waits for them.

    A file that is unmapped under a running copy ends the process, not the call.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._is_open = True

    def __enter__(self) -> None:
        with self._changed:
            if not self._is_open:
                raise TierUnavailable("the disk store is closed")
            self._inside += 1

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._changed:
            self._inside -= 1
            if self._inside == 0:
                self._changed.notify_all()

    def shut(self) -> bool:
        """Lets nobody in any more and waits until all are out. False where it was shut already."""
        with self._changed:
            if not self._is_open:
                return False
            self._is_open = False
            self._changed.wait_for(lambda: self._inside == 0)
            return True
