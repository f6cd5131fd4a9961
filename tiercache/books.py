"""Where a prompt's tokens came from: every one a hit on one tier or a miss with one reason."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tiercache.explain.spans import Detail, MissSpan, tokens_by_reason
from tiercache.lease import Books
from tiercache.types import MissReason, Tier

NewPages = Callable[[int, int], list[MissSpan]]
"""Why pages `[first, stop)`, of which nothing is stored, are missing: spans that cover them."""


def account_prompt(
    prompt_tokens: int,
    page_tokens: int,
    sources: np.ndarray,
    stored_pages: int,
    new_pages: NewPages,
    because: MissReason = MissReason.LOAD_FAILED,
    detail: Detail | None = None,
) -> Books:
    """Books for a prompt whose first `sources.size` pages are used.

    `sources` is int8 `[pages]`: the tier each used page's bytes come from. `stored_pages` is how
    many are stored; `because` and `detail` say why those that are stored are not used.
    """
    hits: dict[Tier, int] = {}
    used_pages = unbooked = int(sources.size)
    for tier in Tier:
        if not unbooked:
            break
        pages = int(np.count_nonzero(sources == int(tier)))
        if pages:
            hits[tier] = pages * page_tokens
            unbooked -= pages
    full_pages = prompt_tokens // page_tokens
    spans: list[MissSpan] = []

    unused_stop = min(stored_pages, full_pages)
    # A prompt that is stored as a whole: its last token is computed for the sake of its logits.
    is_stored_whole = used_pages < unused_stop and stored_pages * page_tokens == prompt_tokens
    last_pages = int(is_stored_whole)
    if unused_stop - last_pages > used_pages:
        stop = (unused_stop - last_pages) * page_tokens
        spans.append(MissSpan(used_pages * page_tokens, stop, because, detail or {}))
    if is_stored_whole:
        spans.append(MissSpan(prompt_tokens - page_tokens, prompt_tokens, MissReason.LAST_TOKEN))
    if full_pages > max(stored_pages, used_pages):
        spans += new_pages(max(stored_pages, used_pages), full_pages)
    if prompt_tokens > full_pages * page_tokens:
        below: Detail = {"page_tokens": page_tokens, "prompt_below_one_page": int(full_pages == 0)}
        start = full_pages * page_tokens
        spans.append(MissSpan(start, prompt_tokens, MissReason.PARTIAL_PAGE, below))
    return Books(prompt_tokens, hits, tokens_by_reason(spans), tuple(spans))


def computed_instead(
    books: Books, page_tokens: int, sources: np.ndarray, computed: np.ndarray, detail: Detail
) -> Books:
    """The books of a prompt some of whose stored pages were computed while the others loaded.

    `sources` is int8 `[pages]`, the tier that `books` has each page come from, and `computed` a
    mask over them. They miss because computing was sooner, as `detail` has it.
    """
    if not computed.any():
        return books
    hits = {
        tier: tokens - page_tokens * int(np.count_nonzero(computed & (sources == int(tier))))
        for tier, tokens in books.hit_tokens.items()
    }
    edges = np.flatnonzero(np.diff(computed, prepend=False, append=False)).reshape(-1, 2)
    spans = [
        MissSpan(start * page_tokens, stop * page_tokens, MissReason.COST_GATE, detail)
        for start, stop in edges.tolist()
    ]
    spans = sorted([*spans, *books.miss_spans], key=lambda span: span.start)
    kept = {tier: tokens for tier, tokens in hits.items() if tokens}
    return Books(books.prompt_tokens, kept, tokens_by_reason(spans), tuple(spans))
