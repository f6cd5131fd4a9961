"""Pages of a served engine, down to DISK and back: every byte as it was."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.gpu.ground import BIG_PAGES, SMALL_PAGES, Dims, Ground, Row
from benchmarks.gpu.served import Served, Sizes, loaded
from tiercache.types import Tier

_PAGES = 20


def bytes_come_back(ground: Ground) -> Iterator[Row]:
    """DEVICE → HOST → DISK → DEVICE by evictions, with all that was free scribbled over."""
    ground.require()
    kinds = ((BIG_PAGES, 4096, "by the copy engine"), (SMALL_PAGES, 1 << 30, "by the kernel"))
    for dims, engine_bytes, name in kinds:
        ground.engine_bytes = engine_bytes
        asked = replace(dims, layers=2) if ground.rehearses else dims
        with tempfile.TemporaryDirectory() as folder:
            same, hit = _round_trip(ground, asked, Path(folder))
        yield Row("bytes", f"DEVICE-HOST-DISK-DEVICE {name}", str(same), "", "True", same)
        whole = hit == _PAGES * dims.page_tokens
        yield Row("bytes", f"tokens that came from DISK, {name}", hit, "", "all", whole)


def _round_trip(ground: Ground, dims: Dims, folder: Path) -> tuple[bool, int]:
    tokens = _PAGES * dims.page_tokens
    model = loaded(ground.make_model(dims), ground.dtype)
    prompt = np.random.default_rng(5).integers(0, dims.vocabulary, tokens + 5).astype(np.int32)
    sizes = Sizes(device=2 * tokens, host=2 * tokens, disk=2 * tokens, chunk=64)
    with Served(ground, model, folder, sizes) as served:
        served.ask(prompt, store=True).wait()
        before = served.device_bytes(prompt)
        assert before.any(), "pages that were computed are not empty"
        served.evict(Tier.DEVICE, Tier.HOST)
        served.scribble()
        again = served.ask(prompt, store=True).wait()
        after = served.device_bytes(prompt)
    return bool((after == before).all()), again.usage.hit_tokens.get(Tier.DISK, 0)
