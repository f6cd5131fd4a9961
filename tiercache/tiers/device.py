"""The seam behind which DEVICE memory lies: a processor's own, or a GPU's.

Everything that depends on the kind is behind `Device`: the pool, host memory it copies from and
to, batches of pages on their way, and the order between those and what the model computes. A GPU
does what it is asked later, and streams do not wait for each other; so every copy is a `Passage`,
made on the thread that computes when the copy is *planned*. From then on these hold:

- a passage's bytes move only after everything asked of the compute stream before it was made: what
  it stores has been computed, and what it overwrites has been read for the last time;
- nothing asked of the compute stream after `before_layer` begins before that layer's bytes are in;
- when `finish` returns, all bytes are where they belong, and nothing touches either side any more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from tiercache.types import Bytes, PageLayout, Slots

POISON = 0xFF
"""The byte freed pages are filled with where that is asked for: every number format reads NaN."""


Asked = Callable[[int], None]


def ignore(_layers: int) -> None:
    """For those who do not go by layers."""


class Passage(Protocol):
    """One batch of pages between host memory and DEVICE. Used once, by one worker.

    `start_load` or `start_store`, then `finish`; `before_layer` from the thread that computes, at
    any time. Rows are uint8 `[pages, page_bytes]` of registered memory; row `host_slots[i]` and
    DEVICE slot `device_slots[i]` are page i. Raises what the device reports.
    """

    def start_load(
        self, rows: Bytes, host_slots: Slots, device_slots: Slots, asked: Asked = ignore
    ) -> None:
        """Asks for host → DEVICE, layer group by layer group. Does not wait for bytes.

        `asked(n)` is called when the first n layers are asked for: `before_layer` of those does
        not wait on the host any more.
        """

    def start_store(self, rows: Bytes, device_slots: Slots, host_slots: Slots) -> None:
        """Asks for DEVICE → host. Does not wait for bytes."""

    def finish(self) -> None:
        """Waits on the calling thread until everything asked for is done.

        To be called also where a start raised: some of its copies may be under way.
        """

    def before_layer(self, layer: int) -> None:
        """Puts what is asked of the compute stream from now on behind that layer's bytes.

        Waits until the copies have been asked for, never for bytes. Raises TierError where the
        load failed.
        """


class Device(Protocol):
    """A kind of DEVICE memory. `mark`-like calls are made by the thread that computes."""

    @property
    def name(self) -> str:
        """What torch calls it: cpu or cuda."""

    def allocate_pool(self, capacity_pages: int, layout: PageLayout) -> Any:
        """The DEVICE pool: a torch tensor `[capacity_pages, *layout.shape]`, once per device.

        Raises ConfigError naming tiers.device.capacity where so much cannot be had.
        """

    def register_host(self, rows: Bytes) -> None:
        """Makes host memory fit for passages; it must stay mapped until `close`."""

    def passage(self) -> Passage:
        """A batch planned now, behind all that the compute stream was asked so far."""

    def rest(self) -> None:
        """Waits on the calling thread until all that the compute stream was asked is done."""

    def poison(self, slots: Slots) -> None:
        """Fills free DEVICE pages with POISON, after the last read asked for so far."""

    def close(self) -> None:
        """Waits for everything under way and lets go of host memory and the pool."""
