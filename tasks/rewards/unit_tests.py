"""A reward from unit tests of a function: `reward.functions = { tests = "asterism.tasks.rewards.unit_tests:score" }`.

A row has `tests` and `entry_point`. It may have `setup`, code for the tests and the program, such as imports. The
layout is that of HumanEval (Chen et al., 2021, "Evaluating Large Language Models Trained on Code") with its prompt as
the setup.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asterism.tasks.contract import SandboxHandle
from asterism.tasks.rewards import unit_test_programs
from asterism.tasks.rewards.unit_test_programs import UnusableTests

MAX_ROUNDS = 20
_SOURCE = Path(unit_test_programs.__file__).read_text(encoding="utf-8")
_FENCE = re.compile(r"```[^\n`]*\n(.*?)(?:```|\Z)", re.DOTALL)
_REASONING_ENDS = ("</reason>", "</think>")


async def score(
    completions: list[list[dict[str, str]]],
    tests: list[str | list[str]],
    entry_point: list[str],
    sandbox: SandboxHandle,
    setup: tuple[str, ...] | list[str] = ("",),
    log_metric: Callable[[str, float], None] | None = None,
) -> list[float]:
    """Return 1 if the function `entry_point` of the last message's program passes all tests, else 0.

    Raises Fault, and UnusableTests if the row's tests cannot run.
    """
    program = extract_program(completions[0][-1]["content"])
    rounds = TestRounds(sandbox, entry_point[0], setup[0], tests[0])
    has_passed = await rounds.judge(program)
    if log_metric is not None:
        log_metric("rounds", rounds.num_rounds)
    return [float(has_passed)]


def extract_program(text: str) -> str:
    """Return the last fenced block after the reasoning, or else the text inside `<answer>`, or else the whole text."""
    for end in _REASONING_ENDS:
        text = text.rpartition(end)[2]
    if "<answer>" in text:
        text = text.partition("<answer>")[2].partition("</answer>")[0]
    blocks = _FENCE.findall(text)
    return blocks[-1] if blocks else text


class TestRounds:
    """Runs the tests and the program alternately.

    In the first round, the tests list their calls without answers. The program answers the calls in a separate process,
    without the tests. Then the tests run again with the answers. A call that depends on an answer needs another round.
    """

    __test__ = False  # excludes the class from pytest's collection

    def __init__(self, sandbox: SandboxHandle, name: str, setup: str, tests: str | list[str]) -> None:
        self._sandbox = sandbox
        self._shared = {"setup": setup, "name": name}
        self._tests = tests if isinstance(tests, str) else "\n".join(tests)
        self.num_rounds = 0

    async def judge(self, program: str) -> bool:
        """Return whether the program passes the tests. Raises UnusableTests and Fault."""
        calls: list[Any] = []
        answers: list[Any] = []
        for self.num_rounds in range(1, MAX_ROUNDS + 1):
            result = await self._run_tests(calls, answers)
            if result is None:
                return False
            if result["is_complete"]:
                return not result["error"]
            calls = result["calls"]
            answers = await self._answer(program, calls)
            if not answers:
                return False
        return False

    async def _run_tests(self, calls: list[Any], answers: list[Any]) -> dict[str, Any] | None:
        """Run the tests with the answers so far. Return None if the tests did not end. Raises UnusableTests."""
        request = {**self._shared, "tests": self._tests, "calls": calls, "answers": answers}
        result = await self._run("print_test_result", request)
        if "unusable" in (result or {}):
            raise UnusableTests(result["unusable"])
        if result is None and not answers:
            raise UnusableTests("the tests do not end without the program; see sandbox.time_limit_s and output_kib")
        return result

    async def _answer(self, program: str, calls: list[Any]) -> list[Any]:
        """Return the program's answers to the calls, or no answer if the program failed."""
        answers = await self._run("print_answers", {**self._shared, "program": program, "calls": calls})
        is_list = isinstance(answers, list) and all(isinstance(each, list) and each for each in answers)
        return answers if is_list and len(answers) == len(calls) else []

    async def _run(self, function: str, request: dict[str, Any]) -> Any:
        """Return the JSON of the last printed line, or None without output."""
        code = f"{_SOURCE}\n{function}()\n"
        result = await self._sandbox.run(code, stdin=json.dumps(request))
        try:
            return json.loads(result.stdout.splitlines()[-1]) if result.ok else None
        except (ValueError, IndexError, RecursionError):
            return None
