"""S3-FIFO: a small queue for what is new, a main queue for what came back.

Yang, Zhang, Qiu, Yue, Rashmi, "FIFO queues are all you need for cache eviction", SOSP 2023.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tiercache.policies.columns import ONCE, Ghosts, Indifferent, fitted
from tiercache.types import PageIds

if TYPE_CHECKING:
    from tiercache.policies import PolicySettings

SMALL_SHARE = 0.1
"""Share of the tier for pages that have not proved themselves."""

MOST_USES = 3


class S3Fifo(Indifferent):
    """The score is the place in a queue; while the small queue is over its share it goes first.

    A page of the small queue that was used again moves to the main queue when its turn comes; one
    of the main queue goes round again, once for each use. A name that left the small queue lately
    comes back to the main queue.
    """

    remembers = True
    gives_second_chances = True

    def __init__(self, settings: PolicySettings) -> None:
        self._most_small = max(1, int(SMALL_SHARE * settings.capacity_pages))
        self._small_count = 0
        self._small_first = False
        self._turn = 0.0
        self._place = np.zeros(1024)
        self._small = np.zeros(1024, np.bool_)
        self._uses = np.zeros(1024, np.int8)
        self._name = np.zeros(1024, np.uint64)
        self._ghosts = Ghosts(min(settings.capacity_pages, settings.ghost_pages))
        self.epoch = 0

    def enter(self, pages: PageIds, names: np.ndarray) -> None:
        self._place, self._small = fitted(self._place, pages), fitted(self._small, pages)
        self._uses, self._name = fitted(self._uses, pages), fitted(self._name, pages)
        self._small_count -= int(np.count_nonzero(self._small[pages]))  # of pages before them
        self._name[pages] = names
        self._place[pages] = 0
        self._small[pages] = False

    def touch(self, pages: PageIds, fresh_from: int = 0) -> np.ndarray:
        fresh = pages[fresh_from:]
        known = self._place[fresh] > 0
        self._uses[fresh] = np.where(known, np.minimum(self._uses[fresh] + 1, MOST_USES), 0)
        new = fresh[~known]
        if new.size:
            self._turn += 1
            self._place[new] = self._turn
            ghosts = np.array([self._ghosts.take(n) > 0 for n in self._name[new].tolist()])
            self._small[new] = ~ghosts
            self._small_count += int(np.count_nonzero(~ghosts))
            self._choose_queue()
        return self._scores(pages)

    def on_evict(self, pages: PageIds) -> None:
        for page in pages[self._small[pages]].tolist():
            self._ghosts.put(int(self._name[page]), 1.0)
        self._small_count -= int(np.count_nonzero(self._small[pages]))
        self._place[pages] = 0
        self._small[pages] = False
        self._choose_queue()

    def reconsider(self, pages: PageIds) -> np.ndarray | None:
        return self._scores(pages)

    def second_chance(self, page: int) -> float | None:
        if self._uses[page] == 0:
            return None
        if self._small[page]:
            self._small[page] = False
            self._small_count -= 1
            self._uses[page] = 0
            self._choose_queue()
        else:
            self._uses[page] -= 1
        self._turn += 1
        self._place[page] = self._turn
        return float(self._scores(np.array([page], np.int32))[0])

    def _scores(self, pages: PageIds) -> np.ndarray:
        first = self._small[pages] if self._small_first else ~self._small[pages]
        return self._place[pages] + np.where(first, ONCE, 0.0)

    def _choose_queue(self) -> None:
        excess = self._small_count - self._most_small
        small_first = excess > 0
        self.at_once = excess if small_first else Indifferent.at_once
        if small_first is not self._small_first:
            self._small_first = small_first
            self.epoch += 1
