"""`asterism task check` has exact findings for small tasks, in host processes."""

import json
from pathlib import Path
from typing import Any

import pytest

from asterism.configs.schema.dialogue import DialogueConfig
from asterism.tasks.checking.task_check import write_byte_tokenizer
from tests.actors.cli.checked_tasks import CODE, ROWS
from tests.actors.cli.invoking import check_golden_refusals, invoke
from tests.actors.runs.running import asterism
from tests.engine.data.cold_start_rows import write_rows

pytestmark = pytest.mark.slow
MESSAGES = Path(__file__).with_name("task_check_messages.txt")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write code and rows to the current folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "counting.py").write_text(CODE)
    write_rows(tmp_path / "rows.jsonl", *ROWS)
    return tmp_path


def check(*arguments: str) -> tuple[int, str, dict[str, Any]]:
    """Run `asterism task check`, and return exit code, output and the JSON."""
    result = invoke("task", "check", *arguments, "--json", "check.json")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, json.loads(Path("check.json").read_text())


def find(name: str, *arguments: str) -> list[tuple[str, str, str]]:
    """Return status, subject and detail of the findings, after a check of their remedies and of the exit code."""
    exit_code, _, checked = check(f"counting.py:{name}", "--data", "rows.jsonl", *arguments)
    findings = [(each["status"], each["subject"], each["detail"]) for each in checked["findings"]]
    assert all(each["remedy"].endswith(".") for each in checked["findings"])
    assert exit_code == int("problem" in [status for status, _, _ in findings])
    return findings


# ---------------------------------------------------------------- tasks without problems


def test_tools_are_called_with_wrong_and_right_arguments_and_the_answers_are_graded() -> None:
    exit_code, output, checked = check("counting.py:TOOLS", "--data", "rows.jsonl")
    assert (exit_code, checked["findings"], checked["kind"]) == (0, [], "tools")
    assert [tool["signature"] for tool in checked["tools"]] == ['look_up(name: string, field?: "age" | "size")']
    (wrong, right, answer) = checked["plays"][0]["turns"]
    assert [call["text"] for call in wrong["calls"]] == ['Tool call failure\n"name" must be a string, not []']
    assert [(call["status"], call["text"]) for call in right["calls"]] == [("ok", "age of text")]
    assert answer == {"text": "</reason>\n<answer>\\boxed{5}</answer>", "calls": []}
    rewards = {play["row"]: play["reward"] for play in checked["plays"]}
    assert list(rewards.items()) == [("rows.jsonl:1", 1.0), ("rows.jsonl:3", 0.0), ("rows.jsonl:4", 1.0)]
    assert [(each["name"], each["calls"]) for each in checked["times"]] == [("look_up", 3), ("reward", 3)]
    assert "limits  prompt 1,024 tokens, response 8,192 tokens, 10 turns; a call 30 s, a reward 60 s" in output
    assert '    "name" must be a string, not []\n' in output
    assert "ok    no problems" in output


def test_an_environment_of_trl_appends_text_to_the_prompt_and_gives_the_reward() -> None:
    exit_code, output, checked = check("counting.py:Counter", "--data", "rows.jsonl", "--set", "parameters.low=10")
    assert (exit_code, checked["findings"], checked["is_replayable"]) == (0, [], True)
    prompt = checked["prompts"][2]
    assert prompt["text"].endswith(
        "<|im_start|>user\nCount to 8. It starts at 18.<|im_end|>\n<|im_start|>assistant\n<reason>"
    )
    assert f"prompt of rows.jsonl:4: {len(prompt['token_ids'])} of 1,024 tokens" in output
    assert [call["text"] for turn in checked["plays"][2]["turns"] for call in turn["calls"]] == [
        'Tool call failure\n"number" must be an integer, not []',
        "It is 19.",
    ]
    assert [play["components"] for play in checked["plays"]] == [{"environment": each} for each in (16.0, 18.0, 19.0)]
    assert [(each["name"], each["calls"]) for each in checked["times"]] == [("reset", 3), ("add", 3), ("reward", 3)]


def test_a_dialogue_answers_up_to_three_turns() -> None:
    exit_code, _, checked = check("counting.py:Echo", "--data", "rows.jsonl", "--set", "dialogue.prefill=")
    assert (exit_code, checked["findings"], checked["kind"]) == (0, [], "dialogue")
    play = checked["plays"][0]
    assert [(turn["text"], turn["calls"][0]["text"]) for turn in play["turns"]] == [
        ("My answer is 1", "You said: My answer is 1"),
        ("My answer is 2", "You said: My answer is 2"),
    ]
    assert (play["ending"], play["reward"], play["components"]) == ("done", 10.0, {"start": 10.0})


