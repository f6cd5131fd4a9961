"""Which models can be served, decided from their config before any weight is read.

Paged KV is only right where the K and V of a token depend on nothing but the tokens before it, and
where every layer attends to all of them. What breaks that is refused by name:

- a window, a chunk or a state instead of full attention: old pages would be wrong or missing;
- rope whose frequencies change with the length of the sequence: the same token would get another
  K in a longer prompt;
- attention that wants more than queries, keys, values and a scale (sinks, a soft cap, an encoder).
"""

from __future__ import annotations

from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from tiercache.errors import ConfigError

LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")


def require_pageable(config: Any, source: str) -> None:
    """Raises ConfigError, naming `model.source` and the reason, unless `config` can be served."""
    reason = _not_a_decoder(config) or _not_full_attention(config) or _not_plain(config)
    if reason is not None:
        kind = getattr(config, "model_type", None) or type(config).__name__
        raise ConfigError(
            f"model.source: {source} ({kind}) cannot be served from paged KV: {reason}. "
            "Use a decoder-only model with full attention in every layer."
        )


def _not_a_decoder(config: Any) -> str | None:
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder model"
    if getattr(config, "text_config", None) is not None:
        return "it is a multimodal model"
    model_class = causal_class(config)
    if model_class is None:
        return "it is not a causal language model"
    if model_class.__name__ not in (config.architectures or [model_class.__name__]):
        return f"its weights are of {config.architectures[0]}, not of a causal language model"
    if getattr(config, "is_causal", None) is False:
        return "its attention is bidirectional"
    return None


def _not_full_attention(config: Any) -> str | None:
    if getattr(causal_class(config), "_is_stateful", False):
        return "it keeps a recurrent state (state space, linear or hybrid attention)"
    other = sorted(set(getattr(config, "layer_types", None) or ()) - {"full_attention"})
    if other:
        return f"it has layers of type {', '.join(other)}"
    window = getattr(config, "sliding_window", None)
    if window is not None and getattr(config, "use_sliding_window", True):
        return f"it attends only to the last {window} tokens (sliding_window)"
    if getattr(config, "attention_chunk_size", None) is not None:
        return f"it attends in chunks of {config.attention_chunk_size} tokens"
    return None


def _not_plain(config: Any) -> str | None:
    if getattr(config, "kv_lora_rank", None) is not None:
        return "it keeps latent vectors instead of K and V (MLA)"
    rope_type = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope_type in LENGTH_DEPENDENT_ROPE:
        return f"its rope ({rope_type}) changes K with the length of the sequence"
    if getattr(config, "attn_logit_softcapping", None) is not None:
        return "its attention caps the logits (attn_logit_softcapping)"
    if not getattr(causal_class(config), "_supports_attention_backend", False):
        return "its attention cannot be replaced through transformers' attention interface"
    return None


def causal_class(config: Any) -> Any:
    """The causal language model class of this config, or None."""
    found = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    return found[0] if isinstance(found, tuple) else found
