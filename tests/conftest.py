"""How much hypothesis tries: `make check` asks for `--hypothesis-profile=quick`, `make test` for nothing."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("thorough", max_examples=100, deadline=None, print_blob=True)
settings.register_profile("quick", max_examples=12, deadline=None, print_blob=True)
settings.load_profile("thorough")