def test_a_tool_with_a_sandbox_runs_programs() -> None:
    exit_code, _, checked = check("counting.py:COMPUTE", "--data", "rows.jsonl")
    assert (exit_code, checked["findings"]) == (0, [])
    assert checked["plays"][0]["turns"][1]["calls"][0]["text"] == "42\n"


# ---------------------------------------------------------------- attacks


def test_a_reward_for_texts_that_contain_the_truth_lets_attacks_pass() -> None:
    score = ("--set", "reward.functions.score=counting.py:score_answer")
    exit_code, output, checked = check("counting.py:TOOLS", "--data", "rows.jsonl", *score, "--attack")
    passed = {each["name"]: each["passes"] for each in checked["attacks"]}
    assert passed["all candidates"] == passed["retraction"] == 24
    assert passed["empty"] == passed["exit"] == 0
    problems = [each["subject"] for each in checked["findings"] if each["status"] == "problem"]
    assert (exit_code, problems) == (
        1,
        ["attack: echo of the question", "attack: all candidates", "attack: retraction"],
    )
    assert "attack: retraction" in output and "Compare the whole answer, and not a part of it" in output


def test_the_grader_rejects_every_attack() -> None:
    exit_code, output, checked = check("counting.py:TOOLS", "--data", "rows.jsonl", "--attack")
    assert {each["name"]: each["max_reward"] for each in checked["attacks"]} == dict.fromkeys(
        ("empty", "exit", "spoofed equality", "tampering", "echo of the question", "all candidates", "retraction"), 0.0
    )
    assert (exit_code, "ok    no problems" in output) == (0, True)


def test_an_environment_that_rewards_an_empty_answer_is_a_problem() -> None:
    problems = {subject for status, subject, _ in find("Counter", "--attack") if status == "problem"}
    assert "attack: empty" in problems


# ---------------------------------------------------------------- problems


@pytest.mark.parametrize(
    ("name", "subject", "detail"),
    [
        ("PAUSES", "pause", "blocks the event loop for "),  # and not `rest`, which is async and waits
        ("Dice", "replayable", "replayable = True, but roll has two results for rows.jsonl:1: '"),
    ],
)
def test_a_tool_that_blocks_the_event_loop_or_is_random_is_named(name: str, subject: str, detail: str) -> None:
    ((status, *found),) = find(name)
    assert (status, found[0]) == ("problem", subject)
    assert found[1].startswith(detail)


FAILED_ROWS = "4 of 4 rows: rows.jsonl:1, rows.jsonl:2, rows.jsonl:3 and 1 more"
IGNORED = "1 in all 3 plays, for the row's ground truth as the answer and for a wrong answer"
PASSING = "a wrong answer is a success (reward > 0) in 4 of 4 rows, such as rows.jsonl:1: reward 1 (same 1)"
MISSING = "reset needs the column `level`; the row has question, answer, start, ground_truth (3 of 3 plays)"
EQUAL = "not declared, although each script had the same results in two processes"


@pytest.mark.parametrize(
    ("name", "setting", "expected"),
    [
        ("Plain", "", [("hint", "replayable", EQUAL)]),
        ("Kept", "", [("problem", "instances", "3 of 3 instances are alive after `close`")]),
        (
            "Busy",
            "",
            [
                ("problem", "threads", "3 are left after 3 plays: watch, watch, watch"),
                ("problem", "child processes", "3 are left after 3 plays: sleep 5, sleep 5, sleep 5"),
            ],
        ),
        (
            "TOOLS",
            "reward.functions.bad=counting.py:fail",
            [("problem", "reward", f"bad raised RuntimeError: no reward today ({FAILED_ROWS})")],
        ),
        (
            "TOOLS",
            "reward.functions.same=counting.py:score_length",
            [("problem", "reward", IGNORED), ("hint", "success", PASSING)],
        ),
        ("TOOLS", "reward.functions.right=counting.py:score_answer", []),
        ("Strict", "", [("hint", "add", 'add({"number":1}): ValueError: only even numbers')]),
        (
            "NeedsColumn",
            "",
            [("problem", "reset", MISSING), ("hint", "tools", "never called: add; the plays ended before")],
        ),
    ],
)
def test_the_findings_of_a_task_are_named(name: str, setting: str, expected: list[tuple[str, str, str]]) -> None:
    assert find(name, *(("--set", setting) if setting else ())) == expected


