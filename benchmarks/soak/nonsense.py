"""Requests that make no sense; each is to be refused, whatever else is going on."""

from __future__ import annotations

from typing import Any

_ASK: dict[str, Any] = {"model": "MODEL", "prompt": "hello", "max_tokens": 1}

NONSENSE: list[tuple[str, dict[str, Any] | bytes]] = [
    ("/v1/completions", _ASK | {"prompt": list(range(3, 200)) * 60}),  # beyond the context
    ("/v1/completions", _ASK | {"prompt": []}),
    ("/v1/completions", _ASK | {"prompt": [2**40]}),
    ("/v1/completions", _ASK | {"temperature": -1}),
    ("/v1/completions", _ASK | {"top_p": 0}),
    ("/v1/completions", _ASK | {"max_tokens": -5}),
    ("/v1/completions", _ASK | {"n": 2}),
    ("/v1/completions", _ASK | {"logit_bias": {"1": 100}}),
    ("/v1/completions", _ASK | {"temprature": 1}),
    ("/v1/completions", _ASK | {"stop": [""]}),
    ("/v1/completions", b'{"model": "MODEL", "prompt": "\xff\xfe"}'),
    ("/v1/completions", b'{"model": "MODEL", "prompt": "\\ud800"}'),
    ("/v1/completions", b'{"model": "MODEL", "temperature": NaN, "prompt": "x"}'),
    ("/v1/completions", b"[" * 5000),
    ("/v1/completions", b'{"prompt": "' + b"x" * 3_000_000 + b'"}'),
    ("/v1/chat/completions", {"model": "MODEL", "messages": []}),
    ("/v1/chat/completions", {"model": "MODEL", "messages": [{"role": "user", "content": None}]}),
    ("/v1/cache/prefetch", {"tokens": [-1]}),
    ("/v1/cache/lookup", {"prompt": "a", "tokens": [1]}),
]
"""Path and body; MODEL stands for the name of the model. The body of 3 MB is above the limit."""
