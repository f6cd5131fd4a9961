"""OpenAI's endpoints. The official client works against them unchanged."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from engine.api import Finished, GenerationRequest, TextDelta
from engine.keep import Keep
from engine.sampling import SamplingParams
from server.callers import caller_of
from server.context import Served, served
from server.errors import CLIENT_GONE, ApiError
from server.explain_routes import EXPLAIN_HEADER, summary_header
from server.openai_answers import DONE, Answer, running_usage, sse
from server.openai_schema import ChatRequest, CompletionRequest, Generation, StreamOptions
from server.pin_routes import require_room_for_pin, wishes_of
from server.prompt import chat_tokens, prompt_tokens
from server.stream import Generating
from tiercache.types import Tokens

router = APIRouter()


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that has been read, checked and tokenized."""

    body: Generation
    prompt: Tokens
    token_limit: int | None


@router.post("/v1/chat/completions")
async def chat_completions(request: Request) -> Response:
    """The assistant's next turn of a conversation."""
    here = served(request)

    def prepare(body: ChatRequest) -> Prepared:
        here.require_model(body.model)
        return Prepared(body, chat_tokens(here.engine.model, body.messages), body.token_limit)

    return await _complete(
        request, here, await here.parse(request, ChatRequest, prepare, generates=True), chat=True
    )


@router.post("/v1/completions")
async def completions(request: Request) -> Response:
    """The continuation of a text or of token ids."""
    here = served(request)

    def prepare(body: CompletionRequest) -> Prepared:
        here.require_model(body.model)
        return Prepared(body, prompt_tokens(here.engine.model, body.prompt), body.token_limit)

    prepared = await here.parse(request, CompletionRequest, prepare, generates=True)
    return await _complete(request, here, prepared, chat=False)


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    """The one model that is served."""
    return {"object": "list", "data": [_model_body(served(request))]}


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> dict[str, Any]:
    """The model, by its id."""
    here = served(request)
    here.require_model(name)
    return _model_body(here)


def _model_body(here: Served) -> dict[str, Any]:
    return {
        "id": here.model_name,
        "object": "model",
        "created": here.started_seconds,
        "owned_by": "tiercache",
        "max_context_tokens": here.engine.model.max_context_tokens,
    }


async def _complete(request: Request, here: Served, ready: Prepared, *, chat: bool) -> Response:
    request_id: str = request.state.request_id
    caller = caller_of(request)
    keep = wishes_of(ready.body.cache, caller)
    if keep.pin:
        namespace = here.namespace(request, ready.body.cache_salt)
        await require_room_for_pin(here, namespace, ready.prompt, caller)
    generating = Generating(
        here.engine,
        here.open_requests,
        request,
        _generation_request(request_id, ready, keep, caller.tenant),
        deadline_seconds=here.config.server.request_deadline_seconds,
        prompt_param="messages" if chat else "prompt",
    )
    answer = Answer(request_id, here.model_name, chat)
    if ready.body.stream:
        chunks = _stream(generating, answer, ready.body.stream_options, ready.prompt.size)
        headers = {"cache-control": "no-cache"}
        return StreamingResponse(chunks, media_type="text/event-stream", headers=headers)
    return await _whole(request, generating, answer)


def _generation_request(
    request_id: str, ready: Prepared, keep: Keep, tenant: str
) -> GenerationRequest:
    body = ready.body
    return GenerationRequest(
        request_id=request_id,
        prompt_tokens=ready.prompt,
        sampling=SamplingParams(
            temperature=body.temperature,
            top_p=body.top_p,
            top_k=body.top_k if body.top_k > 0 else None,
            seed=body.seed,
        ),
        max_tokens=ready.token_limit,
        stop=body.stop,
        cache_salt=body.cache_salt,
        tenant=tenant,
        keep=keep,
        ignore_eos=body.ignore_eos,
    )


async def _whole(request: Request, generating: Generating, answer: Answer) -> Response:
    texts: list[str] = []
    try:
        async for event in generating.events():
            if isinstance(event, Finished):
                body = answer.whole("".join(texts), event.reason, event.usage)
                found = summary_header(request, event.usage)
                return JSONResponse(body, headers={EXPLAIN_HEADER: found} if found else None)
            texts.append(event.text)
    finally:
        generating.close()
    return Response(status_code=CLIENT_GONE)


async def _stream(
    generating: Generating, answer: Answer, options: StreamOptions, prompt_tokens: int
) -> AsyncIterator[bytes]:
    """Chunks as they come; `[DONE]` ends a whole answer, an error event one that failed."""
    no_usage: dict[str, Any] = {"usage": None} if options.include_usage else {}
    try:
        if (opening := answer.opening()) is not None:
            yield sse(opening | no_usage)
        async for event in generating.events():
            if isinstance(event, TextDelta):
                if event.text:
                    usage = no_usage
                    if options.continuous_usage_stats:
                        usage = {"usage": running_usage(prompt_tokens, event.tokens)}
                    yield sse(answer.delta(event.text) | usage)
                continue
            yield sse(answer.closing(event.reason) | no_usage)
            if options.include_usage:
                yield sse(answer.usage_chunk(event.usage))
            yield DONE
    except ApiError as error:
        yield sse(error.body())
    finally:
        generating.close()
