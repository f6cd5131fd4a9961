"""Where a prompt's tokens came from: every one a hit on one tier or a miss with one reason."""

from __future__ import annotations

from collections import Counter

import numpy as np

from tiercache.lease import Books
from tiercache.tree import Match
from tiercache.types import MissReason, Tier


def account_prompt(
    prompt_tokens: int,
    page_tokens: int,
    sources: np.ndarray,
    match: Match | None,
    because: MissReason | None = None,
) -> Books:
    """Books for a prompt whose first `sources.size` pages are used.

    `sources` is int8 `[pages]`: the tier each used page's bytes come from. `match` says what is
    stored. `because` is the reason for pages that are stored but not used or, when it is
    `BEING_COMPUTED`, for pages that somebody else was computing and that were not waited for.
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
    matched_pages = int(match.pages.size) if match else 0
    misses: Counter[MissReason] = Counter()

    stored_pages = min(matched_pages, full_pages) - used_pages
    if stored_pages and matched_pages * page_tokens == prompt_tokens:
        # The whole prompt is stored; its last token is computed for the sake of its logits.
        misses[MissReason.LAST_TOKEN] = page_tokens
        stored_pages -= 1
    if stored_pages:
        misses[because or MissReason.LOAD_FAILED] += stored_pages * page_tokens
    new_pages = full_pages - max(matched_pages, used_pages)
    if new_pages > 0:
        misses[_why_new(match, because)] += new_pages * page_tokens
    tail_tokens = prompt_tokens - full_pages * page_tokens
    if tail_tokens:
        misses[MissReason.PARTIAL_PAGE] += tail_tokens
    return Books(prompt_tokens, hits, dict(misses))


def _why_new(match: Match | None, because: MissReason | None) -> MissReason:
    """Why pages beyond everything stored are missing."""
    if because is MissReason.BEING_COMPUTED:
        return because
    if match is not None and (match.beyond or match.pages.size):
        return MissReason.DIVERGED
    return MissReason.NEVER_SEEN
