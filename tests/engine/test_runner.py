"""The same tokens get the same K, V and logits, however they are cut, batched or reused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM as Auto
from transformers import GPTNeoXConfig, Phi3Config, Qwen3Config

from engine.attention import KEY_BLOCK_TOKENS
from engine.models import LoadedModel, encode_text, load_model
from engine.models.load import has_native_bfloat16
from engine.runner import ModelRunner, Segment
from engine.testing import byte_tokenizer, save_tiny_model, tiny_model
from engine.working_copy import WorkingCopy, WorkingCopyPool
from tiercache.types import PageLayout, Tokens

PAGE_TOKENS = 16
PROMPT = np.random.default_rng(0).integers(0, 256, 1024).astype(np.int32)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return tiny_model(tmp_path_factory.mktemp("tiny"))


def poisoned_pool(loaded: LoadedModel, capacity_tokens: int = 4096) -> WorkingCopyPool:
    """A pool whose every byte was left by somebody whose numbers had overflowed."""
    pool = WorkingCopyPool(loaded.page_layout(PAGE_TOKENS), capacity_tokens)
    everything = pool.acquire(pool.capacity_tokens)
    assert everything is not None
    everything.kv.fill_(torch.nan)
    pool.release(everything)
    return pool


def a_copy(pool: WorkingCopyPool, tokens: int) -> WorkingCopy:
    copy = pool.acquire(tokens)
    assert copy is not None
    return copy


def compute(
    runner: ModelRunner, copy: WorkingCopy, prompt: Tokens, chunk: int, held: int = 0
) -> torch.Tensor:
    """Runs `prompt` from `held` on in chunks; the logits after its last token."""
    logits = torch.empty(0)
    for begin in range(held, len(prompt), chunk):
        end = min(begin + chunk, len(prompt))
        logits = runner.forward([Segment(copy, prompt[begin:end], begin, end == len(prompt))])
    return logits


def assert_same(left: torch.Tensor, right: torch.Tensor) -> None:
    """Bit-equal where the processor computes in bfloat16; elsewhere rounding is allowed to show."""
    if has_native_bfloat16():
        assert torch.equal(left, right)
    else:
        assert torch.allclose(left.float(), right.float(), atol=0.5)


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder = tmp_path_factory.mktemp("stock")
    save_tiny_model(folder)
    return stock_modules(str(folder))


def stock_modules(source: str, dtype: str = "auto") -> LoadedModel:
    """The library's own modules and attention."""
    loaded = load_model(source, dtype=dtype, pack_weights=False)
    loaded.model.set_attn_implementation("sdpa")
    return loaded


def stock_logits(loaded: LoadedModel, prompt: Tokens) -> torch.Tensor:
    """The last token's logits, computed whole and without any of ours."""
    with torch.inference_mode():
        ids = torch.from_numpy(prompt).long()[None]
        logits: torch.Tensor = loaded.model(input_ids=ids, use_cache=False, logits_to_keep=1).logits
    return logits[0].float()


@pytest.mark.parametrize("tokens", [512, 1024])
def test_whole_key_blocks_are_bit_equal_to_stock_modules(
    tiny: LoadedModel, stock: LoadedModel, tokens: int
) -> None:
    copy = a_copy(poisoned_pool(tiny), tokens)
    ours = compute(ModelRunner(tiny), copy, PROMPT[:tokens], chunk=512)
    assert_same(ours, stock_logits(stock, PROMPT[:tokens]))


@pytest.mark.parametrize("tokens", [1, 3, 100, 700])
def test_any_length_is_close_to_stock_modules(
    tiny: LoadedModel, stock: LoadedModel, tokens: int
) -> None:
    ours = compute(ModelRunner(tiny), a_copy(poisoned_pool(tiny), tokens), PROMPT[:tokens], 512)
    expected = stock_logits(stock, PROMPT[:tokens])
    assert torch.allclose(ours, expected, atol=0.02 * float(expected.abs().max()))


@pytest.mark.parametrize("chunk", [1, 7, 64, 512])
def test_chunks_do_not_change_a_bit(tiny: LoadedModel, chunk: int) -> None:
    runner, pool = ModelRunner(tiny), poisoned_pool(tiny)
    prompt = PROMPT[:700]
    whole, cut = a_copy(pool, 700), a_copy(pool, 700)
    assert_same(compute(runner, whole, prompt, 700), compute(runner, cut, prompt, chunk))
    assert_same(whole.kv[:, :, :700], cut.kv[:, :, :700])


