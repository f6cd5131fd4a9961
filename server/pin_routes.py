"""Pins over HTTP, and what requests may ask for their pages.

GET    /v1/cache/pins                                     all pins, or a tenant's own
POST   /v1/cache/pins  {"prompt": …, "ttl_seconds": …}     keeps what is stored of a prefix
DELETE /v1/cache/pins  {"id": …}                          gives one back
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import APIRouter, Request
from pydantic import Field

from engine.keep import Keep
from server.body import Body
from server.callers import Caller, caller_of
from server.context import Served, served
from server.errors import ApiError, bad_field
from server.openai_schema import LONGEST_TTL_SECONDS, CacheWishes
from server.prompt import SaltedPrompt, source_tokens
from tiercache.cache import TierCache
from tiercache.catalog import USUAL_PRIORITY
from tiercache.errors import RetentionError
from tiercache.retention import Pin
from tiercache.types import Tokens
from tiercache.wishes import WillReturn

T = TypeVar("T")

router = APIRouter(prefix="/v1/cache")

_WILL_RETURN = {
    "yes": WillReturn.YES,
    "no": WillReturn.NO,
    "unknown": WillReturn.UNKNOWN,
}


class PinRequest(SaltedPrompt):
    """What to keep, and for how long; without `ttl_seconds` until it is released."""

    ttl_seconds: float | None = Field(default=None, gt=0, le=LONGEST_TTL_SECONDS)


class ReleaseRequest(Body):
    """The pin to give back."""

    id: int


@router.get("/pins")
async def pins(request: Request) -> dict[str, Any]:
    """Every pin; a tenant sees its own."""
    caller = caller_of(request)

    def listed(cache: TierCache) -> list[dict[str, Any]]:
        return [_body(cache, pin) for pin in cache.retention.pins if caller.may_see(pin.tenant)]

    return {"pins": await served(request).command(listed)}


@router.post("/pins")
async def pin(request: Request) -> dict[str, Any]:
    """Keeps what is stored of a prefix on every tier it is on."""
    here, caller = served(request), caller_of(request)
    caller.require("pin", "pin")

    def prepare(body: PinRequest) -> tuple[Tokens, bytes, float | None]:
        tokens = source_tokens(here.engine.model, body)
        return tokens, here.namespace(request, body.cache_salt), body.ttl_seconds

    tokens, namespace, ttl_seconds = await here.parse(request, PinRequest, prepare)

    def take(cache: TierCache) -> dict[str, Any] | None:
        if not cache.stored_tokens(namespace, tokens):
            return None
        new = cache.retention.pin(
            namespace,
            tokens,
            ttl_seconds=ttl_seconds,
            tenant=caller.tenant,
            most_pins=caller.most_pins,
        )
        return _body(cache, new)

    body = await _refusable(here, take, "pin")
    if body is None:
        raise ApiError(404, "nothing is stored of this prefix", code="nothing_stored")
    return body


@router.delete("/pins")
async def release(request: Request) -> dict[str, Any]:
    """Gives a pin back; a tenant can give back its own."""
    here, caller = served(request), caller_of(request)
    serial = await here.parse(request, ReleaseRequest, lambda body: body.id)

    def give_back(cache: TierCache) -> bool:
        mine = {pin.serial for pin in cache.retention.pins if _may_release(caller, pin)}
        return serial in mine and cache.retention.release(serial)

    if not await here.command(give_back):
        raise ApiError(404, f"there is no pin {serial}", param="id", code="no_such_pin")
    return {"id": serial, "released": True}


def wishes_of(wishes: CacheWishes, caller: Caller) -> Keep:
    """What a request asks for its pages. Raises ApiError for what its caller may not ask."""
    if wishes.pin:
        caller.require("pin", "cache.pin")
    if wishes.priority is not None and wishes.priority > USUAL_PRIORITY:
        caller.require("priority", "cache.priority")
    if wishes.ttl_seconds is not None and not wishes.pin:  # with a pin it only ends it sooner
        caller.require("ttl_seconds", "cache.ttl_seconds")
    if not wishes.store:
        caller.require("store", "cache.store")
        if wishes.pin:
            raise bad_field("cache.pin", "there is nothing to pin when cache.store is false")
    return Keep(
        priority=wishes.priority,
        may_lower=caller.may("priority"),
        ttl_seconds=wishes.ttl_seconds,
        pin=wishes.pin,
        most_pins=caller.most_pins,
        will_return=_WILL_RETURN[wishes.will_return],
        store=wishes.store,
    )


async def require_room_for_pin(
    here: Served, namespace: bytes, tokens: Tokens, caller: Caller
) -> None:
    """Raises ApiError, with the figures, when a pin of this prompt could not be honoured."""

    def ask(cache: TierCache) -> None:
        cache.retention.require_room(
            namespace, tokens, tenant=caller.tenant, most_pins=caller.most_pins
        )

    await _refusable(here, ask, "cache.pin")


async def _refusable(here: Served, function: Callable[[TierCache], T], param: str) -> T:
    """Runs `function` on the engine thread; what cannot be honoured becomes a 400 on `param`."""
    try:
        return await here.command(function)
    except RetentionError as error:
        raise bad_field(param, str(error)) from None


def _may_release(caller: Caller, pin: Pin) -> bool:
    return caller.is_admin or (bool(caller.tenant) and pin.tenant == caller.tenant)


def _body(cache: TierCache, pin: Pin) -> dict[str, Any]:
    left = None if pin.until_seconds is None else pin.until_seconds - cache.clock.now_seconds()
    return {
        "id": pin.serial,
        "tenant": pin.tenant or None,
        "tokens": len(pin.pages) * cache.page_tokens,
        "pages": len(pin.pages),
        "expires_in_seconds": None if left is None else round(max(0.0, left), 3),
    }
