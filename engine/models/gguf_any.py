"""GGUF files that `convert` does not know, read by transformers' own GGUF support.

Slow (about half a minute for a small model), and done once: the result is a folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from engine.models.progress import Report
from engine.models.support import causal_class, require_pageable
from tiercache.errors import ConfigError


def convert_with_transformers(path: Path, folder: Path, report: Report) -> None:
    """Writes config, weights and tokenizer of `path` into the empty `folder`, in float32."""
    here: dict[str, Any] = {"gguf_file": path.name, "local_files_only": True}
    report("converting weights", 0.0)
    try:
        config = AutoConfig.from_pretrained(path.parent, **here)
        require_pageable(config, str(path))
        loaded = AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.float32, **here)
        tokenizer = AutoTokenizer.from_pretrained(path.parent, **here)
    except ConfigError:
        raise
    except Exception as error:  # whatever an unknown file does to a parser
        raise ConfigError(
            f"model.source: transformers cannot read {path}: {type(error).__name__}: {error}"
        ) from error
    clean = causal_class(config)(config)  # one read from GGUF refuses to be saved
    clean.load_state_dict(loaded.state_dict())
    clean.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    report("converting weights", 1.0)
