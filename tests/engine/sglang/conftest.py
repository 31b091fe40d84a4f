"""The fake server's model folder, and a check that no process group's thread outlives its test."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.sglang.scenes import VOCABULARY

JOIN_TIMEOUT_S = 30.0


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": VOCABULARY}))
    return tmp_path


@pytest.fixture(autouse=True)
def check_threads() -> Iterator[None]:
    """A thread blocked in a collective when Python exits would abort the process with SIGABRT."""
    yield
    for thread in threading.enumerate():
        if thread.name.startswith("weights "):
            thread.join(JOIN_TIMEOUT_S)
            assert not thread.is_alive()
