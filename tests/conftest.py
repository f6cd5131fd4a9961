"""What holds for every test."""

from __future__ import annotations

import os

from hypothesis import settings

import engine.mkl  # noqa: F401  as in a server: before any test imports torch

# Kernels run in Triton's interpreter; it has to be told before it is imported. Where a GPU is
# tested, the variable is set to 0 from outside.
os.environ.setdefault("TRITON_INTERPRET", "1")

# Machines are shared: how long an example takes says nothing about the code.
settings.register_profile("tiercache", deadline=None)
settings.load_profile("tiercache")
