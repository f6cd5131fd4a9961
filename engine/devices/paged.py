"""One forward pass over requests whose K and V lie in DEVICE pages and are read there.

No working copy: a request has a page table, the slots of its lease's pages in order, and attention
reads and writes through it. A stored prefix costs nothing to begin with, and a completed page is in
its place already.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
import numpy.typing as npt
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from engine.attention import UNSUPPORTED
from engine.devices.paged_batch import PagedBatch, PagedRequest, build_batch
from tiercache.errors import ConfigError
from tiercache.types import Slots

if TYPE_CHECKING:
    from engine.devices.graphs import DecodeGraphs
    from engine.models.load import LoadedModel
    from engine.runner import Segment

PAGED_ATTENTION = "tiercache-paged"


class PagedAttention(Protocol):
    """A way to compute attention over pages: `triton`, `flashinfer`, or `gather` for any size.

    pages is one layer of the pool, `[slots, 2, page_tokens, kv_heads, head_dim]`, strided.
    """

    tile_tokens: int
    """Into how large pieces it wants prompts cut, see `build_batch`."""

    def write(
        self, key: torch.Tensor, value: torch.Tensor, pages: torch.Tensor, batch: PagedBatch
    ) -> None:
        """Puts the new tokens' K and V, `[tokens, kv_heads, head_dim]`, into their places."""

    def attend(
        self, query: torch.Tensor, pages: torch.Tensor, batch: PagedBatch, scale: float
    ) -> torch.Tensor:
        """query `[tokens, heads, head_dim]` over all tokens up to each; returns its like."""


class PagedCopy:
    """Stands where a working copy does, and copies nothing: pages are computed in place."""

    def __init__(self) -> None:
        self.slots: Slots = np.empty(0, np.int32)
        """DEVICE slots of the request's pages, in order; set before each forward pass."""
        self.held_tokens = 0
        """As of working copies; nothing that an earlier request left is ever taken up here."""

    def load_pages(self, *_pages: object) -> None:
        """They are read where they are."""

    def store_pages(self, *_pages: object) -> None:
        """They were written where they are kept."""


class PagedCopyPool:
    """Stands where the pool of working copies does; there is always another."""

    capacity_tokens = 0
    used_bytes = 0

    def has_room(self, _tokens: int) -> bool:
        return True

    def acquire(self, _tokens: int, _wanted: object = None) -> PagedCopy:
        return PagedCopy()

    def release(self, copy: PagedCopy, _sequence: object = None) -> None:
        copy.slots = copy.slots[:0]


@dataclass(frozen=True, slots=True)
class PagedForward:
    """What attention has to know in a pass, the same in every layer."""

    pool: torch.Tensor
    batch: PagedBatch
    attention: PagedAttention
    waits: tuple[Callable[[int], None], ...]


def paged_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    paged: PagedForward,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Transformers' attention interface. Shapes as in `engine.attention.paged_attention`."""
    assert attention_mask is None, "page tables carry what a mask would"
    for name in UNSUPPORTED:
        if options.get(name) is not None:
            raise ConfigError(f"model.source: this model's attention needs {name}, which is absent")
    layer = module.layer_idx
    for wait in paged.waits:
        wait(layer)  # the one place: nobody reads a prefix before it has arrived
    pages = paged.pool[:, layer]
    rows = [one[0].transpose(0, 1) for one in (query, key, value)]
    paged.attention.write(rows[1], rows[2], pages, paged.batch)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    return paged.attention.attend(rows[0], pages, paged.batch, scale)[None], None


# No mask function is registered under this name, and that is what makes transformers build none.
ALL_ATTENTION_FUNCTIONS.register(PAGED_ATTENTION, paged_attention)


class PagedRunner:
    """As `ModelRunner`, for segments whose working copy is a `PagedCopy`."""

    def __init__(
        self,
        loaded: LoadedModel,
        pool: torch.Tensor,
        attention: PagedAttention,
        graphs: DecodeGraphs | None = None,
        rest: Callable[[], None] = lambda: None,
    ) -> None:
        """pool is `[slots, layers, 2, page_tokens, kv_heads, head_dim]`, where the model is.

        `rest` waits for what is computed: who asks for logits waits for those, and a step that
        gives none would otherwise seem to have taken no time.
        """
        self._loaded = loaded
        self._pool = pool
        self._attention = attention
        self._graphs = graphs
        self._rest = rest
        loaded.model.set_attn_implementation(PAGED_ATTENTION)

    @torch.inference_mode()
    def forward(self, segments: Sequence[Segment]) -> torch.Tensor:
        """See `ModelRunner.forward`; the logits stay on the device."""
        assert segments, "a batch has at least one segment"
        requests = [_request(segment) for segment in segments]
        tokens = np.concatenate([segment.tokens for segment in segments])
        waits = tuple(segment.wait_layer for segment in segments if segment.wait_layer is not None)
        wants_all = all(segment.wants_logits for segment in segments)
        if self._graphs is not None and not waits and wants_all:
            logits = self._graphs.forward(requests, tokens, self.compute)
            if logits is not None:
                return logits.float()
        batch = build_batch(
            requests, self._pool.shape[3], self._attention.tile_tokens, self._pool.device
        )
        ends = np.cumsum([request.tokens for request in requests]) - 1
        wanted = ends[[segment.wants_logits for segment in segments]]
        positions = np.concatenate(
            [np.arange(r.position, r.position + r.tokens, dtype=np.int64) for r in requests]
        )
        logits = self.compute(
            self._put(tokens.astype(np.int64)),
            self._put(positions),
            self._put(wanted.astype(np.int64)),
            batch,
            waits,
        )
        if not wanted.size:
            self._rest()
        return logits.float()

    def compute(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        wanted: torch.Tensor,
        batch: PagedBatch,
        waits: tuple[Callable[[int], None], ...] = (),
    ) -> torch.Tensor:
        """Logits `[wanted, vocabulary]` in the model's format, from int64 tensors."""
        output = self._loaded.model(
            input_ids=tokens[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=wanted,
            paged=PagedForward(self._pool, batch, self._attention, waits),
        )
        logits: torch.Tensor = output.logits[0]
        return logits

    def _put(self, values: npt.NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(values).to(self._pool.device, non_blocking=True)


def _request(segment: Segment) -> PagedRequest:
    copy = cast(PagedCopy, segment.working_copy)
    return PagedRequest(copy.slots, segment.position, len(segment.tokens))