@pytest.mark.parametrize(
    ("name", "settings", "problem"),
    [
        ("Slow", ("--set", "call_limit_s=0.3"), ("add", 'add({"number":1}): TimeoutError: no result within 0.3 s')),
        ("Dies", (), ("call", 'the host process of task "Dies" died with exit code 7 (3 of 3 plays)')),
    ],
)
def test_a_call_that_never_returns_is_a_problem(name: str, settings: tuple[str, ...], problem: tuple[str, str]) -> None:
    assert ("problem", *problem) in find(name, *settings)


def test_rows_that_fail_or_lack_an_answer_are_counted_over_the_whole_file(folder: Path) -> None:
    (folder / "partial.py").write_text(
        "def score(completions, ground_truth):\n"
        "    return [0.25 + 0.75 * (str(float(ground_truth[0])) in completions[0][-1]['content'])]\n"
    )
    rows = [{"question": f"{number} + 1?", "answer": str(number + 1)} for number in range(25)]
    for number in (3, 11, 19):  # 12% of the rows
        rows[number]["answer"] = "eleven"
    del rows[7]["answer"]
    write_rows(folder / "rows.jsonl", *rows)
    findings = find("TOOLS", "--set", "reward.functions.score=partial.py:score")
    failed = "score raised ValueError: could not convert string to float: 'eleven' "
    failed += "(4 of 25 rows: rows.jsonl:4, rows.jsonl:8, rows.jsonl:12 and 1 more)"
    passing = (
        "a wrong answer is a success (reward > 0) in 21 of 21 rows, such as rows.jsonl:1: reward 0.25 (score 0.25)"
    )
    unanswered = ("problem", "rows", "1 of 25 rows have no answer: rows.jsonl:8")
    assert [each for each in findings if each[0] == "problem"] == [("problem", "reward", failed), unanswered]
    assert ("hint", "success", passing) in findings


def test_an_unusable_row_is_named_with_its_file_and_field(folder: Path) -> None:
    write_rows(folder / "rows.jsonl", ROWS[0], {"question": "", "answer": "1"}, ROWS[2])
    problem = f"{folder}/rows.jsonl: row 2, field `question`: no question; expected a non-empty string"
    assert find("TOOLS") == [("problem", "rows", f"{problem} (usable rows before it: 1)")]


def test_prompts_over_the_limit_are_a_problem_only_with_a_tokenizer(folder: Path) -> None:
    ((status, subject, detail),) = find("TOOLS", "--set", "dialogue.prompt_tokens=100")
    assert (status, subject) == ("hint", "prompts")
    assert detail.startswith("4 of 4 prompts have more than dialogue.prompt_tokens = 100 tokens, up to ")
    write_byte_tokenizer(folder / "model", DialogueConfig())
    ((status, _, _),) = find("TOOLS", "--set", "dialogue.prompt_tokens=100", "--tokenizer", "model")
    assert status == "problem"


# ---------------------------------------------------------------- inputs


def test_turns_from_a_file_replace_the_generated_turns() -> None:
    Path("turns.txt").write_text(
        '<tool_call>\n{"name": "add", "arguments": {"number": {start}}}\n</tool_call>\n---\nend\n'
    )
    _, _, checked = check("counting.py:Counter", "--data", "rows.jsonl", "--turns", "turns.txt")
    assert [call["text"] for turn in checked["plays"][0]["turns"] for call in turn["calls"]] == ["It is 10."]
    assert checked["plays"][0]["turns"][1] == {"text": "end", "calls": []}


TWO_TASKS = (
    'name = "r"\n[[tasks]]\nname = "count"\nimport = "counting.py:Counter"\ndata = "rows.jsonl"\n'
    'parameters = { low = 3 }\n[[tasks]]\nname = "look"\nimport = "counting.py:TOOLS"\ndata = "rows.jsonl"\n'
)


def test_a_task_of_a_configuration_is_checked_with_its_keys() -> None:
    Path("run.toml").write_text(TWO_TASKS)
    _, _, checked = check("--config", "run.toml", "--task", "count", "--set", "call_limit_s=4")
    assert (checked["task"], checked["limits"]["call_limit_s"]) == ("count", 4.0)
    assert checked["plays"][0]["reward"] == 9.0


def test_unusable_input_is_refused_with_its_key(folder: Path) -> None:
    Path("run.toml").write_text(TWO_TASKS)
    Path("empty.toml").write_text('name = "r"\n')
    check_golden_refusals(MESSAGES, {f"{folder}/": ""})


def test_the_command_exits_with_2_for_unusable_input_and_its_help_has_an_example(folder: Path) -> None:
    refused = asterism("task", "check", f"{folder}/counting.py:nope", "--data", f"{folder}/rows.jsonl")
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: tasks.nope.import: ")
    assert "Example: asterism task check" in " ".join(invoke("task", "check", "-h").stdout.split())
