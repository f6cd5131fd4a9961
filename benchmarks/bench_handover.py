"""300 identical prompts that nobody has computed, and a leader that hangs up in the middle.

    python -m benchmarks.bench_handover [--clients 300] [--prompt-tokens 2000]

The first client gets a head start, so that it leads, and is gone before its prompt is computed.
Shown are the prompt tokens that were computed against those that have to be: the prompt once, what
the leader's unfinished page cost, and every follower's last page.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx

from benchmarks.bench_prefix import config, document, questions
from benchmarks.common import Measured, ask, machine, percentile, save, serving

PAGE_TOKENS = 16


def leave_in_the_middle(url: str, prompt: list[int]) -> None:
    """Asks, and hangs up as soon as the first chunk has been computed."""

    def hang_up() -> None:
        with httpx.Client(base_url=url, timeout=1.2) as client:
            try:
                ask(client, prompt)
            except httpx.ReadTimeout:
                return
            raise RuntimeError("the leader was answered before it could leave")

    thread = threading.Thread(target=hang_up)
    thread.start()
    time.sleep(0.3)


def run(url: str, prompt: list[int], clients: int) -> dict[str, Any]:
    measured: list[Measured] = []
    failures: list[str] = []

    def one() -> None:
        with httpx.Client(base_url=url, timeout=900) as client:
            try:
                measured.append(ask(client, prompt, 2))
            except (RuntimeError, httpx.HTTPError) as error:
                failures.append(str(error))

    with httpx.Client(base_url=url, timeout=60) as client:
        ask(client, questions(1, seed=9)[0])
        before = client.get("/v1/cache/stats").json()
        leave_in_the_middle(url, prompt)
        threads = [threading.Thread(target=one) for _ in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        after = client.get("/v1/cache/stats").json()
        sound = client.get("/v1/cache/check").json()["sound"]
    last_page = len(prompt) - (len(prompt) - 1) // PAGE_TOKENS * PAGE_TOKENS
    ttft = [one.ttft_seconds for one in measured]
    return {
        "answered": len(measured),
        "failed": failures,
        "leader_ended": after["requests"]["finished"].get("abort", 0),
        "computed_prompt_tokens": after["prefill_tokens"] - before["prefill_tokens"],
        "least_possible_tokens": len(prompt) + (clients - 1) * last_page,
        "waited_in_vain_tokens": after["miss_tokens_by_reason"].get("being_computed", 0),
        "ttft_p50_seconds": percentile(ttft, 50),
        "ttft_max_seconds": max(ttft),
        "sound": sound,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--clients", type=int, default=300)
    parser.add_argument("--prompt-tokens", type=int, default=2000)
    options = parser.parse_args()
    measured_on = machine()
    prompt = document(options.prompt_tokens)
    with tempfile.TemporaryDirectory() as name, serving(config(Path(name)), Path(name)) as url:
        result = run(url, prompt, options.clients)
    print(result)
    print(save("handover", measured_on, {"clients": options.clients, **result}))


if __name__ == "__main__":
    main()
