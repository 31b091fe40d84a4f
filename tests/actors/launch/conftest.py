"""These fixtures are input files of a run: complete files, and a copy that a test can damage."""

import shutil
from pathlib import Path

import pytest

from tests.actors.launch.run_inputs import QUESTION


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with a model, a tokenizer and a file of questions."""
    from tests.engine.learner.training_examples import write_initial_checkpoint  # torch is slow to import

    folder = tmp_path_factory.mktemp("complete")
    write_initial_checkpoint(folder / "model")
    (folder / "train.jsonl").write_text(QUESTION)
    return folder


@pytest.fixture
def inputs(complete: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(complete, tmp_path / "inputs"))
