"""What holds for every test."""

from __future__ import annotations

from hypothesis import settings

# Machines are shared: how long an example takes says nothing about the code.
settings.register_profile("tiercache", deadline=None)
settings.load_profile("tiercache")
