"""Before it creates anything, a run refuses unusable data files or warns of them, and names their keys."""

import json
import re
import shutil
from pathlib import Path

import pytest

from asterism.actors.launch.checks import data_checks
from asterism.actors.launch.checks.input_checks import check_inputs, list_input_checks
from asterism.configs.errors import UnusableInput
from asterism.configs.load import load_run
from tests.actors.launch.run_inputs import QUESTION, load

pytestmark = pytest.mark.slow


def test_unusable_questions_are_skipped_up_to_a_limit_only_in_training(inputs: Path) -> None:
    test = f"data.test={shutil.copy(inputs / 'train.jsonl', inputs / 'test.jsonl')}"
    (inputs / "train.jsonl").write_text(QUESTION + '{\n{"question": "2 + 2?"}\n')
    (warning,) = (line for line in check_inputs(load(inputs, test)) if "unusable rows" in line)
    assert re.fullmatch(
        r"warning: data\.train: 2 unusable rows are skipped, the first: .*/train\.jsonl: row 2: not JSON: .*", warning
    )
    with pytest.raises(UnusableInput, match=r"row 3, .* \(more unusable rows than data\.max_bad_rows = 1; the first: "):
        check_inputs(load(inputs, test, "data.max_bad_rows=1"))
    with pytest.raises(UnusableInput, match=r"^data\.train: .*/train\.jsonl: row 2: not JSON"):
        check_inputs(load(inputs, test, "data.max_bad_rows=0"))
    (inputs / "train.jsonl").write_text(QUESTION)
    (inputs / "test.jsonl").write_text(QUESTION + "{")
    with pytest.raises(UnusableInput, match=r"^data\.test: .*/test\.jsonl: row 2: not JSON"):
        check_inputs(load(inputs, test))


def test_a_cold_start_without_dialogues_has_two_remedies(inputs: Path) -> None:
    with pytest.raises(UnusableInput, match=r"^sft\.data: .*: no such file; set sft\.data .* or sft\.steps = 0$"):
        check_inputs(load(inputs, "sft.steps=3"))


def test_an_evaluation_without_questions_names_the_option_that_sets_them(inputs: Path) -> None:
    with pytest.raises(UnusableInput, match=r"^data\.test: .*: no such file; name the questions with --set NAME=FILE$"):
        check_inputs(load(inputs, "evaluation.only=true", f"data.test={inputs / 'none.jsonl'}"))


def test_an_unusable_dialogue_is_named_by_its_key_and_row(inputs: Path) -> None:
    dialogue = {
        "messages": [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "<reason>2</reason>"}]
    }
    path = inputs / "dialogues.jsonl"
    settings = (f"sft.data={path}", "sft.steps=3")
    path.write_text(2 * (json.dumps(dialogue) + "\n"))
    assert f"sft.data: {path}: 2 dialogues" in check_inputs(load(inputs, *settings))
    path.write_text(json.dumps(dialogue) + '\n{"messages": [{"role": "robot", "content": "2"}]}\n')
    with pytest.raises(UnusableInput, match=r"^sft\.data: .*/dialogues\.jsonl: row 2"):
        check_inputs(load(inputs, *settings, "sft.max_bad_rows=0"))
    (warning,) = [line for line in check_inputs(load(inputs, *settings)) if line.startswith("warning: sft.data: ")]
    assert warning.startswith(f"warning: sft.data: 1 unusable rows are skipped, the first: {path}: row 2")


def test_the_files_of_a_cold_start_by_epochs_are_checked(inputs: Path) -> None:
    path, settings = inputs / "dialogues.jsonl", ("sft.epochs=2", f"sft.validation={inputs / 'held_out.jsonl'}")
    dialogue = {"messages": [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]}
    with pytest.raises(UnusableInput, match=r"^sft\.data: .*; set sft\.data .* or sft\.epochs = 0$"):
        check_inputs(load(inputs, *settings))
    path.write_text(json.dumps(dialogue) + "\n")
    with pytest.raises(UnusableInput, match=r"^sft\.validation: .*/held_out\.jsonl: no such file"):
        check_inputs(load(inputs, *settings, f"sft.data={path}"))


