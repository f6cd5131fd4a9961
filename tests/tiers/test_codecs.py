"""Stored forms: exact ones come back exactly, lossy ones within their bound and never unasked."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tiers.disk_parts import FULL, WRITTEN, folder_bytes
from tiercache.codecs import codecs_for
from tiercache.codecs.int8 import ERROR_SHARE
from tiercache.errors import CodecError, PageCorrupt
from tiercache.testing.disk_pages import MIB, chain
from tiercache.tiers.disk import DiskStore, PageRecord
from tiercache.tiers.disk_folder import StoreFolder
from tiercache.types import Bytes, PageLayout

DTYPES = ("bfloat16", "float16", "float32")
LAYOUT = PageLayout(layers=4, kv_heads=2, head_dim=32, page_tokens=4)


def layout_of(dtype: str) -> PageLayout:
    return PageLayout(4, 2, 32, 4, dtype)


def to_page(numbers: np.ndarray, dtype: str) -> Bytes:
    if dtype == "bfloat16":
        words = (numbers.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        return words.view(np.uint8).copy()
    return numbers.astype(dtype).view(np.uint8).copy()


def to_numbers(page: Bytes, layout: PageLayout) -> np.ndarray:
    if layout.dtype == "bfloat16":
        numbers = (page.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    else:
        numbers = page.view(layout.dtype).astype(np.float32)
    return numbers.reshape(layout.shape)


def kv_like(layout: PageLayout, seed: int = 0) -> np.ndarray:
    """Normal numbers whose channels differ in size, as those of K do."""
    choice = np.random.default_rng(seed)
    scale = choice.lognormal(0, 1, (layout.layers, 2, 1, layout.kv_heads, layout.head_dim))
    return (choice.standard_normal(layout.shape) * scale).astype(np.float32).reshape(-1)


def awkward(layout: PageLayout) -> np.ndarray:
    numbers = kv_like(layout)
    numbers[:8] = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40, -1e-8, 6e4]
    return numbers


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("make", [kv_like, awkward])
def test_lossless_gives_back_every_bit_and_takes_less(dtype: str, make: Any) -> None:
    layout = layout_of(dtype)
    codec = codecs_for(layout.page_bytes, layout)["lossless"]
    page = to_page(make(layout), dtype)
    stored, out = codec.encode(page), np.empty_like(page)
    assert stored is not None
    assert stored.size < page.size
    codec.decode(stored.copy(), out)
    assert np.array_equal(out, page)


@pytest.mark.parametrize("dtype", DTYPES)
def test_int8_is_within_its_bound_of_what_shares_a_scale(dtype: str) -> None:
    layout = layout_of(dtype)
    codec = codecs_for(layout.page_bytes, layout)["int8"]
    for seed in range(20):
        page = to_page(kv_like(layout, seed), dtype)
        stored, out = codec.encode(page), np.empty_like(page)
        assert stored is not None
        assert stored.size == codec.expected_bytes
        codec.decode(stored, out)
        before, after = to_numbers(page, layout), to_numbers(out, layout)
        rounding = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-23}[dtype]
        for half, axis in ((0, 1), (1, 3)):
            largest = np.abs(before[:, half]).max(axis, keepdims=True)
            bound = largest * ERROR_SHARE + np.abs(after[:, half]) * rounding
            assert (np.abs(before[:, half] - after[:, half]) <= bound).all()


def test_int8_leaves_a_page_alone_that_it_cannot_describe() -> None:
    codec = codecs_for(LAYOUT.page_bytes, LAYOUT)["int8"]
    assert codec.encode(to_page(awkward(LAYOUT), "bfloat16")) is None
    zeros = np.zeros(LAYOUT.page_bytes, np.uint8)
    stored, out = codec.encode(zeros), np.ones_like(zeros)
    assert stored is not None
    codec.decode(stored, out)
    assert not out.any()


@pytest.mark.parametrize("name", ["raw", "lossless", "int8"])
def test_what_is_no_stored_form_is_refused_and_never_ends_the_process(name: str) -> None:
    """The checksum stands before the decoder; this is about what it lets through never."""
    codec = codecs_for(LAYOUT.page_bytes, LAYOUT)[name]
    stored = codec.encode(to_page(kv_like(LAYOUT), "bfloat16"))
    assert stored is not None
    out, choice = np.empty(LAYOUT.page_bytes, np.uint8), random.Random(3)
    refused = 0
    for _ in range(200):
        spoilt = stored.copy()
        spoilt[choice.randrange(spoilt.size)] ^= 1 << choice.randrange(8)
        spoilt = spoilt[: choice.choice([spoilt.size, choice.randrange(spoilt.size)])]
        try:
            codec.decode(spoilt, out)
        except CodecError:
            refused += 1
    assert refused > 50


# In a store


def opened_as(path: Path, codec: str, **changes: Any) -> DiskStore:
    wanted = {"capacity_bytes": MIB, "free_space_floor_bytes": 0, **changes}
    return DiskStore.open(
        path,
        page_bytes=LAYOUT.page_bytes,
        page_tokens=LAYOUT.page_tokens,
        codec=codec,
        layout=LAYOUT,
        **wanted,
    )


def page_of(record: PageRecord) -> Bytes:
    return to_page(kv_like(LAYOUT, int.from_bytes(record.key[:4], "little")), "bfloat16")


def put(store: DiskStore, records: list[PageRecord]) -> None:
    assert set(store.write([(record, page_of(record)) for record in records])) == {WRITTEN}


def get(store: DiskStore, record: PageRecord) -> Bytes:
    out = np.empty(LAYOUT.page_bytes, np.uint8)
    store.read_into(record, out)
    return out


def test_a_store_reads_what_each_exact_codec_has_written(path: Path) -> None:
    batches = {"raw": chain(3), "lossless": chain(3, seed=1)}
    for codec, records in batches.items():
        with opened_as(path, codec) as store:
            put(store, records)
    for codec in (*batches, "auto"):
        with opened_as(path, codec) as store:
            for record in batches["raw"] + batches["lossless"]:
                assert np.array_equal(get(store, record), page_of(record))


@pytest.mark.parametrize("codec", ["raw", "lossless", "auto"])
def test_lossy_pages_are_dropped_under_an_exact_setting(path: Path, codec: str) -> None:
    with opened_as(path, "int8") as store:
        put(store, chain(3))
        assert not np.array_equal(get(store, chain(1)[0]), page_of(chain(1)[0]))
    with opened_as(path, codec) as store:
        assert store.records() == []
        put(store, chain(3))
        assert np.array_equal(get(store, chain(3)[2]), page_of(chain(3)[2]))


def test_rot_in_a_compressed_page_is_found(path: Path) -> None:
    (record,) = chain(1)
    with opened_as(path, "lossless") as store:
        put(store, [record])
        stored = store._forms.encode([(record, page_of(record))])[0].payload.tobytes()
    file = path / "pages" / "data.mdb"
    raw = bytearray(file.read_bytes())
    raw[raw.index(stored) + len(stored) // 2] ^= 1
    file.write_bytes(raw)
    with opened_as(path, "lossless") as store, pytest.raises(PageCorrupt, match="checksum"):
        get(store, record)


@pytest.mark.parametrize(("codec", "least_gain"), [("int8", 1.5), ("lossless", 1.1)])
def test_smaller_pages_are_more_pages(path: Path, codec: str, least_gain: float) -> None:
    with opened_as(path.with_name("raw"), "raw", capacity_bytes=4 * MIB) as raw:
        raw_pages = raw.capacity_pages
    with opened_as(path, codec, capacity_bytes=4 * MIB) as store:
        assert store.capacity_pages > least_gain * raw_pages
        records = [chain(1, seed)[0] for seed in range(store.capacity_pages)]
        put(store, records)
        assert folder_bytes(path) <= 4 * MIB


def test_pages_of_all_sizes_turn_over_within_the_capacity(path: Path) -> None:
    """Half of them noise that no codec makes smaller: room is counted in bytes, not in pages."""
    choice = random.Random(5)
    noise = np.random.default_rng(1).integers(0, 256, LAYOUT.page_bytes, dtype=np.uint8)
    live: list[PageRecord] = []
    refused = 0
    with opened_as(path, "lossless") as store:
        for seed in range(5 * store.capacity_pages):
            (record,) = chain(1, seed)
            page = noise if seed % 2 else page_of(record)
            while store.write([(record, page)]) == [FULL]:
                refused += 1
                gone = [live.pop(choice.randrange(len(live))) for _ in range(2)]
                store.delete([old.key for old in gone])
            live.append(record)
            assert folder_bytes(path) <= MIB
        assert refused > 0
        assert store.verify().good_pages == len(live) > 0.6 * store.capacity_pages


@pytest.mark.parametrize(("bytes_per_second", "chosen"), [(100e6, "lossless"), (2e9, "raw")])
def test_auto_is_decided_once_by_the_speed_of_the_disk(
    path: Path, monkeypatch: pytest.MonkeyPatch, bytes_per_second: float, chosen: str
) -> None:
    measured = [bytes_per_second, 1e9]
    monkeypatch.setattr(StoreFolder, "measured_bytes_per_second", lambda _: measured.pop(0))
    for _ in range(2):
        with opened_as(path, "auto") as store:
            assert store._forms.codec.name == chosen
    assert measured == [1e9]