@pytest.mark.parametrize("tokens", [2, 64, 300])
def test_the_number_of_threads_does_not_change_a_bit(
    tiny: LoadedModel, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, results = poisoned_pool(tiny), []
    for threads in (1, 2, 3, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        results.append(compute(ModelRunner(tiny), a_copy(pool, tokens), PROMPT[:tokens], tokens))
    for other in results[1:]:
        assert_same(results[0], other)


def test_batch_mates_do_not_change_a_bit(tiny: LoadedModel) -> None:
    runner, pool = ModelRunner(tiny), poisoned_pool(tiny)
    requests = [(PROMPT[:1], 0), (PROMPT[100:631], 530), (PROMPT[7:307], 40), (PROMPT[:65], 64)]
    alone, segments = [], []
    for prompt, position in requests:
        alone.append(compute(runner, a_copy(pool, 600), prompt, 600))
        copy = a_copy(pool, 600)
        if position:
            compute(runner, copy, prompt[:position], 512)
        wants = len(prompt) != 300
        segments.append(Segment(copy, prompt[position:], position, wants))
        pool.check()
        if not wants:
            alone.pop()
        pool = poisoned_pool(tiny)
    assert_same(runner.forward(segments), torch.cat(alone))


def test_a_prefix_reused_from_pages_does_not_change_a_bit(tiny: LoadedModel) -> None:
    runner, pool = ModelRunner(tiny), poisoned_pool(tiny)
    prompt, pages = PROMPT[:600], 33
    first = a_copy(pool, 600)
    expected = compute(runner, first, prompt, 512)
    device = page_pool(tiny, pages + 5)
    slots = np.random.default_rng(1).permutation(pages + 5)[:pages].astype(np.int32)
    first.store_pages(device, slots, 0)

    second = a_copy(pool, 600)
    second.load_pages(device, slots, 0)
    assert_same(compute(runner, second, prompt, 512, held=pages * PAGE_TOKENS), expected)


def test_a_layer_is_waited_for_once_and_before_its_keys_are_read(tiny: LoadedModel) -> None:
    runner, pool = ModelRunner(tiny), poisoned_pool(tiny)
    prompt = PROMPT[:40]
    first, second = a_copy(pool, 40), a_copy(pool, 40)
    expected = compute(runner, first, prompt, 40)
    device = page_pool(tiny, 2)
    first.store_pages(device, (1, 0), 0)
    waited: list[int] = []

    def arrive(layer: int) -> None:
        waited.append(layer)
        second.load_pages(device, (1, 0), 0, slice(layer, layer + 1))

    logits = runner.forward([Segment(second, prompt[32:], 32, True, wait_layer=arrive)])
    assert waited == [0, 1, 2]
    assert_same(logits, expected)


def test_a_failed_wait_stops_the_forward(tiny: LoadedModel) -> None:
    def fail(_layer: int) -> None:
        raise TimeoutError("the page never came")

    copy = a_copy(poisoned_pool(tiny), 40)
    with pytest.raises(TimeoutError, match="never came"):
        ModelRunner(tiny).forward([Segment(copy, PROMPT[:8], 32, True, wait_layer=fail)])


def test_without_anyone_wanting_logits_there_are_none(tiny: LoadedModel) -> None:
    copy = a_copy(poisoned_pool(tiny), 8)
    logits = ModelRunner(tiny).forward([Segment(copy, PROMPT[:8], 0, wants_logits=False)])
    assert logits.shape == (0, tiny.vocabulary_size)
    assert torch.isfinite(copy.kv[:, :, :8].float()).all()


SHAPE = {
    "vocab_size": len(byte_tokenizer()), "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 1024,
    "pad_token_id": None, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    "config",
    [
        Qwen3Config(**SHAPE, num_key_value_heads=2, head_dim=16),
        Phi3Config(**SHAPE, num_key_value_heads=4),
        GPTNeoXConfig(**SHAPE),
    ],
    ids=lambda config: str(config.model_type),
)
def test_other_full_attention_models_run_through_the_same_attention(
    config: object, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    Auto.from_config(config).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path), dtype="float32", cache_dir=tmp_path / "cache")
    ours = compute(ModelRunner(loaded), a_copy(poisoned_pool(loaded), 90), PROMPT[:90], 40)
    stock = stock_logits(stock_modules(str(tmp_path), "float32"), PROMPT[:90])
    assert torch.allclose(ours, stock, atol=1e-4)


def page_pool(loaded: LoadedModel, slots: int) -> torch.Tensor:
    shape = (slots, *loaded.page_layout(PAGE_TOKENS).shape)
    return torch.zeros(shape, dtype=getattr(torch, loaded.layout_fields["dtype"]))


LAYOUT = PageLayout(layers=2, kv_heads=3, head_dim=8, page_tokens=4, dtype="float32")


def test_pages_come_back_as_they_were_stored_and_touch_nothing_else() -> None:
    pool = WorkingCopyPool(LAYOUT, 1024)
    source, target = a_copy(pool, 512), a_copy(pool, 512)
    source.kv.copy_(torch.randn(source.kv.shape))
    target.kv.zero_()
    device = torch.zeros((6, *LAYOUT.shape))
    source.store_pages(device, [5, 2], 3)
    source.store_page(device, 0, 7)
    assert torch.equal(device[5], source.kv[:, :, 12:16])
    assert torch.equal(device[0], source.kv[:, :, 28:32])
    target.load_pages(device, [5, 2], 10)
    assert torch.equal(target.kv[:, :, 40:48], source.kv[:, :, 12:20])
    assert int(target.kv.count_nonzero()) == 2 * LAYOUT.page_bytes // 4
    assert not device[[1, 3, 4]].any()


@pytest.mark.parametrize("layers", [slice(None), slice(0, 1), slice(1, 2)])
def test_many_pages_come_from_wherever_they_are_each_to_its_place(layers: slice) -> None:
    source, target = (a_copy(WorkingCopyPool(LAYOUT, 512), 512) for _ in range(2))
    source.kv.copy_(torch.randn(source.kv.shape))
    target.kv.zero_()
    slots = np.concatenate((np.arange(60, 100), np.random.default_rng(0).permutation(60)))
    device = torch.zeros((100, *LAYOUT.shape))
    source.store_pages(device, slots, 7)
    target.load_pages(device, slots, 7, layers)
    stored = slice(7 * 4, 107 * 4)
    assert torch.equal(target.kv[layers, :, stored], source.kv[layers, :, stored])
    assert int(target.kv.count_nonzero()) == source.kv[layers, :, stored].numel()


@settings(max_examples=50)
@given(st.lists(st.integers(1, 4 * KEY_BLOCK_TOKENS) | st.none(), max_size=40), st.randoms())
def test_ranges_never_overlap_and_all_come_back(steps: list[int | None], random: object) -> None:
    pool = WorkingCopyPool(LAYOUT, 8 * KEY_BLOCK_TOKENS + 100)
    held: list[WorkingCopy] = []
    for tokens in steps:
        if tokens is None and held:
            pool.release(held.pop(random.randrange(len(held))))  # type: ignore[attr-defined]
        elif tokens is not None and (copy := pool.acquire(tokens)) is not None:
            assert copy.tokens >= tokens
            held.append(copy)
        pool.check()
    for copy in held:
        pool.release(copy)
    assert pool.free_tokens == pool.capacity_tokens == 8 * KEY_BLOCK_TOKENS
    assert pool.acquire(pool.capacity_tokens) is not None
    assert pool.acquire(1) is None


@pytest.mark.bundled
def test_the_bundled_model_is_chunk_and_reuse_invariant() -> None:
    loaded = load_model("bundled")
    runner, pool = ModelRunner(loaded), poisoned_pool(loaded, 2048)
    text = "Tiered caches keep what is hot near and what is cold far. 1234567890 times. " * 40
    prompt = encode_text(loaded, text)[:512]
    whole = a_copy(pool, 512)
    expected = compute(runner, whole, prompt, 512)
    assert_same(expected, stock_logits(stock_modules("bundled"), prompt))
    device = page_pool(loaded, 31)
    whole.store_pages(device, range(31), 0)
    reused = a_copy(pool, 512)
    reused.load_pages(device, range(31), 0)
    assert_same(compute(runner, reused, prompt, 1, held=31 * PAGE_TOKENS), expected)
    cut = a_copy(pool, 512)
    assert_same(compute(runner, cut, prompt, 100), expected)
    assert_same(cut.kv, whole.kv)
