"""Finds answers that the run's verifier cannot grade. A run masks trajectories with such answers (docs/grading.md)."""

import asyncio
import re
from collections.abc import Collection
from typing import Literal

from asterism.bus.messages import AnswerSubmitted
from asterism.configs.schema.machines import SandboxConfig
from asterism.sandbox.contract import SandboxFailure
from asterism.sandbox.select_backend import make_sandbox
from asterism.tasks.checking.lazy_sandbox import LazySandbox

AnswerKind = Literal["integer", "number", "any"]

_SENTENCE_WORDS = 3
_WORD, _COMMAND = re.compile(r"[^\W\d_]{3,}"), re.compile(r"\\[a-zA-Z]+")
_INTEGER = r"[-+]?[0-9]+"
_KINDS: dict[AnswerKind, re.Pattern[str]] = {
    "integer": re.compile(_INTEGER),
    "number": re.compile(
        rf"{_INTEGER}(?:\.\d+)?|[-+]?\.\d+|{_INTEGER}\s*/\s*\d+|[-+]?\\[dt]?frac\{{-?\d+\}}\{{\d+\}}", re.ASCII
    ),
}
_PROBE = "0"  # any answer: the verifier parses the ground truth before it compares
_MAX_GRADINGS = 4  # concurrent gradings


def is_answer_of_kind(answer: str, kind: AnswerKind) -> bool:
    """Return whether the answer is of the kind. A sentence is of no kind: the verifier would compare it as a text."""
    if kind == "any":
        return len(_WORD.findall(_COMMAND.sub(" ", answer))) < _SENTENCE_WORDS
    return _KINDS[kind].fullmatch(answer.strip("$ ").replace("\u2212", "-")) is not None


def find_unreadable_answers(answers: Collection[str]) -> list[str]:
    """Parse each answer in the sandbox, with its limits, and return the unreadable answers in their order."""
    return asyncio.run(_find_unreadable(answers))


async def _find_unreadable(answers: Collection[str]) -> list[str]:
    sandbox = LazySandbox(make_sandbox(SandboxConfig(backend="process"), run="data"))
    free = asyncio.Semaphore(_MAX_GRADINGS)

    async def is_unreadable(answer: str) -> bool:
        async with free:
            try:
                await sandbox.grade(AnswerSubmitted(0, _PROBE, answer))
            except SandboxFailure as failure:
                if "the ground truth" not in str(failure):
                    raise
                return True
            return False

    try:
        verdicts = await asyncio.gather(*map(is_unreadable, answers))
    finally:
        await sandbox.close()
    return [answer for answer, unreadable in zip(answers, verdicts, strict=True) if unreadable]
