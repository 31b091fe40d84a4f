"""Preparing a run: complete files that follow from the seed, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from configs.errors import UnusableInput
from configs.run_folder import RunFolder
from configs.schema import Dialogue, Run, Tiny
from engine.checkpoint import load_model
from engine.datasets import read_problems
from engine.sft_data import read_sft
from engine.tiny.prepare import prepare
from engine.tokenizer import load_tokenizer

TINY = Tiny(num_train_questions=100, num_test_questions=20, num_sft_dialogues=100)
NOTEBOOK = Dialogue(tools=("jupyter_code",))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    folder = RunFolder(tmp_path_factory.mktemp("run"))
    prepare(Run(name="some", tiny=TINY, dialogue=NOTEBOOK), folder)
    return folder


def contents(folder: RunFolder) -> dict[str, bytes]:
    files = (path for path in folder.path.rglob("*") if path.is_file())
    return {str(path.relative_to(folder.path)): path.read_bytes() for path in files}


def test_the_files_read_like_anybodys(prepared: RunFolder) -> None:
    assert len(read_problems(prepared.data / "train.jsonl")) == 100
    assert len(read_problems(prepared.data / "test.jsonl")) == 20
    tokenizer = load_tokenizer(prepared.checkpoints / "init")
    assert len(read_sft(prepared.data / "sft.jsonl", tokenizer, NOTEBOOK.tools)) == 100


def test_the_model_has_an_embedding_for_every_token(prepared: RunFolder) -> None:
    init = prepared.checkpoints / "init"
    assert load_model(init).config.vocab_size == load_tokenizer(init).vocab_size


def test_the_same_seed_gives_the_same_bytes(prepared: RunFolder, tmp_path: Path) -> None:
    prepare(Run(name="some", tiny=TINY, dialogue=NOTEBOOK), RunFolder(tmp_path))
    assert contents(RunFolder(tmp_path)) == contents(prepared)


def test_another_seed_gives_other_files(prepared: RunFolder, tmp_path: Path) -> None:
    prepare(Run(name="some", seed=1, tiny=TINY, dialogue=NOTEBOOK), RunFolder(tmp_path))
    other, same = contents(RunFolder(tmp_path)), contents(prepared)
    changed = {name for name in same if other[name] != same[name]}
    assert changed >= {"data/train.jsonl", "data/test.jsonl", "data/sft.jsonl", "checkpoints/init/model.safetensors"}


@pytest.mark.parametrize(
    ("run", "problem"),
    [
        (Run(name="some"), r"the run has no \[tiny\] table"),
        (Run(name="some", tiny=TINY), r"dialogue.tools: the tiny task knows one tool"),
    ],
)
def test_a_run_that_does_not_fit_is_refused(run: Run, problem: str, tmp_path: Path) -> None:
    with pytest.raises(UnusableInput, match=problem):
        prepare(run, RunFolder(tmp_path))
    assert not list(tmp_path.iterdir())
