"""Which field of the namespace separates two requests that ask the same.

A fingerprint says nothing of what went into it, so whoever makes fingerprints notes their fields
here. Values stay inside: an explanation names the field, never what it holds.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping

UNKNOWN = "not known"
"""Stands for the fields of a namespace that was stored by another configuration."""


class NamespaceBook:
    """Fields of the newest `limit` namespaces. May be used from any thread."""

    def __init__(self, limit: int = 4096) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._fields: OrderedDict[bytes, Mapping[str, str]] = OrderedDict()

    def note(self, namespace: bytes, fields: Mapping[str, str]) -> None:
        """`namespace` is the fingerprint of `fields`."""
        with self._lock:
            self._fields[namespace] = fields
            self._fields.move_to_end(namespace)
            if len(self._fields) > self._limit:
                self._fields.popitem(last=False)

    def differing(self, left: bytes, right: bytes) -> tuple[str, ...]:
        """Names of the fields in which two namespaces differ."""
        with self._lock:
            mine, theirs = self._fields.get(left), self._fields.get(right)
        if mine is None or theirs is None:
            return (UNKNOWN,)
        names = sorted(mine.keys() | theirs.keys())
        return tuple(name for name in names if mine.get(name) != theirs.get(name))
