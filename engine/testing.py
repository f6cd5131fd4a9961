"""A model small enough for every test: random weights, byte-level tokenizer, a real folder."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from engine.models import LoadedModel, load_model
from engine.text import BYTE_OF_CHARACTER

PAIRS = "th he in er an re on at en nd ti es or te of ed is it al ar st to nt ng se ha as ou io le"
MARKERS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_model(
    folder: Path, *, seed: int = 0, dtype: str = "bfloat16", max_context_tokens: int = 2048
) -> LoadedModel:
    """Writes a tiny random Llama-type model into `folder` (made if missing) and loads it.

    The same seed gives the same weights. Three layers, 4 query and 2 KV heads of 16.
    """
    save_tiny_model(folder, seed=seed, max_context_tokens=max_context_tokens)
    return load_model(str(folder), dtype=dtype, cache_dir=folder / "cache")


def save_tiny_model(folder: Path, *, seed: int = 0, max_context_tokens: int = 2048) -> None:
    """Writes the Hugging Face folder of `tiny_model`."""
    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=max_context_tokens,
        initializer_range=0.3,  # wide, so that likeliest tokens stand out and attention has a view
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """All 256 bytes, a few pairs of letters and three markers: any text has token ids."""
    vocabulary = dict(BYTE_OF_CHARACTER)
    vocabulary |= {pair: 256 + index for index, pair in enumerate(PAIRS.split())}
    core = Tokenizer(models.BPE(vocabulary, [(pair[0], pair[1]) for pair in PAIRS.split()]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(marker, special=True) for marker in MARKERS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        bos_token="<|im_start|>",
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
