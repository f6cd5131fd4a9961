"""What is asked about the service itself, and the tokenizer as a service."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.responses import JSONResponse, Response

from engine.models import LoadedModel, decode
from server.body import Body
from server.cache_routes import tier_reasons
from server.context import served
from server.errors import bad_field
from server.openai_schema import TokenList
from server.prompt import PromptSource, prompt_tokens, source_tokens

router = APIRouter()

_MOST_TOKENS = 1 << 17
"""Or a context's where that is more: making text or an answer of millions holds up everybody."""


class TokenizeRequest(PromptSource):
    model: str | None = None


class DetokenizeRequest(Body):
    tokens: TokenList
    model: str | None = None


@router.get("/health")
async def health(request: Request) -> Response:
    """200 while requests are served, also when a tier is out of order; 503 when none can be."""
    engine = served(request).engine
    if engine.failure is not None:
        return JSONResponse({"status": "failed", "reasons": [engine.failure]}, 503)
    reasons = tier_reasons(engine.snapshot().cache)
    return JSONResponse({"status": "degraded" if reasons else "ok", "reasons": reasons})


@router.get("/ready")
async def ready(request: Request) -> Response:
    """200 when a request sent now would be taken."""
    here = served(request)
    reason = here.engine.failure
    if reason is None and here.open_requests.stopping:
        reason = "shutting down"
    if reason is not None:
        return JSONResponse({"ready": False, "reason": reason}, 503)
    return JSONResponse({"ready": True})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """All counts in Prometheus' text format."""
    registry: CollectorRegistry = request.app.state.metrics
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    return Response(encode(registry), headers={"content-type": content_type})


@router.post("/tokenize")
async def tokenize(request: Request) -> dict[str, Any]:
    """Token ids of a text, or of a conversation as the model would see it."""
    here = served(request)

    def prepare(body: TokenizeRequest) -> list[int]:
        if body.model is not None:
            here.require_model(body.model)
        found = source_tokens(here.engine.model, body)
        _require_few(here.engine.model, len(found), body.given_forms[0])
        tokens: list[int] = found.tolist()
        return tokens

    tokens = await here.parse(request, TokenizeRequest, prepare)
    limit = here.engine.model.max_context_tokens
    return {"tokens": tokens, "count": len(tokens), "max_context_tokens": limit}


@router.post("/detokenize")
async def detokenize(request: Request) -> dict[str, Any]:
    """The text of token ids."""
    here = served(request)

    def finish(body: DetokenizeRequest) -> str:
        if body.model is not None:
            here.require_model(body.model)
        _require_few(here.engine.model, len(body.tokens), "tokens")
        return decode(here.engine.model, prompt_tokens(here.engine.model, body.tokens, "tokens"))

    return {"text": await here.parse(request, DetokenizeRequest, finish)}


def _require_few(model: LoadedModel, count: int, param: str) -> None:
    """Raises ApiError naming `param` when `count` tokens are more than anybody needs."""
    most = max(_MOST_TOKENS, model.max_context_tokens)
    if count > most:
        raise bad_field(param, f"{count} tokens at once; at most {most} are taken")
