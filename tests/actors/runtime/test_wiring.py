"""The run's questions are loaded as prompts, and prompts that are too long are skipped."""

import json
from pathlib import Path

import pytest
import structlog
from msgspec.structs import replace
from structlog.testing import capture_logs

from asterism.actors.runtime.wiring import build_head_deciders, build_rules, load_problem_sets
from asterism.bus.messages import bytes_to_ids
from asterism.configs.load import load_run
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.algorithm import EvaluationConfig
from asterism.configs.schema.dialogue import DialogueConfig
from asterism.configs.schema.run_config import DataConfig, RunConfig
from asterism.engine.data.data_files import DatasetError
from asterism.engine.data.task_inputs import write_task_descriptions
from asterism.engine.hf.tokenizer import load_tokenizer
from asterism.policies.arbiter.arbiter import Arbiter
from asterism.policies.dialogue.chat_format import build_dialogue_format, build_prompt_segments, encode_segments
from asterism.tasks.math_python import MATH_PYTHON
from asterism.tasks.tiny.tiny_tokenizer import save_tokenizer, train_tokenizer
from tests.fakes import TOKENIZER

TOOLS = ("jupyter_code",)
FORMAT = build_dialogue_format(DialogueConfig(tools=TOOLS), MATH_PYTHON)
EMPTY = len(encode_segments(TOKENIZER, build_prompt_segments("", FORMAT)))


@pytest.fixture(autouse=True)
def _plain_logs() -> None:
    structlog.reset_defaults()


def run_with(folder: Path, questions: list[str], limit: int) -> RunConfig:
    rows = [json.dumps({"question": question, "answer": "#### 2"}) for question in questions]
    for name in ("train", "test"):
        (folder / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    write_task_descriptions(RunFolder(folder), {"": MATH_PYTHON})
    return RunConfig(
        name="r",
        data=DataConfig(train="$RUN/train.jsonl", test="$RUN/test.jsonl"),
        dialogue=DialogueConfig(tools=TOOLS, prompt_tokens=EMPTY + limit),
    )


def test_a_prompt_has_the_first_tokens_of_the_dialogue(tmp_path: Path) -> None:
    run = run_with(tmp_path, ["1 + 1?"], 10)
    (problem,) = load_problem_sets(run, RunFolder(tmp_path), TOKENIZER).train.problems
    assert bytes_to_ids(problem.prompt_ids) == encode_segments(TOKENIZER, build_prompt_segments("1 + 1?", FORMAT))
    assert problem.ground_truth == "2"


def test_prompts_over_the_limit_are_skipped_and_counted_in_one_warning_per_file(tmp_path: Path) -> None:
    run = run_with(tmp_path, ["1 + 1?", "x" * 50, "y" * 70, "2 + 2?"], 10)
    with capture_logs() as logs:
        problems = load_problem_sets(run, RunFolder(tmp_path), TOKENIZER)
    assert problems.train.counts == problems.test.counts == (2,)
    warnings = [entry for entry in logs if entry["event"] == "prompts.skipped"]
    assert [(entry["num_skipped"], entry["num_kept"]) for entry in warnings] == [(2, 2), (2, 2)]
    assert warnings[0]["longest_tokens"] == EMPTY + 70


def test_a_file_without_short_enough_prompts_is_refused_with_the_key_to_change(tmp_path: Path) -> None:
    run = run_with(tmp_path, ["x" * 50], 10)
    with pytest.raises(DatasetError, match=r"train\.jsonl.*dialogue\.prompt_tokens"):
        load_problem_sets(run, RunFolder(tmp_path), TOKENIZER)


def test_the_rules_have_the_ids_of_all_stop_tokens(tmp_path: Path) -> None:
    save_tokenizer(train_tokenizer(["some text"]), tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    dialogue = DialogueConfig(stop_tokens=("<|im_end|>", "<|endoftext|>"), prefill="<think>")
    rules = build_rules(RunConfig(name="r", dialogue=dialogue), {"": MATH_PYTHON}, tokenizer)[""]
    assert tokenizer.decode(rules.stop_token_ids) == "<|im_end|><|endoftext|>"
    assert rules.dialogue == build_dialogue_format(dialogue, MATH_PYTHON)


@pytest.mark.parametrize("preset", [True, False])
def test_the_preset_rstar2_release_changes_the_rules(tmp_path: Path, preset: bool) -> None:
    save_tokenizer(train_tokenizer(["some text"]), tmp_path)
    run = load_run(None, ("name=r", *(["preset=rstar2_release"] if preset else [])))
    rules = build_rules(run, {"": MATH_PYTHON}, load_tokenizer(tmp_path))[""]
    found = (rules.surplus_calls, rules.dialogue.unclosed_call, rules.graded_text, rules.counts_release_marks)
    expected = ("ignore", "ignore", "response", True) if preset else ("error", "error", "last_turn", False)
    assert found == expected


def test_rollouts_and_the_arbiter_have_the_limit_of_evaluations(tmp_path: Path) -> None:
    run = replace(run_with(tmp_path, ["1 + 1?"], 10), evaluation=EvaluationConfig(response_tokens=9000))
    rules = build_rules(run, {"": MATH_PYTHON}, TOKENIZER)[""]
    assert (rules.response_tokens, rules.of_evaluations.response_tokens) == (8192, 9000)
    arbiter = build_head_deciders(run, load_problem_sets(run, RunFolder(tmp_path), TOKENIZER))["arbiter"]
    assert isinstance(arbiter, Arbiter)
    assert arbiter.length_forecast.limit == 9000
