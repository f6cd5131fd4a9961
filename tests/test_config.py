"""What the configuration promises an operator."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from tiercache.config import Config, effective_yaml, is_loopback, load_config, parse_config
from tiercache.errors import ConfigError
from tiercache.sizes import describe_size, format_size, parse_size
from tiercache.types import PrefetchPolicy

CONFIGS = Path(__file__).parents[1] / "configs"


def problems(mapping: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_config(mapping)
    return str(caught.value).splitlines()


def only_problem(mapping: dict[str, Any]) -> str:
    (line,) = problems(mapping)
    return line


def nested(name: str, value: object) -> dict[str, Any]:
    for part in reversed(name.split(".")):
        value = {part: value}
    assert isinstance(value, dict)
    return value


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_every_shipped_config_loads(path: Path) -> None:
    config = load_config(path)
    assert (config.tiers.disk.capacity == 0) == (path.name == "memory-only.yaml")
    on_gpu = path.name == "gpu.yaml"
    assert config.model.device == ("cuda" if on_gpu else "auto")
    assert config.tiers.device.capacity == (4 * 2**30 if on_gpu else 512 * 2**20)
    assert config.tiers.host.capacity == (16 if on_gpu else 2) * 2**30


def test_a_shipped_config_says_nothing_but_defaults_unless_it_must() -> None:
    assert load_config(CONFIGS / "cpu.yaml") == Config()


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        (0, 0),
        (4096, 4096),
        ("4096", 4096),
        ("512MiB", 512 * 2**20),
        ("2 gib", 2 * 2**30),
        ("1.5 GB", 1_500_000_000),
        (" 7 KB ", 7000),
        ("3TiB", 3 * 2**40),
        ("12B", 12),
    ],
)
def test_sizes_are_read_as_people_write_them(text: object, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize(
    "text",
    ["", "lots", "5 elephants", "-1", -1, "1.5", 1.5, True, None, [1], "1e9", "1,000", "\uff15MB"],
)
def test_an_unreadable_size_names_the_field_and_gives_examples(text: object) -> None:
    line = only_problem(nested("tiers.host.capacity", text))
    assert line.startswith("tiers.host.capacity: ")
    assert "512MiB" in line


@given(st.integers(0, 2**60))
def test_a_formatted_size_reads_back_exactly(size_bytes: int) -> None:
    assert parse_size(format_size(size_bytes)) == size_bytes


def test_a_load_is_weighed_unless_another_policy_is_named() -> None:
    assert parse_config({}).cache.prefetch.policy == "adaptive"
    for name in ("best_effort", "wait", "adaptive"):
        named = parse_config({"cache": {"prefetch": {"policy": name}}}).cache.prefetch
        assert PrefetchPolicy(named.policy).value == name


def test_a_described_size_is_short() -> None:
    assert [describe_size(size) for size in (0, 1023, 1536, 3 * 2**30)] == [
        "0 B", "1023 B", "1.5 KiB", "3.0 GiB",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("tierz", "tiers"),
        ("cache.page_token", "cache.page_tokens"),
        ("tiers.disk.durabilty", "tiers.disk.durability"),
        ("cache.prefetch.fetch_deadline", "cache.prefetch.fetch_deadline_seconds"),
        ("page_tokens", "cache.page_tokens"),
        ("server.prefill_chunk_tokens", "engine.prefill_chunk_tokens"),
        ("tenants.search.kyes", "tenants.search.keys"),
        ("tenants.search.quota.hots", "tenants.search.quota.host"),
    ],
)
def test_an_unknown_key_is_refused_with_its_full_name_and_the_nearest_one(
    name: str, nearest: str
) -> None:
    lines = problems(nested(name, 1))
    assert f"{name}: unknown key; did you mean {nearest}?" in lines
    assert len(lines) == 1 or name.startswith("tenants."), "a tenant lacks its keys besides"


@pytest.mark.parametrize("name", ["record", "tiers.disk.shards", "tiers.shared"])
def test_a_key_without_meaning_yet_is_unknown_like_any_other(name: str) -> None:
    assert only_problem(nested(name, {})).startswith(f"{name}: unknown key; ")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model.source", ""),
        ("model.device", "tpu"),
        ("model.dtype", "int4"),
        ("model.max_context_tokens", 1),
        ("cache", None),
        ("cache.enabled", "yes"),
        ("cache.page_tokens", 0),
        ("cache.page_tokens", "16"),
        ("cache.page_tokens", 16.5),
        ("cache.policy", "arc"),
        ("cache.prefetch.policy", "eager"),
        ("cache.write_policy", "write_never"),
        ("cache.prefetch.join_deadline_seconds", 0),
        ("tiers.device.capacity", 0),
        ("tiers.disk.path", ""),
        ("tiers.disk.path", 7),
        ("tiers.disk.durability", "none"),
        ("tiers.disk.reader_threads", 0),
        ("tiers.host.high_watermark", 1.01),
        ("tiers.host.low_watermark", 0),
        ("tiers.host", [1]),
        ("engine.max_running_requests", 0),
        ("engine.prefill_chunk_tokens", -1),
        ("engine.working_copy_capacity", 0),
        ("engine.threads", True),
        ("engine.threads", 0),
        ("server.port", 65536),
        ("server.port", "8000"),
        ("server.max_body", "2GiB"),
        ("server.request_deadline_seconds", 0),
        ("server.shutdown_grace_seconds", -1),
        ("server.api_keys", "secret"),
        ("server.api_keys", [""]),
        ("server.admin_keys", ["with space"]),
        ("tenants", ["a"]),
        ("tenants.a", ["key"]),
        ("tenants", {"a": {"keys": ["k"], "pins": -1}}),
        ("tenants", {"a": {"keys": []}}),
        ("tenants.a b", {"keys": ["k"]}),
        ("tenants", {"a": {"keys": ["k"], "allow": ["pin"]}}),
    ],
)
def test_a_value_out_of_type_or_bounds_is_refused_by_name(name: str, value: object) -> None:
    assert only_problem(nested(name, value)).startswith((f"{name}: ", f"{name}.a."))


def test_all_problems_are_told_at_once_one_line_each() -> None:
    lines = problems(
        {
            "cache": {"page_tokens": 0, "enabeld": True},
            "tiers": {"host": {"low_watermark": 0.99}, "disk": {"capacity": "big"}},
            "server": {"host": "0.0.0.0"},
        }
    )
    assert [line.split(":")[0].split(" ")[0] for line in lines] == [
        "cache.page_tokens",
        "cache.enabeld",
        "tiers.host.low_watermark",
        "tiers.disk.capacity",
        "server.host",
    ]


def test_watermarks_out_of_order_name_both_keys() -> None:
    line = only_problem({"tiers": {"device": {"high_watermark": 0.5, "low_watermark": 0.6}}})
    assert "tiers.device.low_watermark (0.6)" in line
    assert "tiers.device.high_watermark (0.5)" in line


def test_which_gpu_is_chosen_is_said_elsewhere() -> None:
    assert "CUDA_VISIBLE_DEVICES" in only_problem({"model": {"device": "cuda:1"}})


def test_an_address_others_can_reach_needs_keys() -> None:
    line = only_problem({"server": {"host": "0.0.0.0"}})
    assert "server.host" in line
    assert "server.api_keys" in line
    assert "server.admin_keys" in line
    assert parse_config({"server": {"host": "0.0.0.0", "admin_keys": ["k1"]}}).server.port == 8000


def test_a_key_stands_for_one_caller() -> None:
    tenants = {"a": {"keys": ["k1"]}, "b": {"keys": ["k2", "k1"]}}
    assert "tenants.a.keys and tenants.b.keys" in only_problem({"tenants": tenants})
    line = only_problem({"tenants": {"a": {"keys": ["k1"]}}, "server": {"admin_keys": ["k1"]}})
    assert "server.admin_keys and tenants.a.keys" in line
    assert "k1" not in line


def test_a_quota_above_its_tier_is_refused_with_the_figures() -> None:
    line = only_problem(
        {
            "tiers": {"host": {"capacity": "1GiB"}, "disk": {"capacity": 0}},
            "tenants": {"a": {"keys": ["k"], "quota": {"host": "1025MiB"}}},
        }
    )
    assert line == "tenants.a.quota.host (1025MiB) is above tiers.host.capacity (1GiB)"


@pytest.mark.parametrize(
    ("host", "loopback"),
    [
        ("127.0.0.1", True), ("127.1.2.3", True), ("::1", True), ("LOCALHOST", True),
        ("0.0.0.0", False), ("::", False), ("10.0.0.1", False), ("example.org", False), ("", False),
    ],
)  # fmt: skip
def test_loopback_is_this_machine_alone(host: str, loopback: bool) -> None:
    assert is_loopback(host) is loopback


def test_secrets_are_never_shown_unless_asked_for() -> None:
    config = parse_config({"server": {"api_keys": ["hunter2"], "admin_keys": ["hunter3"]}})
    assert "hunter" not in effective_yaml(config)
    assert "hunter" not in repr(config)
    assert "hunter2" in effective_yaml(config, mask_secrets=False)
    config = parse_config({"tenants": {"a": {"keys": ["hunter2"]}}})
    assert "hunter" not in effective_yaml(config) + repr(config)
    for broken in ({"server": {"api_keys": ["hunter 4"]}}, {"tenants": {"a": {"keys": ["hu 4"]}}}):
        with pytest.raises(ConfigError) as caught:
            parse_config(broken)
        assert "hu" not in str(caught.value)


def test_a_masked_key_is_not_taken_for_a_real_one() -> None:
    masked = effective_yaml(parse_config({"server": {"api_keys": ["k"]}}))
    assert "masked" in only_problem(yaml.safe_load(masked))


def test_the_effective_yaml_loads_back_to_the_same_config() -> None:
    config = parse_config(
        {
            "tiers": {"host": {"capacity": "1.5 GB"}, "disk": {"path": "/tmp/käse"}},
            "engine": {"working_copy_capacity": "3MiB", "threads": 2},
            "server": {"api_keys": ["a", "b"], "request_deadline_seconds": 3},
            "tenants": {"t": {"keys": ["c"], "quota": {"host": "1MiB"}, "allow": ["store"]}},
        }
    )
    assert parse_config(yaml.safe_load(effective_yaml(config, mask_secrets=False))) == config


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Config().cache.page_tokens = 3


def test_every_setting_is_described() -> None:
    def undescribed(section: type[BaseModel]) -> list[str]:
        found = []
        for name, field in section.model_fields.items():
            if not (field.description or "").endswith("."):
                found.append(f"{section.__name__}.{name}")
            kinds = (field.annotation, *get_args(field.annotation))
            for kind in kinds:
                if isinstance(kind, type) and issubclass(kind, BaseModel):
                    found += undescribed(kind)
        return found

    assert undescribed(Config) == []


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"tiers:\n  host: [1\n", ", line 3"),
        (b"server: {port: 1}\ncache: {}\nserver: {port: 2}\n", "line 3, column 1"),
        (b"- a\n- b\n", "should hold sections"),
        (b"server:\n\tport: 1\n", "line 2"),
        (b"\xff\xfe\x00", "not UTF-8"),
        (b"a: \x01", "not YAML"),
        (b"server: {port: 0x1ffff}", "server.port: "),
    ],
)
def test_a_broken_file_is_told_with_its_name_and_place(
    tmp_path: Path, content: bytes, said: str
) -> None:
    path = tmp_path / "broken.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load_config(path)
    assert "broken.yaml" in str(caught.value)
    assert said in str(caught.value)


def test_a_missing_file_is_told_plainly(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*absent.yaml: No such file"):
        load_config(tmp_path / "absent.yaml")


def test_an_empty_file_is_the_default_config(tmp_path: Path) -> None:
    path = tmp_path / "empty.yaml"
    path.write_text("# nothing\n")
    assert load_config(path) == Config()
