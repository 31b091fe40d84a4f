"""A fixture: the path of a file of rows, which a test writes."""

from pathlib import Path

import pytest


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "some.jsonl"
