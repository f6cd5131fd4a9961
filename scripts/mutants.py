"""Deliberate faults, each of which a test has to catch.

    python scripts/mutants.py                  every mutant, a line for each, then the table
    python scripts/mutants.py adopt-keeps-load one of them

Each is applied to a scratch copy, in which the core's tests and the simulation then run until the
first of them fails. The exit code is 1 when one survives.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

from scratch import ROOT, Scratch

TIMEOUT_SECONDS = 180.0


@dataclass(frozen=True, slots=True)
class Mutant:
    """`old`, found in `file`, becomes `new` everywhere it stands."""

    name: str
    breaks: str
    file: str
    old: str
    new: str


T, C, M, X = ("tiercache/" + name for name in ("tree.py", "catalog.py", "moves.py", "transfer.py"))
K, R, W, S = ("tiercache/" + name for name in ("cache.py", "room.py", "writes.py", "restore.py"))
L, O, P, F = (  # noqa: E741
    "tiercache/" + name for name in ("loads.py", "columns.py", "prefetch.py", "forgetting.py")
)
E = "tiercache/eviction.py"
FRONTS = "tiercache/fronts.py"
LEASING, UPKEEP, ORDERS = ("tiercache/" + name for name in ("leasing.py", "upkeep.py", "orders.py"))

MUTANTS = (
    Mutant("split-loses-children", "I1", T, "tail.children = node.children", "tail.children = {}"),
    Mutant("split-keeps-owner", "I1", T, "        self._own(tail.pages, tail)\n", ""),
    Mutant(
        "match-rounds-up",
        "whole pages only",
        "tiercache/runs.py",
        "        return same\n",
        "        return differ\n",
    ),
    Mutant(
        "namespaces-share-a-root",
        "I8",
        T,
        "(namespace, generation)",
        '(b"", generation)',
    ),
    Mutant(
        "ready-before-the-bytes",
        "I3",
        C,
        "columns.state[pages] = _FILLING",
        "columns.state[pages] = _READY",
    ),
    Mutant(
        "parents-leave-before-children",
        "I9, the leaf rule",
        C,
        "            and columns.resident_children[page] == 0\n",
        "",
    ),
    Mutant(
        "pages-taken-up-again-leave",
        "I5, pins",
        C,
        "            and self.pins[page] == 0\n",
        "",
    ),
    Mutant(
        "queued-victim-is-not-looked-at-again",
        "I5, pins",
        E,
        "            and not self._pins[page]\n",
        "",
    ),
    Mutant(
        "retired-child-still-counts",
        "I9",
        C,
        "        self._count_children(columns, pages, -1)\n        return slots",
        "        return slots",
    ),
    Mutant(
        "handed-over-child-not-counted",
        "I9",
        C,
        "        self._count_children(columns, pair[1:], +1)\n",
        "",
    ),
    Mutant(
        "retired-slot-given-away",
        "I2, a worker may still touch it",
        C,
        "        columns.slot_state[slots] = _RETIRING\n",
        "        columns.slot_state[slots] = _RETIRING\n        columns.free_slots.give(slots)\n",
    ),
    Mutant(
        "filled-beyond-the-new-size",
        "resizing",
        O,
        "return max(0, self.capacity_pages - self.held_count)",
        "return len(self.free_slots)",
    ),
    Mutant(
        "moves-do-not-pin",
        "I5, a source may leave under its reader",
        M,
        "        self._catalog.pin(pages)\n        move = Move(",
        "        move = Move(",
    ),
    Mutant(
        "moves-never-unpin",
        "I5, release",
        M,
        "        self._catalog.unpin(move.pages)\n",
        "",
    ),
    Mutant(
        "superseded-slot-is-lost",
        "I2, release",
        M,
        "            self._catalog.free_retired(hop.tier, hop.slots[~own])\n",
        "            pass\n",
    ),
    Mutant(
        "failed-pages-are-committed",
        "I3, outcomes by page",
        M,
        "done = np.array([o is PageOutcome.DONE for",
        "done = np.array([True for",
    ),
    Mutant(
        "bad-copy-stays",
        "a bad copy is dropped",
        M,
        "            self.drop_bad_copy(move.source, page)\n",
        "            pass\n",
    ),
    Mutant(
        "hole-is-not-known",
        "I10",
        M,
        "            self.holes.add(page)\n",
        "",
    ),
    Mutant(
        "failed-parent-is-no-hole",
        "I10",
        M,
        "                self.holes.update(move.pages[lost & followed].tolist())\n",
        "",
    ),
    Mutant(
        "erase-frees-its-slot-at-once",
        "I2, the record may still be there",
        M,
        "        slots = self._catalog.retire(Tier.DISK, pages)\n",
        "        slots = self._catalog.retire(Tier.DISK, pages)\n"
        "        self._catalog.free_retired(Tier.DISK, slots)\n",
    ),
    Mutant(
        "cancelled-slots-are-lost",
        "release",
        M,
        "        return self._settle(Completion(move, outcomes, 0.0), move)\n",
        "        return None\n",
    ),
    Mutant(
        "corrupt-is-good-enough",
        "the checksum",
        X,
        "ReadOutcome.CORRUPT: PageOutcome.CORRUPT",
        "ReadOutcome.CORRUPT: PageOutcome.DONE",
    ),
    Mutant(
        "bad-page-goes-up-the-chain",
        "outcomes by page",
        X,
        "outcome is ReadOutcome.READ for outcome",
        "True for outcome",
    ),
    Mutant(
        "worker-dies-of-a-fault",
        "a worker lives on",
        X,
        "except Exception as fault:",
        "except TierError as fault:",
    ),
    Mutant(
        "any-job-can-be-taken-back",
        "a begun job runs to its end",
        X,
        "                    return True\n        return False\n",
        "                    return True\n        return True\n",
    ),
    Mutant(
        "erases-overtake-writes",
        "order of writes",
        X,
        "    return isinstance(job, Erase) or job.target is Tier.DISK\n",
        "    return isinstance(job, Move) and job.target is Tier.DISK\n",
    ),
    Mutant(
        "acquire-does-not-pin",
        "I5, pins",
        LEASING,
        "    cache.catalog.pin(path)\n    absent",
        "    absent",
    ),
    Mutant(
        "release-does-not-unpin",
        "I5, release",
        LEASING,
        "    cache.forgetter.let_go(path)\n    for settled in",
        "    for settled in",
    ),
    Mutant(
        "refused-request-keeps-its-pins",
        "all or nothing",
        LEASING,
        "        cache.forgetter.let_go(path)\n        return answer\n",
        "        return answer\n",
    ),
    Mutant(
        "release-keeps-own-rows",
        "I1, release",
        LEASING,
        "        cache.catalog.forget_all(own)\n",
        "",
    ),
    Mutant(
        "flushed-lease-still-inserts",
        "I8, generations",
        K,
        "lease.stores and lease.generation == self.generation",
        "lease.stores",
    ),
    Mutant(
        "old-pages-are-never-reaped",
        "flush",
        UPKEEP,
        "    if settled:\n        cache.reap()\n",
        "",
    ),
    Mutant(
        "leaders-outlive-a-flush",
        "flush",
        ORDERS,
        "    cache.pending.clear()\n",
        "",
    ),
    Mutant(
        "partial-page-is-inserted",
        "I3, only complete pages",
        K,
        "        stop = min(computed_tokens // self.page_tokens, last)",
        "        stop = min(-(-computed_tokens // self.page_tokens), last)",
    ),
    Mutant(
        "adopt-keeps-load",
        "adoption while FILLING",
        LEASING,
        "    if columns.state[stored] == int(SlotState.FILLING):\n",
        "    if False:\n",
    ),
    Mutant(
        "adopt-gives-its-copy-up",
        "adoption without a copy",
        LEASING,
        "    if columns.state[stored] == int(SlotState.FREE):\n        cache.catalog.hand",
        "    if False:\n        cache.catalog.hand",
    ),
    Mutant(
        "adopted-page-is-not-pinned",
        "I5, adoption",
        LEASING,
        "    cache.catalog.pin(np.array([stored], np.int32))\n",
        "",
    ),
    Mutant(
        "nobody-waits-for-a-load",
        "the wait for DEVICE",
        K,
        "return Fetch.WAITING if lease.awaited.size else Fetch.READY",
        "return Fetch.READY",
    ),
    Mutant(
        "failed-load-is-waited-for",
        "a failed load is noticed",
        K,
        "                return Fetch.FAILED\n",
        "                return Fetch.WAITING\n",
    ),
    Mutant(
        "last-token-is-served",
        "the last token is computed",
        LEASING,
        "match.pages[: (tokens.size - 1) // cache.page_tokens]",
        "match.pages[: tokens.size // cache.page_tokens]",
    ),
    Mutant(
        "match-goes-on-behind-a-hole",
        "a match stops at a hole",
        LEASING,
        "    if unusable.any():\n",
        "    if False:\n",
    ),
    Mutant(
        "room-for-promotions-is-not-asked",
        "all or nothing",
        LEASING,
        "own + int(cold.size)",
        "own",
    ),
    Mutant(
        "joiners-lose-their-load",
        "the last waiter cancels",
        L,
        " and not np.isin(move.pages, wanted).any()\n",
        "\n",
    ),
    Mutant(
        "front-is-not-given-back",
        "I2, the front of an ended request",
        LEASING,
        "    fronts.give_up(cache, lease)\n",
        "",
    ),
    Mutant(
        "superseded-front-loses-its-slots",
        "I2, a front that was superseded",
        FRONTS,
        "    if not own.all():\n",
        "    if False:\n",
    ),
    Mutant(
        "front-keeps-the-slots-of-loads",
        "I2, a load that the front supersedes",
        FRONTS,
        "    if superseded.size:\n",
        "    if False:\n",
    ),
    Mutant(
        "superseded-load-is-read-by-layers",
        "I3, a load that the front supersedes",
        L,
        "np.isin(device.slot[missing], move.hops[-1].slots)",
        "np.isin(missing, move.pages)",
    ),
    Mutant(
        "superseded-load-settles-the-front",
        "I3, what a superseded move says of its page",
        M,
        "        own = columns.slot[move.pages] == hop.slots\n",
        "        own = columns.slot[move.pages] >= 0\n",
    ),
    Mutant(
        "given-up-front-counts-as-computed",
        "I3, only what was computed is READY",
        FRONTS,
        "front.slots, arrived=False)",
        "front.slots, arrived=True)",
    ),
    Mutant(
        "superseded-front-is-committed",
        "I2, a front settles its own slots only",
        FRONTS,
        "    own = cache.catalog.tiers[Tier.DEVICE].slot[pages] == slots\n",
        "    own = slots == slots\n",
    ),
    Mutant(
        "two-compute-the-same-front",
        "I2, a page is in one front",
        FRONTS,
        " | _being_computed(pages, others)\n",
        "\n",
    ),
    Mutant(
        "shrinking-device-is-filled",
        "resizing",
        FRONTS,
        "    if columns.held_count > columns.capacity_pages:\n",
        "    if False:\n",
    ),
    Mutant(
        "front-takes-the-room-of-others",
        "all or nothing",
        FRONTS,
        "    if room is not Room.NOW:",
        "    if False:",
    ),
    Mutant(
        "detached-disk-is-still-served",
        "I8, flush",
        ORDERS,
        "    cache.catalog.drop(Tier.DISK, ready)\n    for",
        "    for",
    ),
    Mutant(
        "detached-disk-is-written-on",
        "flush while writing",
        ORDERS,
        "    cache.catalog.retire(Tier.DISK, filling)",
        "    pass",
    ),
    Mutant(
        "prompt-is-booked-without-hits",
        "I7",
        K,
        "        self.counters.hit_tokens.update(lease.books.hit_tokens)\n",
        "",
    ),
    Mutant(
        "flush-is-not-recorded",
        "flush: on DISK first",
        ORDERS,
        "            cache.store.set_generation(generation)\n",
        "            pass\n",
    ),
    Mutant(
        "only-copy-is-dropped",
        "a page is written down before it leaves",
        R,
        "        elif self._demote(tier, page):\n",
        "        elif False:\n",
    ),
    Mutant(
        "written-page-does-not-leave",
        "room comes",
        R,
        "                self._evict_one(tier, page)\n",
        "                pass\n",
    ),
    Mutant(
        "children-before-parents",
        "parents are written first",
        W,
        "        return chain[::-1] or None\n",
        "        return chain or None\n",
    ),
    Mutant(
        "ancestors-are-not-written",
        "parents are written first",
        W,
        "            if self.tier is not Tier.DISK:\n                break\n",
        "            break\n",
    ),
    Mutant(
        "head-is-evicted-for-its-tail",
        "I10, making room",
        W,
        "{*pages.tolist(), *self._catalog.parent[pages].tolist()} - {NO_PAGE}",
        "{*pages.tolist()}",
    ),
    Mutant(
        "ancestors-are-put-ahead-for-ever",
        "a small tier comes to rest",
        W,
        "            is_late = link != page and self._wanted.get(page, False)\n",
        "            is_late = False\n",
    ),
    Mutant(
        "children-of-older-records-are-lost",
        "warm start",
        "tiercache/tiers/disk_table.py",
        "            np.maximum.at(last_use, above[has_parent], last_use[rows][has_parent])\n",
        "            pass\n",
    ),
    Mutant(
        "headless-pages-are-restored",
        "I10, warm start",
        S,
        'table.with_a_head(entries["generation"] == cache.generation)',
        'entries["generation"] == cache.generation',
    ),
    Mutant(
        "hottest-leaves-first",
        "order of eviction",
        E,
        "-self._columns.score[pages]\n        columns",
        "self._columns.score[pages]\n        columns",
    ),
    Mutant(
        "refused-page-is-tried-for-ever",
        "a full tier and a page that wants in",
        W,
        "        if page in self._tried_again:\n            return False\n",
        "",
    ),
    Mutant(
        "room-is-made-and-not-used",
        "the room belongs to the page it was made for",
        W,
        "        self._put_back(pages)\n        self.pump(room)\n",
        "        self.pump(room)\n",
    ),
    Mutant(
        "children-go-with-a-refused-parent",
        "the wait for a parent that is tried again",
        W,
        "            return parent in full or parent in self._tried_again\n",
        "            return False\n",
    ),
    Mutant(
        "what-no-slot-is-left-for-waits-for-ever",
        "a queue before a full tier drains",
        W,
        "                self._refuse(page, DropReason.NO_ROOM)\n        else:\n",
        "                pass\n        else:\n",
    ),
    Mutant(
        "growing-forgives-nothing",
        "the wait for a tier to grow",
        ORDERS,
        "        cache.writes[tier].forgive()\n",
        "        pass\n",
    ),
    Mutant(
        "victim-is-offered-again",
        "making room asks each page once",
        R,
        "            self._catalog.pin(np.array(demoting, np.int32))\n"
        "        self._catalog.unpin(np.array(waiting, np.int32))\n",
        "",
    ),
    Mutant(
        "offered-victims-stay-held",
        "I5, release",
        R,
        "        self._catalog.unpin(np.array(waiting, np.int32))\n",
        "",
    ),
    Mutant(
        "prefetch-does-not-hold-what-it-reads",
        "I5, queued prefetch",
        P,
        "        self._cache.catalog.pin(fits)  ",
        "        pass  ",
    ),
    Mutant(
        "prefetch-never-lets-go",
        "I5, queued prefetch, release",
        P,
        "        self._cache.catalog.unpin(fits)\n",
        "",
    ),
    Mutant(
        "requests-that-left-keep-their-budget",
        "queued prefetch, release",
        P,
        "        pages = self._pages.pop(request_id, _NO_PAGES)\n        self._given_back",
        "        pages = self._pages.get(request_id, _NO_PAGES)\n        self._given_back",
    ),
    Mutant(
        "bare-parents-are-not-forgotten",
        "I4",
        F,
        "        for page in parents:\n            self.if_gone(page)\n",
        "",
    ),
    Mutant(
        "held-pages-are-reaped",
        "a flush during running requests",
        F,
        "            if self._catalog.pins[page] or page in held:\n",
        "            if False:\n",
    ),
    Mutant(
        "kept-pages-outlive-a-flush",
        "I5, I8, retention",
        ORDERS,
        "    cache.retention.release_all()\n",
        "",
    ),
    Mutant(
        "nobody-hears-that-a-pin-went",
        "the wait for room",
        C,
        "            for tier in self.tiers:\n                self.on_evictable(tier, loose)\n",
        "            pass\n",
    ),
    Mutant(
        "nobody-hears-that-a-child-left",
        "a cold chain unwinds",
        C,
        "                self.on_evictable(columns.tier, loose)\n",
        "                pass\n",
    ),
    Mutant(
        "warming-goes-first",
        "what requests need is read first",
        X,
        "        place -= 1\n",
        "        break\n",
    ),
    Mutant(
        "written-down-from-device",
        "DISK is written from HOST",
        W,
        "            if columns.state[page] == _FILLING:\n                return True\n",
        "",
    ),
    Mutant(
        "earlier-prompts-do-not-count",
        "load or recompute",
        "tiercache/gate.py",
        "np.maximum(self.head, self.busy) + self.compute",
        "self.head + self.compute",
    ),
)


def source_of(mutant: Mutant) -> str:
    """The whole file with the fault in it."""
    source = (ROOT / mutant.file).read_text()
    if mutant.old not in source:
        raise SystemExit(f"{mutant.name}: {mutant.file} has no such lines any more")
    return source.replace(mutant.old, mutant.new)


def main() -> int:
    wanted = set(sys.argv[1:])
    chosen = [mutant for mutant in MUTANTS if not wanted or mutant.name in wanted]
    sources = [source_of(mutant) for mutant in chosen]
    rows, survivors = [], 0
    with Scratch() as scratch:
        for mutant, source in zip(chosen, sources, strict=True):
            verdict = scratch.try_with(mutant.file, source, TIMEOUT_SECONDS)
            survivors += not verdict.killed
            caught = verdict.by.removeprefix("tests/") if verdict.killed else "SURVIVED"
            print(f"{mutant.name}: {caught}", flush=True)
            rows.append(f"| {mutant.name} | {mutant.breaks} | {caught} |")
    print("\n| fault | what it breaks | caught by |\n|---|---|---|", *rows, sep="\n")
    print(f"\n{len(chosen) - survivors} of {len(chosen)} caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
