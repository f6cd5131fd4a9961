"""Fused layers compute what the library's do, to the bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine.models import LoadedModel, load_model
from engine.models.fused import FusedAttention, FusedMLP, fuse_layers
from engine.runner import ModelRunner, Segment
from engine.testing import byte_tokenizer
from engine.working_copy import WorkingCopyPool

MAKES = {
    "grouped heads": {"num_key_value_heads": 2},
    "a KV head for each": {"num_key_value_heads": 4},
    "biases": {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True},
    "tied embeddings": {"num_key_value_heads": 1, "tie_word_embeddings": True},
}


@pytest.fixture(params=MAKES.values(), ids=MAKES.keys())
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        head_dim=16,
        max_position_embeddings=1024,
        initializer_range=0.3,
        **request.param,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = LlamaForCausalLM(config)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):  # they begin at zero, which would hide a wrong order
                torch.nn.init.normal_(parameter)
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def steps(loaded: LoadedModel) -> list[torch.Tensor]:
    """Logits of a prompt in two chunks and of a token, and all K and V."""
    pool = WorkingCopyPool(loaded.page_layout(16), 1024)
    copy = pool.acquire(600)
    assert copy is not None
    copy.kv.zero_()
    tokens = np.random.default_rng(1).integers(0, 256, 600).astype(np.int32)
    runner = ModelRunner(loaded)
    logits = [
        runner.forward([Segment(copy, tokens[begin:end], begin, wants_logits=True)])
        for begin, end in ((0, 512), (512, 599), (599, 600))
    ]
    return [*logits, copy.kv]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_fused_layers_give_the_librarys_results(folder: Path, dtype: str) -> None:
    fused = load_model(str(folder), dtype=dtype, cache_dir=folder / "cache")
    stock = load_model(str(folder), dtype=dtype, cache_dir=folder / "cache", pack_weights=False)
    kinds = [type(module) for module in fused.model.modules()]
    assert kinds.count(FusedAttention) == kinds.count(FusedMLP) == 2
    tolerance = 0.0 if dtype == "bfloat16" else 1e-5
    for ours, theirs in zip(steps(fused), steps(stock), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def test_modules_of_other_kinds_stay_as_they_are() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
    kinds = [type(module) for module in model.modules()]
    assert fuse_layers(model) == 0
    assert [type(module) for module in model.modules()] == kinds
