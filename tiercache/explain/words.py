"""Reasons in words an operator can act on."""

from __future__ import annotations

import time

from tiercache.explain.spans import MissSpan
from tiercache.types import MissReason

_SENTENCES = {
    MissReason.NEVER_SEEN: "nothing is known of them: computed for the first time",
    MissReason.EVICTED: "they were stored and had to make room; a larger tier would have kept them",
    MissReason.NOT_WRITTEN: "they were computed before, and left {tier} without having been written"
    " to a slower tier",
    MissReason.OTHER_NAMESPACE: "the same tokens are stored under another namespace, which differs"
    " in: {differing_fields}",
    MissReason.OTHER_GENERATION: "they were stored in generation {stored_in_generation}, before the"
    " flush that began generation {generation}",
    MissReason.PARTIAL_PAGE: "only whole pages of {page_tokens} tokens are stored, and these do not"
    " fill one",
    MissReason.BEING_COMPUTED: "another request was computing them, and waiting for its next page"
    " took longer than cache.prefetch.join_deadline_seconds",
    MissReason.LOAD_FAILED: "they are stored and could not be loaded",
    MissReason.CHECKSUM_FAILED: "the stored copy was not what had been written, and was dropped",
    MissReason.COST_GATE: "they are stored, and computing them was expected to be faster than"
    " loading them",
    MissReason.DEADLINE: "they are stored and had not arrived within"
    " cache.prefetch.fetch_deadline_seconds",
    MissReason.DISABLED: "the cache is off (cache.enabled)",
    MissReason.LAST_TOKEN: "the whole prompt is stored; its last page is computed again for the"
    " next token's sake",
}


def sentence(span: MissSpan) -> str:
    """What happened to the tokens of `span`, in one sentence."""
    detail = {"tier": "its tier"} | dict(span.detail)
    if span.reason is MissReason.DIVERGED:
        text = (
            f"stored content begins like this prompt and parts from it at token"
            f" {detail['parts_at_token']}"
        )
        others = int(detail["stored_siblings"])
        text += f"; {others} other continuations are stored there" if others > 1 else ""
    elif span.reason is MissReason.PARTIAL_PAGE and detail.get("prompt_below_one_page"):
        text = "the whole prompt is shorter than one page of {page_tokens} tokens, and only"
        text = (text + " whole pages are stored").format(**detail)
    else:
        text = _SENTENCES[span.reason].format(**detail)
    if span.reason is MissReason.BEING_COMPUTED and detail.get("by_request"):
        text += f" ({detail['by_request']})"
    if span.reason is MissReason.COST_GATE and "load_all_seconds" in detail:
        text += (
            f" ({float(detail['chosen_seconds']):.3f} s instead of"
            f" {float(detail['load_all_seconds']):.3f} s)"
        )
    if "left_at" in detail:
        when = time.strftime("%H:%M:%S UTC", time.gmtime(float(detail["left_at"])))
        text += f" (left {detail['tier']} at {when})"
    return f"{span.tokens:,} tokens from {span.start:,}: {text}."
