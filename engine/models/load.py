"""From `model.source` to a model that can run: resolve, refuse, hash, load."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import torch
from rich.progress import Progress
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

from engine.attention import ATTENTION
from engine.models.fused import fuse_layers
from engine.models.hashing import files_digest
from engine.models.packed import pack_linears
from engine.models.progress import Report, reporter
from engine.models.sources import ACCEPTED, resolve
from engine.models.speed import bfloat16_is_faster
from engine.models.support import causal_class, require_pageable
from tiercache.errors import ConfigError
from tiercache.types import ITEM_BYTES, PageLayout

NOT_IDENTITY = ("transformers_version", "_name_or_path", "torch_dtype", "dtype", "use_cache")
"""Keys of config.json that say nothing about what K and V a token gets."""


class LayoutFields(TypedDict):
    """What a model contributes to a `PageLayout`."""

    layers: int
    kv_heads: int
    head_dim: int
    dtype: str


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run on the processor, and all that the engine and the cache ask about it."""

    model: Any
    """The transformers module, in eval mode, without gradients, with our attention."""
    tokenizer: PreTrainedTokenizerFast
    name: str
    """The id listed by `/v1/models`."""
    layout_fields: LayoutFields
    max_context_tokens: int
    eos_token_ids: frozenset[int]
    vocabulary_size: int
    """Rows of the logits; every token id is below it."""
    identity: dict[str, str]
    """Tagged fields of the namespace fingerprint: two models with equal identity have equal KV."""

    def page_layout(self, page_tokens: int) -> PageLayout:
        return PageLayout(page_tokens=page_tokens, **self.layout_fields)


def load_model(
    source: str,
    *,
    dtype: str = "auto",
    cache_dir: Path | None = None,
    max_context_tokens: int | None = None,
    pack_weights: bool = True,
    progress: Progress | Report | None = None,
) -> LoadedModel:
    """Loads the model that `model.source` names.

    source: `bundled` (SmolLM2-135M-Instruct), the path of a Hugging Face folder or of a GGUF file,
        or a hub id; see `sources`. A GGUF is converted once, into `cache_dir`.
    dtype: of weights and KV; `auto` is bfloat16 where the processor computes in it and that is
        faster when measured, else float32.
    cache_dir: where conversions and remembered hashes live; default `~/.cache/tiercache`, or under
        `XDG_CACHE_HOME`.
    max_context_tokens: a limit below the model's own; None keeps the model's.
    pack_weights: join and lay out weights for decoding on a processor, see `fused` and `packed`;
        without, the modules are the library's own.
    progress: a rich progress display, or a callable that gets (activity, fraction done).

    Raises ConfigError for anything that cannot be served, before weights are read.
    """
    report = reporter(progress)
    cache = cache_dir or default_cache_dir()
    torch_dtype = resolve_dtype(dtype)
    folder, name = resolve(source, cache, report)
    config = _read_config(folder)
    require_pageable(config, source)
    context = _context_tokens(config, max_context_tokens)
    weights = _require_files(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    identity = _identity(folder, weights, torch_dtype, cache / "hashes", report)
    model = _load_weights(config, folder, torch_dtype, report)
    if pack_weights:
        fuse_layers(model)
        pack_linears(model)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        name=name,
        layout_fields=_layout_fields(config, torch_dtype),
        max_context_tokens=context,
        eos_token_ids=_eos_token_ids(model, tokenizer),
        vocabulary_size=int(config.vocab_size),
        identity=identity,
    )


def default_cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "tiercache"


def resolve_dtype(name: str) -> torch.dtype:
    """The torch dtype that `model.dtype` names."""
    if name == "auto":
        name = "bfloat16" if has_native_bfloat16() and bfloat16_is_faster() else "float32"
    if name not in ITEM_BYTES:
        raise ConfigError(f"model.dtype: {name!r} is unknown; use auto, {', '.join(ITEM_BYTES)}")
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def has_native_bfloat16() -> bool:
    """Whether this processor multiplies bfloat16 itself; emulated, it is slower and inexact."""
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return "avx512_bf16" in flags or "amx_bf16" in flags


def _read_config(folder: Path) -> Any:
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text())
        if raw.get("auto_map") and raw.get("model_type") not in CONFIG_MAPPING:
            raise ConfigError(f"model.source: {folder} needs code of its own, which is never run")
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except FileNotFoundError as error:
        raise ConfigError(f"model.source: {path} is missing; accepted are {ACCEPTED}") from error
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ConfigError(f"model.source: {path} cannot be used: {error}") from error


def _context_tokens(config: Any, wanted: int | None) -> int:
    limit = int(config.max_position_embeddings)
    if wanted is None:
        return limit
    if not 1 <= wanted <= limit:
        raise ConfigError(f"model.max_context_tokens: {wanted} is not in 1 to {limit}")
    return wanted


def _require_files(folder: Path) -> list[Path]:
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        raise ConfigError(f"model.source: {folder} holds no *.safetensors; accepted are {ACCEPTED}")
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(
            f"model.source: {folder} holds no tokenizer.json; accepted are {ACCEPTED}"
        )
    return weights


def _identity(
    folder: Path, weights: list[Path], dtype: torch.dtype, memory: Path, report: Report
) -> dict[str, str]:
    raw = json.loads((folder / "config.json").read_text())
    kept = {key: value for key, value in raw.items() if key not in NOT_IDENTITY}
    return {
        "weights": files_digest(weights, memory, report),
        "tokenizer": files_digest([folder / "tokenizer.json"], memory, report),
        "architecture": json.dumps(kept, sort_keys=True, separators=(",", ":")),
        "dtype": _name(dtype),
    }


def _load_weights(config: Any, folder: Path, dtype: torch.dtype, report: Report) -> Any:
    report("loading weights", 0.0)
    disable_progress_bar()  # the library's own bars would tear ours
    model = causal_class(config).from_pretrained(
        folder, config=config, dtype=dtype, attn_implementation=ATTENTION, local_files_only=True
    )
    report("loading weights", 1.0)
    return model.eval().requires_grad_(False)


def _layout_fields(config: Any, dtype: torch.dtype) -> LayoutFields:
    heads = int(config.num_attention_heads)
    return LayoutFields(
        layers=int(config.num_hidden_layers),
        kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
        head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
        dtype=_name(dtype),
    )


def _eos_token_ids(model: Any, tokenizer: PreTrainedTokenizerFast) -> frozenset[int]:
    generation = getattr(model, "generation_config", None)
    named = [model.config.eos_token_id, getattr(generation, "eos_token_id", None)]
    ids: set[int] = set()
    for value in (*named, tokenizer.eos_token_id):
        ids.update(value if isinstance(value, Iterable) else () if value is None else (value,))
    return frozenset(ids)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
