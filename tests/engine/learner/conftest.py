"""Fixtures: ranks of the learner, which are closed at the end, and the cleanup after runs of the learner."""

from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.run_config import RunConfig
from asterism.engine.learner.batches.batch_journal import BatchJournal
from asterism.engine.learner.distributed import RankGroup
from asterism.engine.learner.learner_rank import LearnerRank
from tests.engine.learner.learner_runs import OpenRank, sweep_runs


@pytest.fixture
def open_rank() -> Iterator[OpenRank]:
    """Return a function that opens the only rank of a run, with a journal of batches."""
    with ExitStack() as stack:

        def open_one(run: RunConfig, folder: RunFolder) -> LearnerRank:
            journal = BatchJournal(folder.batches)
            return stack.enter_context(closing(LearnerRank(run, folder, RankGroup(), journal)))

        yield open_one


@pytest.fixture
def sweep(tmp_path: Path) -> Iterator[None]:
    """Clean up after tests that call `make_run`."""
    yield
    sweep_runs(tmp_path)