def test_each_file_of_a_mixture_is_named_by_its_key(inputs: Path) -> None:
    dialogue = {"messages": [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]}
    (inputs / "one.jsonl").write_text(json.dumps(dialogue) + "\n")
    files = ", ".join(f'{{name = "{name}", data = "{inputs / name}.jsonl"}}' for name in ("one", "two"))
    settings = (f"sft.mixture=[{files}]", "sft.steps=3")
    with pytest.raises(UnusableInput, match=r"^sft\.mixture\.two\.data: .*two\.jsonl: no such file"):
        check_inputs(load(inputs, *settings))
    (inputs / "two.jsonl").write_text(2 * (json.dumps(dialogue) + "\n"))
    assert f"sft.mixture.two.data: {inputs / 'two.jsonl'}: 2 dialogues" in check_inputs(load(inputs, *settings))


def test_each_missing_file_of_the_rstar2_mixture_is_named_by_its_key() -> None:
    checks = list_input_checks(load_run(Path("configs/rstar2_cold_start.toml")))
    keys = [key for key in checks if key.startswith("sft.mixture.")]
    assert len(keys) == 6
    for key in keys:
        with pytest.raises(
            UnusableInput, match=rf"cold_start/.*: no such file.*; set {re.escape(key)} to a file of dialogues"
        ):
            checks[key]()


def test_answers_that_the_verifier_cannot_parse_are_counted_before_the_start(inputs: Path) -> None:
    path = inputs / "train.jsonl"
    answers = ["2", "x+1", "$$", "\\frac{1}{2}", "$ $", "$$"]
    rows = [{"question": f"What is number {number}?", "answer": each} for number, each in enumerate(answers)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (warning,) = [line for line in check_inputs(load(inputs)) if line.startswith("warning: data.train: ")]
    assert "cannot parse 2 answers" in warning
    assert "'$$' in train.jsonl:3" in warning


def test_answers_beyond_the_limit_of_checks_are_counted(inputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_checks, "_MAX_CHECKED_ANSWERS", 2)
    rows = [{"question": f"What is number {number}?", "answer": f"x+{number}"} for number in range(5)]
    (inputs / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (warning,) = [line for line in check_inputs(load(inputs)) if line.startswith("warning: data.train: ")]
    assert "3 further answers that are no numbers are not checked" in warning


def test_only_the_first_rows_of_a_long_file_are_checked(inputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_checks, "_MAX_CHECKED_ROWS", 3)
    path = inputs / "train.jsonl"
    path.write_text("".join(f'{{"question": "What is 1 + {number}?", "answer": "2"}}\n' for number in range(5)) + "{")
    assert f"data.train: {path}: 3 questions in the first 3 rows; the others are checked later" in check_inputs(
        load(inputs)
    )
    path.write_text("{}\n" + path.read_text())
    lines = check_inputs(load(inputs, "evaluation.questions=0"))
    assert any(line.startswith(f"data.train: {path}: 2 questions in the first 3 rows; the others ") for line in lines)


def test_unusual_questions_cause_warnings(inputs: Path) -> None:
    (inputs / "train.jsonl").write_text(2 * QUESTION + QUESTION.replace('"2"', '"3"'))
    path = inputs / "train.jsonl"
    assert check_inputs(load(inputs)) == [
        f"data.train: {path}: 2 questions; dropped 1 rows that repeat a question with its answer",
        "warning: data.train: 1 rows repeat a question with another answer",
        f"data.test: {path}: 3 questions; kept 1 rows that repeat a question with its answer",
        "warning: data.test: 1 rows repeat a question with another answer",
        "warning: data.test: 3 test questions are also training questions",
    ]
