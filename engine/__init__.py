"""The engine: models, steps, and what keeps them fed from the tiers."""

import engine.mkl  # noqa: F401  before anything here imports torch
