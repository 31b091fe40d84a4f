"""The servers that these tests speak to: `SGLANG_URL`, with room for all, and `SGLANG_SMALL_URL`, with too little. Both run
the tiny model of `SGLANG_MODEL`, by --enable-deterministic-inference."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def _of_environment(name: str) -> str:
    value = os.environ.get(name)
    if not value:
        pytest.fail(f"set {name}")
    return value


@pytest.fixture(scope="session")
def server_url() -> str:
    return _of_environment("SGLANG_URL")


@pytest.fixture(scope="session")
def small_server_url() -> str:
    return _of_environment("SGLANG_SMALL_URL")


@pytest.fixture(scope="session")
def model() -> Path:
    return Path(_of_environment("SGLANG_MODEL"))
