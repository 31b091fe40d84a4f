"""The run's questions become prompts; those that are too long are counted, skipped and said once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import structlog
from structlog.testing import capture_logs

from actors.problems import load_problems
from configs.run_folder import RunFolder
from configs.schema import Data, Dialogue, Run
from engine.datasets import DatasetError
from policies.dialogue import encode_pieces, prompt_pieces
from policies.record import bytes_to_ids
from tests.fakes import TOKENIZER

TOOLS = ("jupyter_code",)
EMPTY = len(encode_pieces(TOKENIZER, prompt_pieces("", TOOLS)))


@pytest.fixture(autouse=True)
def _plain_logs() -> None:
    structlog.reset_defaults()


def run_with(folder: Path, questions: list[str], limit: int) -> Run:
    rows = [json.dumps({"question": question, "answer": "#### 2"}) for question in questions]
    for name in ("train", "test"):
        (folder / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    return Run(
        name="r",
        data=Data(train="$RUN/train.jsonl", test="$RUN/test.jsonl"),
        dialogue=Dialogue(tools=TOOLS, prompt_tokens=EMPTY + limit),
    )


def test_a_prompt_is_the_dialogues_beginning(tmp_path: Path) -> None:
    run = run_with(tmp_path, ["1 + 1?"], 10)
    (problem,) = load_problems(run, RunFolder(tmp_path), TOKENIZER).train
    assert bytes_to_ids(problem.prompt_ids) == encode_pieces(TOKENIZER, prompt_pieces("1 + 1?", TOOLS))
    assert problem.ground_truth == "2"


def test_prompts_over_the_limit_are_skipped_counted_and_said_once_a_file(tmp_path: Path) -> None:
    run = run_with(tmp_path, ["1 + 1?", "x" * 50, "y" * 70, "2 + 2?"], 10)
    with capture_logs() as logs:
        problems = load_problems(run, RunFolder(tmp_path), TOKENIZER)
    assert len(problems.train) == len(problems.test) == 2
    said = [entry for entry in logs if entry["event"] == "prompts.skipped"]
    assert [(entry["num_skipped"], entry["num_kept"]) for entry in said] == [(2, 2), (2, 2)]
    assert said[0]["longest_tokens"] == EMPTY + 70


def test_a_file_in_which_no_prompt_fits_is_refused_with_the_key_to_change(tmp_path: Path) -> None:
    run = run_with(tmp_path, ["x" * 50], 10)
    with pytest.raises(DatasetError, match=r"train\.jsonl.*dialogue\.prompt_tokens"):
        load_problems(run, RunFolder(tmp_path), TOKENIZER)
