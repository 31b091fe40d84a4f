"""The model of the stand-in; and no thread of a process group outlives its test."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.sglang.scenes import VOCABULARY

PATIENCE_S = 30.0


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": VOCABULARY}))
    return tmp_path


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    """One that waits for a group's other members as Python ends would end the process with SIGABRT."""
    yield
    for thread in threading.enumerate():
        if thread.name.startswith("weights "):
            thread.join(PATIENCE_S)
            assert not thread.is_alive()
