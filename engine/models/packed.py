"""Linear layers with weights laid out once for the processor's matrix library.

Torch's bfloat16 `linear` lets oneDNN reorder the weight into its blocked layout on every call. For
a prompt that costs little; for the few rows of a decode step it costs as much as the product
itself. Here the reordering happens once, when the model is loaded. The operators are those torch's
own compiler uses; a build without them leaves the model as it is.
"""

from __future__ import annotations

import logging

import torch
from torch import nn

log = logging.getLogger("tiercache.engine")

_PACK_FOR_ROWS = 8
"""Rows the layout is chosen for: a decode step of a few requests. Prompts lose nothing by it."""


class PackedLinear(nn.Module):
    """`nn.Linear` over a packed weight. Inference only; the packed weight is opaque."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        weight = linear.weight.detach()
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACK_FOR_ROWS)
        self._bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            rows, self._packed, self._bias, "none", [], ""
        )
        return result


@torch.inference_mode()
def pack_linears(model: nn.Module) -> int:
    """Replaces the model's bfloat16 linear layers by packed ones; returns how many.

    An embedding that shares its weight with a layer keeps it; the layer gets a packed copy.
    """
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return 0
    packed = 0
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            if type(child) is nn.Linear and child.weight.dtype == torch.bfloat16:
                try:
                    setattr(parent, name, PackedLinear(child))
                except (AttributeError, NotImplementedError, RuntimeError) as error:
                    log.info("linear layers stay unpacked: %s", error)
                    return packed
                packed += 1
    return packed
