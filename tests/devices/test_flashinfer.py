"""The FlashInfer back end asks for the right pages: its kernels' place is taken by plain torch."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from engine.devices.flashinfer_attention import FlashInferAttention
from tests.devices.attention_cases import assert_attends, make_case
from tiercache.errors import ConfigError
from tiercache.types import PageLayout

LAYOUT = PageLayout(layers=3, kv_heads=2, head_dim=64, page_tokens=16, dtype="float32")


class PlainWrapper:
    """What FlashInfer documents of its wrapper: CSR page lists, the fill of each last page."""

    plans = 0

    def __init__(self, _workspace: torch.Tensor, kv_layout: str) -> None:
        assert kv_layout == "NHD"

    def plan(
        self, rows: Any, indptr: Any, indices: Any, last: Any, *shape: int, causal: bool,
        sm_scale: float, **_types: Any,
    ) -> None:  # fmt: skip
        assert causal
        self.plans += 1
        self._rows, self._indptr, self._indices, self._last = rows, indptr, indices, last
        self._shape, self._scale = shape, sm_scale

    def run(self, query: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        heads, kv_heads, head_dim, page_tokens = self._shape
        assert query.shape[1:] == (heads, head_dim)
        output = torch.empty_like(query)
        for i, last in enumerate(self._last.tolist()):
            rows = slice(int(self._rows[i]), int(self._rows[i + 1]))
            pages = self._indices[int(self._indptr[i]) : int(self._indptr[i + 1])].long()
            count = (pages.numel() - 1) * page_tokens + last
            k, v = (one[pages].flatten(0, 1)[:count].transpose(0, 1)[None] for one in kv)
            mask = torch.ones(rows.stop - rows.start, count, dtype=torch.bool)
            attended = torch.nn.functional.scaled_dot_product_attention(
                query[rows].transpose(0, 1)[None], k, v, scale=self._scale, enable_gqa=True,
                attn_mask=mask.tril(count - mask.shape[0]),
            )  # fmt: skip
            output[rows] = attended[0].transpose(0, 1)
        assert kv_heads == k.shape[1]
        return output


@pytest.fixture
def attention(monkeypatch: pytest.MonkeyPatch) -> FlashInferAttention:
    stand_in = ModuleType("flashinfer")
    stand_in.BatchPrefillWithPagedKVCacheWrapper = PlainWrapper  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", stand_in)
    monkeypatch.setattr("engine.devices.flashinfer_attention.find_spec", lambda name: name)
    return FlashInferAttention(4, LAYOUT, "cpu")


def test_it_attends_to_the_pages_of_each_request(attention: FlashInferAttention) -> None:
    assert_attends(make_case([(40, 1), (0, 17), (15, 1), (16, 33)]), attention)


def test_a_batch_is_planned_once_for_all_layers(attention: FlashInferAttention) -> None:
    case = make_case([(5, 3)])
    attention.write(case.key, case.value, case.pages, case.batch)
    for _ in range(3):
        attention.attend(case.query, case.pages, case.batch, 0.125)
    assert attention._wrapper.plans == 1


def test_without_the_package_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.devices.flashinfer_attention.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="flashinfer-python"):
        FlashInferAttention(4, LAYOUT, "cpu")
