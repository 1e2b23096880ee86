"""Settings of every test run of the project itself."""

from __future__ import annotations

from hypothesis import settings

# A busy machine is no failure; `--hypothesis-profile=thorough` looks much longer.
settings.register_profile("quick", deadline=None)
settings.register_profile("thorough", deadline=None, max_examples=2000)
settings.load_profile("quick")
