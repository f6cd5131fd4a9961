"""The contract of a durable page store, whoever keeps it: this process or another one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from tiercache.errors import PageCorrupt
from tiercache.tiers.disk_facts import ReadOutcome, WriteOutcome
from tiercache.tiers.disk_format import PageRecord
from tiercache.tiers.disk_table import RecordTable
from tiercache.types import Bytes

Pages = Sequence[tuple[PageRecord, Bytes]]
"""Records with rows of bytes, uint8 `[page_bytes]`: where a page lies, or is to be put."""


class PageStore(Protocol):
    """A map from page key to page bytes that outlives the process.

    Every method may be called from any thread. What the medium does wrong is raised as TierError;
    TierLost says that no later call on this object can succeed.
    """

    @property
    def capacity_pages(self) -> int:
        """Pages that fit, through any number of turnovers."""

    @property
    def generation(self) -> int:
        """The generation whose pages are served."""

    @property
    def open_notes(self) -> tuple[str, ...]:
        """What an operator has to hear about how the store was found."""

    def records(self) -> list[PageRecord]:
        """Every page of this generation, parents before children."""

    def table(self) -> RecordTable:
        """The same, as columns: a hundred times as fast."""

    def read_pages(self, wanted: Pages) -> list[ReadOutcome]:
        """Copies each page into its row and verifies it there. A row that is not READ is undefined.

        Raises TierError where the medium fails; then no row may be used.
        """

    def write(self, batch: Pages) -> list[WriteOutcome]:
        """Stores pages, parents before children, and says for each what became of it."""

    def delete(self, keys: Iterable[bytes]) -> None:
        """Forgets pages. Unknown keys are ignored."""

    def touch(self, updates: Mapping[bytes, tuple[float, int]]) -> None:
        """Notes (last use in epoch seconds, hits) by key. Unknown keys are ignored."""

    def set_generation(self, generation: int) -> None:
        """Begins a generation; on the medium before it returns."""

    def bad_among(self, keys: Sequence[bytes]) -> list[bytes]:
        """Keys of pages that are stored and fail their checksum; changes nothing."""

    def used_bytes(self) -> int:
        """What the store occupies now, all overhead included."""

    def probe(self) -> None:
        """Writes and reads a little. Raises what stands in the way of doing so."""

    def abandon(self) -> None:
        """Ends calls that have no answer, where that can be done: they fail, all later ones too."""

    def close(self) -> None:
        """Waits for callers inside and leaves the store clean. A second call does nothing."""


def read_each(read_into: Callable[[PageRecord, Bytes], None], wanted: Pages) -> list[ReadOutcome]:
    """Reads page after page by `read_into`, which raises KeyError where there is none, and
    PageCorrupt where it is not what was stored. What else it raises ends the reading."""
    outcomes = []
    for record, row in wanted:
        try:
            read_into(record, row)
            outcomes.append(ReadOutcome.READ)
        except KeyError:
            outcomes.append(ReadOutcome.MISSING)
        except PageCorrupt:
            outcomes.append(ReadOutcome.CORRUPT)
    return outcomes


class StoreHealth(Protocol):
    """What the cache has to know about a store that comes and goes."""

    @property
    def reads_trouble(self) -> str:
        """Why nothing can be read at present; empty when all is well."""

    @property
    def writes_trouble(self) -> str:
        """Why nothing can be written at present; empty when all is well."""

    def take_return(self) -> frozenset[bytes] | None:
        """Keys of the pages that a store has which came back; told once, None otherwise.

        From this call on it is used again.
        """

    def take_bad(self) -> list[bytes]:
        """Keys of pages that were found to have gone bad since it was last asked."""


class AlwaysWell:
    """The health of a store that nobody watches."""

    reads_trouble = ""
    writes_trouble = ""

    def take_return(self) -> frozenset[bytes] | None:
        return None

    def take_bad(self) -> list[bytes]:
        return []
