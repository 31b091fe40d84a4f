"""A fixture for the cleanup after runs of the learner."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.learner.learner_runs import sweep_runs


@pytest.fixture
def sweep(tmp_path: Path) -> Iterator[None]:
    """Clean up after tests that call `make_run`."""
    yield
    sweep_runs(tmp_path)
