"""A user's program prepares data and a model that the run reads; its errors name the configuration key."""

from pathlib import Path

import pytest

from asterism.actors.cli.planning.plan_command import find_model_config
from asterism.actors.launch.checks.data_digests import list_missing_files
from asterism.actors.launch.checks.input_checks import check_inputs
from asterism.configs.errors import UnusableInput
from asterism.configs.load import load_run
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.run_config import RunConfig
from asterism.tasks.prepare_program import prepare_run
from tests.engine.tiny_models import small_config

CODE = """
from asterism.tasks.prepare_program import PrepareProgram
from tests.engine.tiny_models import small_config

class Made(PrepareProgram, frozen=True):
    rows: int = 1

    def check(self, run):
        if self.rows > 9:
            raise ValueError("prepare.parameters.rows: at most 9")
        return small_config() if self.rows else None

    def prepare(self, run, folder):
        (folder.data / "train.jsonl").write_text('{"question": "1?", "answer": "1"}')

def other(): ...
"""


def load(folder: Path, *settings: str, name: str = "Made") -> RunConfig:
    (folder / "made.py").write_text(CODE)
    (folder / "run.toml").write_text(f'name = "a"\nruns_folder = "{folder}"\nprepare.import = "made.py:{name}"\n')
    return load_run(folder / "run.toml", ["sft.steps=0", *settings])


def test_files_that_the_program_will_write_are_not_checked(tmp_path: Path) -> None:
    check_inputs(load(tmp_path))
    with pytest.raises(UnusableInput, match=r"^data\.train: .*elsewhere: no such file"):
        check_inputs(load(tmp_path, "data.train=elsewhere"))


@pytest.mark.parametrize(
    ("name", "settings", "problem"),
    [
        ("Made", ("rows=10",), r"Made: prepare\.parameters\.rows: at most 9"),
        ("Made", ("rows=0",), r"the program makes no model; set model\.checkpoint to the folder of a model"),
        ("Made", ("rows=a",), r'prepare\.parameters: `rows` must be an integer, got "a"; \S*made\.py:Made takes rows'),
        ("Made", ("row=1",), r"prepare\.parameters: Object contains unknown field `row`; \S*made\.py:Made takes rows"),
        ("other", (), r"\S*made\.py:other is no subclass of asterism\.tasks\.prepare_program:PrepareProgram"),
        ("Mode", (), r'\S*made\.py has no "Mode"; did you mean "Made"\?'),
    ],
)  # fmt: skip
def test_an_unusable_program_is_refused_with_the_key(
    tmp_path: Path, name: str, settings: tuple[str, ...], problem: str
) -> None:
    run = load(tmp_path, *(f"prepare.parameters.{each}" for each in settings), name=name)
    with pytest.raises(UnusableInput, match=rf"^(prepare\.import: )?{problem}$"):
        check_inputs(run)


def test_the_program_describes_the_model_until_it_exists(tmp_path: Path) -> None:
    run = load(tmp_path)
    assert find_model_config(run) == small_config()
    (tmp_path / "a" / "checkpoints" / "init").mkdir(parents=True)
    with pytest.raises(UnusableInput, match=r"^model\.checkpoint: "):
        find_model_config(run)


def test_the_program_runs_until_all_files_of_the_run_exist(tmp_path: Path) -> None:
    run, folder = load(tmp_path), RunFolder(tmp_path / "a")
    folder.data.mkdir(parents=True)
    assert list_missing_files(folder, run) == ["$RUN/checkpoints/init", "$RUN/data/train.jsonl", "$RUN/data/test.jsonl"]
    prepare_run(run, folder)
    assert list_missing_files(folder, run) == ["$RUN/checkpoints/init", "$RUN/data/test.jsonl"]
    (folder.checkpoints / "init").mkdir(parents=True)
    assert list_missing_files(folder, load(tmp_path, "data.test=elsewhere")) == []
