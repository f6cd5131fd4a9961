"""Warming a prefix by hand: what is stored of it on DISK only is read into HOST."""

from __future__ import annotations

from dataclasses import dataclass

from tiercache.cache import TierCache
from tiercache.prefetch import Prefetcher
from tiercache.types import Tokens

_BY_HAND = "by hand"


@dataclass(frozen=True, slots=True)
class Warmed:
    """Tokens of a prompt by what warming it does. `stored` = `in_memory` + `reading` + `on_disk`.

    `in_memory_tokens` are on HOST or DEVICE, or on their way there, already; `reading_tokens` are
    on their way now; `on_disk_tokens` stay, for lack of budget or room, or because HOST is off.
    """

    prompt_tokens: int
    stored_tokens: int
    in_memory_tokens: int
    reading_tokens: int
    on_disk_tokens: int


def warm(
    cache: TierCache, namespace: bytes, tokens: Tokens, share: float, tenant: str = ""
) -> Warmed:
    """Starts reading the stored prefix of `tokens` into HOST, `share` of HOST at most, and no more
    than the quota of `tenant` has room for.

    Engine thread only. The pages stay there as long as eviction lets them, as after a use.
    """
    prefetcher = Prefetcher(cache, share)
    path = prefetcher.usable_prefix(namespace, tokens)
    cold = prefetcher.only_on_disk(path)
    books = cache.catalog.tenants
    payer = None if books is None else books.index(tenant)
    prefetcher.begin(_BY_HAND, namespace, tokens, payer, by_hand=True)
    reading = prefetcher.begun_pages(_BY_HAND)
    page = cache.page_tokens
    return Warmed(
        prompt_tokens=int(tokens.size),
        stored_tokens=int(path.size) * page,
        in_memory_tokens=int(path.size - cold.size) * page,
        reading_tokens=reading * page,
        on_disk_tokens=(int(cold.size) - reading) * page,
    )
