"""Models: from `model.source` to something that turns token ids into logits."""

from engine.models.load import LayoutFields, LoadedModel, load_model
from engine.models.tokens import ChatTemplateError, decode, encode_text, render_chat

__all__ = [
    "ChatTemplateError",
    "LayoutFields",
    "LoadedModel",
    "decode",
    "encode_text",
    "load_model",
    "render_chat",
]
