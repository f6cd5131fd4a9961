"""The server without hits: what the tiers cost then, and how fast it decodes.

1. `overhead`: prompts that share nothing, from 8 clients, with the cache off and with all three
   tiers on, in turns: while the tiers grow, and when all of them are full and every page that comes
   displaces another. The loss is the median over the rounds: each compares two batches of the same
   prompts, one right after the other, as a machine that others share is now faster and now slower.
2. `decode`: tokens per second out of one stream at a context of 512, 2,048 and 8,000 tokens, and of
   four streams at 2,000 together, counted between the first and the last token.

    python -m benchmarks.bench_serve [overhead] [decode]
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from benchmarks.bench_prefix import config
from benchmarks.common import Measured, ask, machine, save, serving

CLIENTS, PROMPTS, PROMPT_TOKENS, ANSWER_TOKENS = 8, 24, 500, 16
GROWING_ROUNDS, FULL_ROUNDS = 3, 13
SMALL_TIERS = {"device": "256MiB", "host": "512MiB", "disk": "1GiB"}
"""Full after four rounds."""
CONTEXTS = (512, 2048, 8000)
DECODED_TOKENS = 64
STREAMS, STREAM_TOKENS = 4, 2000
TIMEOUT_SECONDS = 600


def distinct(count: int, tokens: int, seed: int) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(1000, 40_000, tokens).tolist() for _ in range(count)]


def throughput(url: str, seed: int) -> float:
    """Tokens per second, in and out, of a batch of prompts that nobody has asked before."""

    def one(prompt: list[int]) -> Measured:
        with httpx.Client(base_url=url, timeout=TIMEOUT_SECONDS) as client:
            return ask(client, prompt, ANSWER_TOKENS)

    started = time.perf_counter()
    with ThreadPoolExecutor(CLIENTS) as clients:
        done = list(clients.map(one, distinct(PROMPTS, PROMPT_TOKENS, seed)))
    seconds = time.perf_counter() - started
    assert not any(sum(answer.cached_tokens_by_tier.values()) for answer in done)
    return sum(answer.prompt_tokens + answer.completion_tokens for answer in done) / seconds


def overhead(folder: Path) -> dict[str, Any]:
    (folder / "off").mkdir()
    small = config(folder)
    for tier, capacity in SMALL_TIERS.items():
        small["tiers"][tier]["capacity"] = capacity
    seeds = itertools.count(10)
    with (
        serving(config(folder / "off", enabled=False), folder / "off") as off,
        serving(small, folder) as on,
    ):
        urls = {"off": off, "on": on}
        for url in urls.values():
            throughput(url, seed=0)
        growing = in_turns(urls, list(itertools.islice(seeds, GROWING_ROUNDS)))
        while not is_full(on):
            throughput(on, next(seeds))
        full = in_turns(urls, list(itertools.islice(seeds, FULL_ROUNDS)))
    return {"growing": growing, "full": full}


def in_turns(urls: dict[str, str], seeds: list[int]) -> dict[str, Any]:
    """Both servers with the same prompts, now the one first and now the other."""
    seen: dict[str, list[float]] = {name: [] for name in urls}
    for number, seed in enumerate(seeds):
        for name in sorted(urls, reverse=bool(number % 2)):
            seen[name].append(throughput(urls[name], seed))
    losses = [1 - on / off for on, off in zip(seen["on"], seen["off"], strict=True)]
    return {
        "tokens_per_second": {name: statistics.median(values) for name, values in seen.items()},
        "all": seen,
        "loss": statistics.median(losses),
        "losses": losses,
    }


def is_full(url: str) -> bool:
    """Whether the slowest tier, the last to be full, has no more free than its watermarks want."""
    tiers = httpx.get(f"{url}/v1/cache/stats", timeout=TIMEOUT_SECONDS).json()["tiers"]
    return bool(tiers[-1]["pages"]["free"] < tiers[-1]["capacity_pages"] / 8)


def decode(folder: Path) -> dict[str, Any]:
    result: dict[str, Any] = {}
    with (
        serving(config(folder), folder) as url,
        httpx.Client(base_url=url, timeout=TIMEOUT_SECONDS) as client,
    ):
        for context in CONTEXTS:
            prompt = distinct(1, context - DECODED_TOKENS, seed=context)[0]
            ask(client, prompt, 2)  # so that only decoding is left to measure
            rates = [rate([ask(client, prompt, DECODED_TOKENS)]) for _ in range(3)]
            result[str(context)] = statistics.median(rates)
        prompts = distinct(STREAMS, STREAM_TOKENS - DECODED_TOKENS, seed=1)
        for prompt in prompts:
            ask(client, prompt, 2)

        def stream(prompt: list[int]) -> Measured:
            with httpx.Client(base_url=url, timeout=TIMEOUT_SECONDS) as own:
                return ask(own, prompt, DECODED_TOKENS)

        with ThreadPoolExecutor(STREAMS) as clients:
            rates = [rate(list(clients.map(stream, prompts))) for _ in range(3)]
        result[f"{STREAMS} streams at {STREAM_TOKENS}"] = statistics.median(rates)
    return result


def rate(answers: list[Measured]) -> float:
    """Tokens per second out of all streams together, after their first tokens."""
    tokens = sum(answer.completion_tokens - 1 for answer in answers)
    return tokens / max(answer.total_seconds - answer.ttft_seconds for answer in answers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", nargs="*", choices=["overhead", "decode", []], default=[])
    options = parser.parse_args()
    for name, measure in (("overhead", overhead), ("decode", decode)):
        if options.what and name not in options.what:
            continue
        measured_on = machine()
        with tempfile.TemporaryDirectory() as folder:
            result = measure(Path(folder))
        print(name, result)
        print(save(f"serve-{name}", measured_on, result))


if __name__ == "__main__":
    main()
