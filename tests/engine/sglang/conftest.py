"""Fixtures: a fake server's model folder, captured log entries, a free port, and a check for remaining threads."""

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from tests.engine.sglang.scenes import VOCABULARY
from tests.engine.tiny_models import small_config

JOIN_TIMEOUT_S = 30.0


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(small_config(vocab_size=VOCABULARY).to_hf()))
    return tmp_path


@pytest.fixture
def log_entries() -> Iterator[list[Any]]:
    with capture_logs() as entries:
        yield entries


@pytest.fixture
def port() -> int:
    """Return a port that was free a moment ago."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


@pytest.fixture(autouse=True)
def check_threads() -> Iterator[None]:
    """Check that no thread is in a collective: at Python's exit it would abort the process with SIGABRT."""
    yield
    for thread in threading.enumerate():
        if thread.name.startswith("weights "):
            thread.join(JOIN_TIMEOUT_S)
            assert not thread.is_alive()
