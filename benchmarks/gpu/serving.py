"""A served engine: time to first token from every tier, how much of a load is hidden, decoding."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from benchmarks.gpu.ground import Ground, Row, at_least, out_of_time
from benchmarks.gpu.served import Served, Sizes, loaded
from engine.api import Finished
from tiercache.types import Tier, Tokens

HIDDEN_GOAL = 0.90
QUESTION_TOKENS = 50
_SLOWEST_DISK_SECONDS = 40.0
"""What writing a context down may take; a slower disk is left out, and that is told."""


class Prompts:
    """Prefixes, and questions behind them that are unlike each other from their first token on."""

    def __init__(self, ground: Ground) -> None:
        self._rng = np.random.default_rng(0)
        self._vocabulary = ground.dims.vocabulary

    def some(self, tokens: int) -> Tokens:
        found: Tokens = self._rng.integers(3, self._vocabulary, tokens).astype(np.int32)
        return found

    def behind(self, prefix: Tokens, tokens: int = QUESTION_TOKENS) -> Tokens:
        return np.concatenate([prefix, self.some(tokens)])


def time_to_first_token(ground: Ground) -> Iterator[Row]:
    """A prefix that is nowhere, on DEVICE, on HOST or on DISK, and a question behind it.

    One engine serves all; each state is reached by evicting, and questions are not stored.
    """
    ground.require()
    dims = ground.dims
    tokens = sum(dims.contexts) + max(dims.contexts) // 4 + 2 * dims.chunk
    sizes = Sizes(tokens, tokens, sum(dims.contexts) + 4 * dims.chunk, dims.chunk)
    model = loaded(ground.model(), ground.dtype)
    began = time.perf_counter()
    with (
        tempfile.TemporaryDirectory() as folder,
        Served(ground, model, Path(folder), sizes) as served,
    ):
        yield Row("ttft", "engine built and warm", round(time.perf_counter() - began, 2), "s")
        prompts = Prompts(ground)
        for context in dims.contexts:
            if ground.is_out_of_time:
                yield out_of_time("ttft", f"{context} tokens")
                continue
            prefix = prompts.some(context)
            yield from _states(served, prompts, prefix)
            if context == dims.contexts[0]:
                yield from _hidden(served, prompts, prefix)


def _states(served: Served, prompts: Prompts, prefix: Tokens) -> Iterator[Row]:
    context, repeats = len(prefix), 1 if served.ground.rehearses else 5
    stored = _median(served, prompts, prefix, "none", 1, store=True)
    unstored = served.ask(prompts.behind(prompts.some(context)), store=False)
    unstored.wait()
    cold = min(stored, unstored.seconds)
    yield Row("ttft", f"cold, {context} tokens", round(cold, 4), "s")
    is_written = served.comes_to_rest(_SLOWEST_DISK_SECONDS)
    warm = _median(served, prompts, prefix, Tier.DEVICE, repeats)
    yield Row("ttft", f"DEVICE, {context} tokens", round(warm, 4), "s")
    host = _median(served, prompts, prefix, Tier.HOST, repeats, (Tier.DEVICE,))
    yield Row("ttft", f"HOST, {context} tokens", round(host, 4), "s")
    if not is_written:
        said = f"not run: the disk takes more than {_SLOWEST_DISK_SECONDS} s to write it"
        yield Row("ttft", f"DISK, {context} tokens", said)
        return
    emptied = (Tier.DEVICE, Tier.HOST)
    disk = _median(served, prompts, prefix, Tier.DISK, min(2, repeats), emptied)
    yield Row("ttft", f"DISK (page cache), {context} tokens", round(disk, 4), "s")


def _median(
    served: Served,
    prompts: Prompts,
    prefix: Tokens,
    source: Tier | str,
    repeats: int,
    emptied: tuple[Tier, ...] = (),
    *,
    question: int = QUESTION_TOKENS,
    store: bool = False,
) -> float:
    """Median time to first token; raises if the prefix does not come from `source` as a whole."""
    times = []
    for _ in range(repeats):
        served.evict(*emptied)
        answer = served.ask(prompts.behind(prefix, question), store=store)
        _require(answer.wait(), source, len(prefix))
        times.append(answer.seconds)
    return float(np.median(times))


def _require(finished: Finished, source: Tier | str, tokens: int) -> None:
    expected = {source: tokens} if isinstance(source, Tier) else {}
    if dict(finished.usage.hit_tokens) != expected:
        raise RuntimeError(f"hits were {dict(finished.usage.hit_tokens)}, not {expected}")


def _hidden(served: Served, prompts: Prompts, prefix: Tokens) -> Iterator[Row]:
    """What of a load's time is hidden behind computing a short question, and a longer one.

    No more can be hidden than computing takes: that is told beside it.
    """
    repeats = 1 if served.ground.rehearses else 5
    served.ask(prompts.behind(prefix), store=False).wait()  # the prefix is on DEVICE and HOST
    load = served.load_seconds(prefix)
    yield Row("ttft", f"the load of {len(prefix)} tokens alone", round(load, 4), "s")
    for question in (QUESTION_TOKENS, served.ground.dims.chunk):

        def median(source: Tier, emptied: tuple[Tier, ...], tokens: int = question) -> float:
            return _median(served, prompts, prefix, source, repeats, emptied, question=tokens)

        alone, joint = median(Tier.DEVICE, ()), median(Tier.HOST, (Tier.DEVICE,))
        share = min(1.0, max(0.0, 1 - (joint - alone) / load))
        name = f"share of that load hidden behind {question} tokens"
        yield at_least("ttft", name, share, HIDDEN_GOAL)
        most = min(1.0, alone / load)
        yield Row("ttft", f"as much as {question} tokens could hide", round(most, 4))


def decoding(ground: Ground) -> Iterator[Row]:
    """Tokens a second of whole batches, beside the same model in plain transformers."""
    ground.require()
    dims = ground.dims
    most = max(dims.batches)
    tokens = most * (dims.decode_context + dims.decode_steps + 4 * dims.page_tokens)
    model = loaded(ground.model(), ground.dtype)
    for name, graphs in (("as it comes", False), ("graphs", True)):
        if ground.is_out_of_time:
            yield out_of_time("decode", name)
            continue
        sizes = Sizes(
            tokens, chunk=dims.chunk, requests=most, engine={"decode_graphs": graphs}
        )  # fmt: skip
        with (
            tempfile.TemporaryDirectory() as folder,
            Served(ground, model, Path(folder), sizes) as served,
        ):
            prompts = Prompts(ground)
            asked = [prompts.some(dims.decode_context + 1) for _ in range(most)]
            served.together(asked, 1, store=True)
            for batch in dims.batches:
                rate = _rate(served, asked[:batch], dims.decode_steps)
                yield Row("decode", f"batch {batch}, {name}", round(rate, 1), "tokens/s")
    for batch in dims.batches:
        if ground.is_out_of_time:
            yield out_of_time("decode", f"batch {batch}, plain transformers")
            continue
        rate = _plain_rate(ground, batch)
        yield Row("decode", f"batch {batch}, plain transformers", round(rate, 1), "tokens/s")


def _rate(served: Served, asked: list[Tokens], steps: int) -> float:
    """What the tokens behind the first ones take; the prompts are on DEVICE but for one token."""
    first = min(served.together(asked, 1, store=False) for _ in range(2))
    whole = min(served.together(asked, 1 + steps, store=False) for _ in range(2))
    return len(asked) * steps / max(whole - first, 1e-9)


@torch.inference_mode()
def _plain_rate(ground: Ground, batch: int) -> float:
    """transformers with its own cache and attention; its prompt is computed beforehand."""
    from transformers import DynamicCache

    dims, model = ground.dims, ground.model()
    model.set_attn_implementation("sdpa")
    prompt = torch.zeros(
        (batch, dims.decode_context), dtype=torch.int64, device=ground.torch_device
    )
    cache = DynamicCache()
    model(input_ids=prompt, past_key_values=cache, use_cache=True, logits_to_keep=1)

    def run() -> None:
        tokens = prompt[:, :1]
        for _ in range(dims.decode_steps):
            logits = model(input_ids=tokens, past_key_values=cache, use_cache=True).logits
            tokens = logits[:, -1:].argmax(-1)
            tokens.cpu()
        cache.crop(-dims.decode_steps)

    return batch * dims.decode_steps / ground.seconds(run, 2)
