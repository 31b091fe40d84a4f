"""The model of the stand-in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.engine.sglang.scenes import VOCABULARY


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": VOCABULARY}))
    return tmp_path
