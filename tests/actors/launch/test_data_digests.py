"""A run can only be resumed with the data files of its first start."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from asterism.actors.launch.checks.data_digests import keep_data_digests
from asterism.configs.errors import UnusableInput
from asterism.configs.load import load_run
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.run_config import RunConfig

ROW = '{{"question": "What is {0} plus {0}?", "answer": "{1}"}}\n'


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Write a file for each key, and a folder of parts for data.train."""
    (tmp_path / "parts").mkdir()
    for number, name in enumerate(
        ("parts/a.jsonl", "parts/b.jsonl", "test.jsonl", "set.jsonl", "sft.jsonl", "val.jsonl")
    ):
        (tmp_path / name).write_text(ROW.format(number, 2 * number))
    return tmp_path


def load(data: Path, *settings: str) -> RunConfig:
    paths = f"data.train={data / 'parts'}", f"data.test={data / 'test.jsonl'}"
    return load_run(None, ["name=r", "model.checkpoint=m", "sft.steps=0", *paths, *settings])


def keep(data: Path, *settings: str) -> None:
    (data / "run").mkdir(exist_ok=True)
    keep_data_digests(RunFolder(data / "run"), load(data, *settings))


SFT = "sft.steps=2"


def list_settings(data: Path) -> list[str]:
    return [SFT, f"sft.data={data / 'sft.jsonl'}", f"sft.validation={data / 'val.jsonl'}"]


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("parts/a.jsonl", "data.train"),
        ("parts/b.jsonl", "data.train"),
        ("test.jsonl", "data.test"),
        ("sft.jsonl", "sft.data"),
        ("val.jsonl", "sft.validation"),
    ],
)
def test_a_changed_digit_of_any_data_file_is_refused_with_file_key_and_remedy(data: Path, name: str, key: str) -> None:
    keep(data, *list_settings(data))
    path = data / name
    content = path.read_text()
    path.write_text(content.replace("plus", "plu5"))
    with pytest.raises(UnusableInput, match=rf"{path}: the content of {key} has changed since .* --name") as refused:
        keep(data, *list_settings(data))
    assert str(data / "run") in str(refused.value)
    path.write_text(content)
    keep(data, *list_settings(data))


def test_a_file_with_another_number_of_rows_is_refused(data: Path) -> None:
    """The file had 3 rows at the start, and 1 other row at the resume (case resume-01 of the public bug reports)."""
    path = data / "parts" / "a.jsonl"
    path.write_text("".join(ROW.format(number, 2 * number) for number in range(3)))
    keep(data)
    path.write_text(ROW.format(7, 14))
    with pytest.raises(UnusableInput, match=r"a\.jsonl: the content of data\.train has changed"):
        keep(data)


def test_a_new_or_lost_part_of_a_folder_is_refused(data: Path) -> None:
    keep(data)
    part = data / "parts" / "c.jsonl"
    shutil.copyfile(data / "parts" / "a.jsonl", part)
    with pytest.raises(UnusableInput, match=r"c\.jsonl: this file was added to data\.train since"):
        keep(data)
    part.unlink()
    (data / "parts" / "b.jsonl").unlink()
    with pytest.raises(UnusableInput, match=r"b\.jsonl: this file was removed from data\.train since"):
        keep(data)


def test_the_data_of_tasks_and_of_evaluation_sets_are_compared(data: Path, tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text(
        f'name = "r"\n[model]\ncheckpoint = "m"\n[sft]\nsteps = 0\n'
        f'[[tasks]]\nname = "sums"\ndata = "{data / "parts"}"\n'
        f'[[evaluation.sets]]\nname = "held"\ndata = "{data / "set.jsonl"}"\n'
    )
    (data / "run").mkdir()
    folder, run = RunFolder(data / "run"), load_run(config)
    keep_data_digests(folder, run)
    expected: dict[str, Any] = {"parts/a.jsonl": r"tasks\.sums\.data", "set.jsonl": r"evaluation\.sets\.held\.data"}
    for name, key in expected.items():
        content = (data / name).read_text()
        (data / name).write_text(content.replace("is", "iz"))
        with pytest.raises(UnusableInput, match=f"{name}: the content of {key} has changed"):
            keep_data_digests(folder, run)
        (data / name).write_text(content)


def test_unused_data_and_a_run_of_an_older_version_are_not_compared(data: Path) -> None:
    keep(data, "evaluation.questions=0")
    (data / "test.jsonl").write_text("other\n")
    (data / "sft.jsonl").write_text("other\n")
    keep(data, "evaluation.questions=0")
    (data / "run" / "data.json").unlink()
    (data / "parts" / "a.jsonl").write_text(ROW.format(9, 18))
    keep(data, "evaluation.questions=0")
    assert (data / "run" / "data.json").exists()


def test_a_missing_file_and_a_damaged_record_are_named(data: Path) -> None:
    keep(data)
    record = data / "run" / "data.json"
    record.write_bytes(record.read_bytes()[:-5])
    with pytest.raises(UnusableInput, match=r"data\.json: damaged"):
        keep(data)
    (data / "test.jsonl").unlink()
    with pytest.raises(UnusableInput, match=r"data\.test: .*test\.jsonl: no such file"):
        keep(data)
