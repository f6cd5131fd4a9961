"""A GGUF as a Hugging Face folder: a Llama type with SmolLM's tokenizer here, others elsewhere.

Weights are stored in float32, because that is what dequantising yields exactly: a Q4_1 weight is
`scale * quant + minimum` with two float16 factors, which neither bfloat16 nor float16 can hold.
Casting to the serving dtype happens when the folder is loaded.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from engine.models.gguf_any import convert_with_transformers
from engine.models.progress import Report
from tiercache.errors import ConfigError

if TYPE_CHECKING:  # wanted once in a folder's life
    from gguf import GGUFReader

CONVERSION = 1
"""Raised whenever the same GGUF would convert into other files."""

Array = npt.NDArray[np.float32]

TENSOR_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

CONTROL_TOKEN = 3  # GGUF's token type of markers such as <|im_start|>


def convert_gguf(path: Path, folder: Path, report: Report) -> None:
    """Writes config, generation config, weights and tokenizer of `path` into the empty `folder`.

    Raises ConfigError for a file that cannot be read.
    """
    from gguf import GGUFReader

    try:
        reader = GGUFReader(str(path))
        fields = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError) as error:
        raise ConfigError(f"model.source: {path} is not a GGUF file: {error}") from error
    if not _is_known(fields):
        convert_with_transformers(path, folder, report)
        return
    weights = _weights(reader, fields, report)
    config = _config(fields, tied="lm_head.weight" not in weights)
    config.save_pretrained(folder)
    stops = {"eos_token_id": config.eos_token_id, "bos_token_id": config.bos_token_id}
    (folder / "generation_config.json").write_text(json.dumps(stops))
    _tokenizer(fields).save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _is_known(fields: dict[str, Any]) -> bool:
    kind = ("general.architecture", "tokenizer.ggml.model", "tokenizer.ggml.pre")
    return tuple(fields.get(name) for name in kind) == ("llama", "gpt2", "smollm")


def _config(fields: dict[str, Any], *, tied: bool) -> LlamaConfig:
    heads = fields["llama.attention.head_count"]
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=len(fields["tokenizer.ggml.tokens"]),
        hidden_size=fields["llama.embedding_length"],
        intermediate_size=fields["llama.feed_forward_length"],
        num_hidden_layers=fields["llama.block_count"],
        num_attention_heads=heads,
        num_key_value_heads=fields["llama.attention.head_count_kv"],
        head_dim=fields["llama.embedding_length"] // heads,
        max_position_embeddings=fields["llama.context_length"],
        # GGUF keeps float32; the shortest decimal that reads back as it is what was meant.
        rms_norm_eps=float(str(np.float32(fields["llama.attention.layer_norm_rms_epsilon"]))),
        rope_parameters={
            "rope_type": "default",
            "rope_theta": float(str(np.float32(fields["llama.rope.freq_base"]))),
        },
        tie_word_embeddings=tied,
        bos_token_id=fields["tokenizer.ggml.bos_token_id"],
        eos_token_id=fields["tokenizer.ggml.eos_token_id"],
        pad_token_id=fields["tokenizer.ggml.padding_token_id"],
        dtype="float32",
    )


def _weights(reader: GGUFReader, fields: dict[str, Any], report: Report) -> dict[str, Array]:
    from gguf import quants

    row_heads = {
        "attn_q": fields["llama.attention.head_count"],
        "attn_k": fields["llama.attention.head_count_kv"],
    }
    weights: dict[str, Array] = {}
    for index, tensor in enumerate(reader.tensors, start=1):
        *block, kind, _ = tensor.name.split(".")
        values = np.asarray(quants.dequantize(tensor.data, tensor.tensor_type), np.float32)
        if kind in row_heads:
            values = _unpermute(values, row_heads[kind])
        prefix = f"model.layers.{block[1]}." if block else ""
        weights[f"{prefix}{TENSOR_NAMES[kind]}.weight"] = np.ascontiguousarray(values)
        report("converting weights", index / len(reader.tensors))
    return weights


def _unpermute(rows: Array, heads: int) -> Array:
    """Turns interleaved rope rows (GGUF) of each head into halves (Hugging Face)."""
    outputs, inputs = rows.shape
    pairs = rows.reshape(heads, outputs // heads // 2, 2, inputs)
    return pairs.swapaxes(1, 2).reshape(outputs, inputs)


def _tokenizer(fields: dict[str, Any]) -> PreTrainedTokenizerFast:
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    core = Tokenizer(
        models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges)
    )
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    core.decoder = decoders.ByteLevel()
    kinds = zip(tokens, fields["tokenizer.ggml.token_type"], strict=True)
    core.add_special_tokens(
        [AddedToken(token, special=True) for token, kind in kinds if kind == CONTROL_TOKEN]
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=tokens[fields["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[fields["tokenizer.ggml.eos_token_id"]],
        unk_token=tokens[fields["tokenizer.ggml.unknown_token_id"]],
        pad_token=tokens[fields["tokenizer.ggml.padding_token_id"]],
        clean_up_tokenization_spaces=False,
        model_max_length=fields["llama.context_length"],
    )
    tokenizer.chat_template = fields["tokenizer.chat_template"]
    return tokenizer
