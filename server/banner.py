"""What the server says when it is ready."""

from __future__ import annotations

import socket

from rich.console import Console
from rich.markup import escape

from server.port import ServedEngine
from tiercache.config import Config
from tiercache.metrics import TierSnapshot
from tiercache.sizes import describe_size


def print_banner(engine: ServedEngine, config: Config, listener: socket.socket) -> None:
    """Tells whoever started the server where it is, what it holds and what to try."""
    url = _url(listener)
    name = engine.model.name
    key = "-H 'Authorization: Bearer YOUR_KEY' " if _wants_key(config) else ""
    headline = f"\n[bold]tiercache listens on {escape(url)}[/] and serves {escape(name)}"
    Console(soft_wrap=True, highlight=False).print(headline)
    for tier in engine.snapshot().cache.tiers:
        print(f"  {_describe_tier(tier)}")
    print(
        f"""
Try it:

  curl {url}/v1/chat/completions {key}-H 'Content-Type: application/json' \\
    -d '{{"model": "{name}", "messages": [{{"role": "user", "content": "Say hello."}}]}}'

  from openai import OpenAI
  client = OpenAI(base_url="{url}/v1", api_key="{"YOUR_KEY" if key else "none"}")
  answer = client.chat.completions.create(
      model="{name}", messages=[{{"role": "user", "content": "Say hello."}}])
  print(answer.choices[0].message.content, answer.usage.prompt_tokens_details.cached_tokens)

  What the cache did: {url}/v1/cache/stats or `tiercache stats --url {url}`
  Stop with Ctrl-C.
""",
        flush=True,
    )


def _describe_tier(tier: TierSnapshot) -> str:
    text = (
        f"{tier.tier.label:<7} {describe_size(tier.capacity_bytes):>10} "
        f"= {tier.capacity_bytes:,} bytes, {tier.capacity_pages:,} pages, "
        f"{tier.capacity_tokens:,} tokens"
    )
    return text if tier.healthy else f"{text} (out of order: {tier.reason})"


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _wants_key(config: Config) -> bool:
    return bool(config.server.api_keys or config.server.admin_keys or config.tenants)
