"""The decision core alone: what a match, an insert, a lease and an eviction cost.

Real tree, catalog, queues and facade; no bytes move. Times are medians over calls that take turns
over several prompts. `cold` rows visit every prompt of the cache in turn, so that nothing is in the
processor's caches; the same few prompts are used at every size otherwise. Garbage collection
is left as a server has it.

    python -m benchmarks.bench_core [--quick] [--no-engine]
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.baseline_radix import BaselineRadix
from benchmarks.common import machine, save
from benchmarks.core_memory import bytes_for_wishes, bytes_per_node, bytes_per_page
from benchmarks.core_workload import (
    NAMESPACE,
    Population,
    diverging,
    empty_cache,
    many_node_prompt,
    populated,
    random_tokens,
    shuffle_page_ids,
    store,
)
from tiercache.cache import TierCache
from tiercache.lease import Lease
from tiercache.tree import Match, Tree
from tiercache.types import Tier, Tokens

SHORT, LONG = 8192, 131_072
HOT_PROMPTS = 8
EVICTED_AT_ONCE = 64
console = Console(width=130)


@dataclass(frozen=True, slots=True)
class Row:
    """One measured figure; `goal` is an upper bound in the same unit, None where there is none."""

    name: str
    page_tokens: int
    resident_pages: int
    measured: float
    unit: str = "µs"
    goal: float | None = None

    @property
    def met(self) -> bool | None:
        return None if self.goal is None else self.measured <= self.goal


def median_us(calls: Iterable[Callable[[], object]]) -> float:
    """Median time of one call, in microseconds."""
    times = []
    for call in calls:
        started = time.perf_counter_ns()
        call()
        times.append(time.perf_counter_ns() - started)
    return statistics.median(times) / 1000


def in_turn(call: Callable[[Tokens], object], prompts: list[Tokens], count: int) -> float:
    """Median time of `call` over the prompts in turn, after one round that warms up."""
    for prompt in prompts[:HOT_PROMPTS]:
        call(prompt)
    chosen = itertools.islice(itertools.cycle(prompts), count)
    return median_us((lambda prompt=prompt: call(prompt)) for prompt in chosen)


# Match and lease


def match_rows(population: Population, page_tokens: int, pages: int, tokens: int) -> list[Row]:
    tree, generation = population.cache.tree, population.cache.generation

    def match(prompt: Tokens) -> None:
        found = tree.match(NAMESPACE, generation, prompt)
        assert found is not None
        assert found.pages.size == prompt.size // page_tokens

    whole = [prompt for prompt in population.prompts if prompt.size == tokens]
    goal = {SHORT: 6.0, LONG: 45.0}[tokens] if page_tokens == 16 else None
    name = f"match {tokens:,} tokens, one node"
    rows = [Row(name, page_tokens, pages, in_turn(match, whole[:HOT_PROMPTS], 1000), goal=goal)]
    if len(whole) > HOT_PROMPTS:
        rows.append(Row(f"{name}, cold", page_tokens, pages, in_turn(match, whole, 1000)))
    return rows


def lease_row(cache: TierCache, prompts: list[Tokens], name: str, goal: float | None) -> Row:
    """Acquire and release. One token more than is stored, so that every stored page is used."""
    asked = [np.append(prompt, np.int32(7)) for prompt in prompts]

    def hold(prompt: Tokens) -> None:
        lease = cache.acquire(NAMESPACE, prompt)
        assert isinstance(lease, Lease)
        assert lease.matched_pages == (prompt.size - 1) // cache.page_tokens
        cache.release(lease)

    measured = in_turn(hold, asked, 300)
    return Row(name, cache.page_tokens, cache.catalog.page_count, measured, goal=goal)


def many_node_rows(page_tokens: int) -> list[Row]:
    """8,192 pages over 64 nodes against the same over one node; with page ids that follow one
    another, as in a cache that fills up, and in no order, as after long use."""
    rows = []
    for ids in ("", ", ids in no order"):
        rows += _many_node_rows(page_tokens, ids)
    return rows


def _many_node_rows(page_tokens: int, ids: str) -> list[Row]:
    pages, nodes = 8192, 64
    rng = np.random.default_rng(3)
    one, many = random_tokens(rng, pages * page_tokens), random_tokens(rng, pages * page_tokens)
    cache = empty_cache(page_tokens, 2 * pages + 2 * nodes)
    if ids:
        shuffle_page_ids(cache, rng)
    store(cache, one)
    many_node_prompt(cache, many, nodes)
    found = cache.tree.match(NAMESPACE, 0, many)
    assert found is not None
    assert found.pages.size == pages

    single, split = (
        in_turn(lambda prompt: cache.tree.match(NAMESPACE, 0, prompt), [prompt], 300)
        for prompt in (one, many)
    )
    resident = cache.catalog.page_count
    more = (split - single) / (nodes - 1)
    name = "acquire + release 8,192 pages,"
    return [
        Row(f"match, each node more{ids}", page_tokens, resident, more, goal=3.0),
        lease_row(cache, [one], f"{name} one node{ids}", goal=250.0),
        lease_row(cache, [many], f"{name} {nodes} nodes{ids}", goal=250.0),
    ]


def size_rows(page_tokens: int, resident: tuple[int, ...]) -> list[Row]:
    """Match and lease at every size, and what the largest costs against the smallest."""
    rows: list[Row] = []
    first: dict[str, float] = {}
    for pages in resident:
        population = populated(page_tokens, pages, SHORT, spare_pages=64)
        new = match_rows(population, page_tokens, pages, SHORT)
        name = f"acquire + release {SHORT:,} tokens, one node"
        new.append(lease_row(population.cache, population.prompts[:HOT_PROMPTS], name, None))
        rows += new
        for row in (new[0], new[-1]):
            first.setdefault(row.name, row.measured)
            if pages == resident[-1] and len(resident) > 1:
                ratio = row.measured / first[row.name]
                label = f"{row.name}: {pages:,} pages / {resident[0]:,}"
                rows.append(Row(label, page_tokens, pages, ratio, "x", 1.3))
    return rows


def long_rows(page_tokens: int, pages: int) -> list[Row]:
    return match_rows(populated(page_tokens, pages, LONG), page_tokens, pages, LONG)


# Insert


def insert_rows(page_tokens: int, tokens: int, goal: float | None) -> list[Row]:
    """The tree's part: a walk, a split in the middle, and a new node with the other half.

    What is parted from was stored just before; `cold` is the same after many others were stored.
    """
    rng = np.random.default_rng(4)
    tree = Tree(page_tokens)
    root = tree.ensure_root(NAMESPACE, 0)
    pages = tokens // page_tokens
    new_ids = itertools.count(step=2 * pages)

    def prepared() -> Callable[[], object]:
        base = random_tokens(rng, tokens)
        first = next(new_ids)
        ids = np.arange(first, first + 2 * pages, dtype=np.int32)
        tree.extend(Match(ids[:0], root, 0, False), base, ids[:pages])
        other = diverging(base, seed=first)
        new = ids[pages : pages + pages - pages // 2]

        def insert() -> None:
            match = tree.match(NAMESPACE, 0, other)
            assert match is not None
            tree.extend(match, other[match.pages.size * page_tokens :], new)

        return insert

    hot = median_us(prepared() for _ in range(60))
    cold = median_us([prepared() for _ in range(60)])
    name = f"diverging insert of {tokens:,} tokens"
    return [
        Row(name, page_tokens, tree.page_count, hot, goal=goal),
        Row(f"{name}, cold", page_tokens, tree.page_count, cold),
    ]


def facade_insert_row(page_tokens: int, tokens: int) -> Row:
    """What a request pays when its half-new prompt is computed: the whole of `insert`."""
    population = populated(page_tokens, 40 * (tokens // page_tokens), tokens, spare_pages=0)
    cache = empty_cache(page_tokens, 80 * (tokens // page_tokens))
    calls = []
    for turn, prompt in enumerate(population.prompts):
        store(cache, prompt)
        lease = cache.acquire(NAMESPACE, diverging(prompt, seed=turn))
        assert isinstance(lease, Lease)
        calls.append(lambda lease=lease: cache.insert(lease, tokens))
    name = f"TierCache.insert, half of {tokens:,} tokens new"
    return Row(name, page_tokens, cache.catalog.page_count, median_us(calls))


# Eviction


def eviction_rows(slots: int, run_pages: int, *, copies: bool, passes: int) -> list[Row]:
    """DEVICE full of prompts of `run_pages` pages; makes room 64 pages at a time, down to half.

    With `copies` every page is on HOST too, as after write-through; otherwise victims are lost,
    and forgotten by the tree as well.
    """
    passes_us = []
    for turn in range(passes):
        cache = _full_cache(slots, run_pages, copies=copies, seed=turn)
        gc.collect()
        passes_us.append(list(_evictions(cache, slots // 2)))
    name = f"evict {EVICTED_AT_ONCE} of {run_pages}-page prompts, {'a drop' if copies else 'lost'}"
    wall, cpu = ([[call[of] for call in one] for one in passes_us] for of in (0, 1))
    rows = []
    for of, times in (("", wall), (", processor time", cpu)):
        a_victim = statistics.median(statistics.mean(one) / EVICTED_AT_ONCE for one in times)
        longest = statistics.median(max(one) for one in times)
        rows.append(Row(f"{name}: a victim{of}", 16, slots, a_victim, goal=3.0))
        rows.append(Row(f"{name}: longest call{of}", 16, slots, longest, goal=2000.0))
    return rows


def _full_cache(slots: int, run_pages: int, *, copies: bool, seed: int) -> TierCache:
    cache = empty_cache(16, slots, slots if copies else 0)
    rng = np.random.default_rng(seed)
    for _ in range(slots // run_pages - 1):
        store(cache, random_tokens(rng, run_pages * 16))
    if copies:
        pages = cache.catalog.tiers[Tier.DEVICE].slot_page
        pages = pages[pages >= 0]
        cache.catalog.begin_fill(Tier.HOST, pages)
        cache.catalog.commit(Tier.HOST, pages)
    return cache


def _evictions(cache: TierCache, until_free: int) -> Iterator[tuple[float, float]]:
    """Microseconds of each call: as the clock goes, and of the processor.

    On a machine that others use, the longest by the clock is how long they kept it.
    """
    columns = cache.catalog.tiers[Tier.DEVICE]
    while columns.free_count < until_free:
        wanted = columns.free_count + EVICTED_AT_ONCE
        started, started_cpu = time.perf_counter_ns(), time.thread_time_ns()
        cache.room.make(Tier.DEVICE, wanted)
        cpu, wall = time.thread_time_ns() - started_cpu, time.perf_counter_ns() - started
        yield wall / 1000, cpu / 1000
        assert columns.free_count == wanted


# The yardstick


def baseline_rows(page_tokens: int, tokens: int) -> list[Row]:
    rng = np.random.default_rng(5)
    slots = range(tokens // page_tokens)
    cache = BaselineRadix(page_tokens)
    prompts = [random_tokens(rng, tokens) for _ in range(HOT_PROMPTS)]
    lists = [prompt.tolist() for prompt in prompts]
    for prompt in lists:
        cache.insert(prompt, slots)
    match = median_us((lambda p=p: cache.match(p)) for p in lists * 4)
    others = [diverging(prompt, seed).tolist() for seed, prompt in enumerate(prompts)]
    insert = median_us((lambda p=p: cache.insert(p, slots)) for p in others)
    resident = HOT_PROMPTS * len(slots)
    return [
        Row(f"baseline: match {tokens:,} tokens", page_tokens, resident, match),
        Row(f"baseline: diverging insert of {tokens:,} tokens", page_tokens, resident, insert),
    ]


def baseline_eviction_rows(slots: int) -> list[Row]:
    """One-page nodes, as many as there are slots, so that it evicts exactly what is asked."""
    cache = BaselineRadix(16)
    rng = np.random.default_rng(6)
    for slot in range(slots):
        cache.insert(random_tokens(rng, 16).tolist(), [slot])
    times = []
    for _ in range(8):
        started = time.perf_counter_ns()
        assert cache.evict(EVICTED_AT_ONCE) == EVICTED_AT_ONCE
        times.append((time.perf_counter_ns() - started) / 1000)
    name = f"baseline: evict {EVICTED_AT_ONCE} one-page nodes"
    return [
        Row(f"{name}: a victim", 16, slots, statistics.mean(times) / EVICTED_AT_ONCE),
        Row(f"{name}: longest call", 16, slots, max(times)),
    ]


# Everything


def measure(*, quick: bool) -> list[Row]:
    sizes = (10_000, 100_000) if quick else (10_000, 100_000, 1_000_000)
    rows: list[Row] = []
    for page_tokens in (16, 1, 64):
        goals = (20.0, 160.0) if page_tokens == 16 else (None, None)
        rows += size_rows(page_tokens, sizes)
        for pages in sizes:
            if pages * page_tokens >= LONG:
                rows += long_rows(page_tokens, pages)
        rows += many_node_rows(page_tokens)
        for tokens, goal in zip((SHORT, LONG), goals, strict=True):
            rows += insert_rows(page_tokens, tokens, goal)
            rows += baseline_rows(page_tokens, tokens)
        rows.append(facade_insert_row(page_tokens, SHORT))
    for run_pages, copies in itertools.product((64, 1), (True, False)):
        passes = 1 if quick or run_pages == 1 else 5
        rows += eviction_rows(100_000, run_pages, copies=copies, passes=passes)
    rows += baseline_eviction_rows(10_000 if quick else 100_000)
    rows.append(Row("columns a page, on all tiers", 16, 0, bytes_per_page(), "bytes", 120))
    rows.append(Row("of those, for queue and hints", 16, 0, bytes_for_wishes(), "bytes"))
    rows.append(Row("a node, its tokens aside", 16, 0, bytes_per_node(16), "bytes", 900))
    return rows


def print_rows(rows: list[Row]) -> None:
    table = Table(title="The decision core")
    for column in ("", "page_tokens", "pages resident", "measured", "goal", ""):
        table.add_column(column, justify="left" if not column else "right")
    for row in rows:
        table.add_row(
            row.name,
            str(row.page_tokens),
            f"{row.resident_pages:,}" if row.resident_pages else "",
            f"{row.measured:,.2f} {row.unit}",
            f"≤ {row.goal:g} {row.unit}" if row.goal is not None else "",
            {None: "", True: "[green]met[/]", False: "[red]not met[/]"}[row.met],
        )
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer pages, one pass")
    parser.add_argument("--no-engine", action="store_true", help="leave the serving step out")
    options = parser.parse_args()
    measured_on: dict[str, Any] = machine()
    console.print(measured_on)
    rows = measure(quick=options.quick)
    result: dict[str, Any] = {"rows": [asdict(row) | {"met": row.met} for row in rows]}
    print_rows(rows)
    if not options.no_engine:
        from benchmarks.core_share import print_share, share_of_a_step

        result["engine"] = share_of_a_step(quick=options.quick)
        print_share(result["engine"], console)
    path = save("core-quick" if options.quick else "core", measured_on, result)
    console.print(f"written to {path.name}")


if __name__ == "__main__":
    main()
