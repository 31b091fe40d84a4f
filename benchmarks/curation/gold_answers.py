"""Grade variants of the gold answers of data sets. Prints a JSON line last.

    python -m benchmarks.curation.gold_answers FILE...

The sandbox grades three notations of each answer, which must be accepted, and five other answers, which must be rejected.
The command prints all exceptions.
"""

import argparse
import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from asterism.bus.messages import AnswerSubmitted
from asterism.configs.schema.machines import SandboxConfig
from asterism.engine.data.datasets import read_problems
from asterism.sandbox.contract import Sandbox, SandboxFailure
from asterism.sandbox.select_backend import make_sandbox

_CONCURRENT_GRADINGS = 4
_RELATION = re.compile(r"[=,<>]|\\(?:text|le|ge)")


class Submission(NamedTuple):
    truth: str
    answer: str
    is_equal: bool


def write_variants(answer: str) -> Iterator[str]:
    """Yield the same answer in other LaTeX notations."""
    yield f"${answer}$"
    yield f"\\displaystyle {answer}"
    if re.fullmatch(r"\d{4,}", answer):
        yield f"{int(answer):,}".replace(",", "{,}")
    elif re.fullmatch(r"-?\d+", answer):
        yield f"{answer}.0"
    elif "\\frac" in answer:
        yield answer.replace("\\frac", "\\dfrac")
    elif re.search(r"[a-zA-Z]", answer) and not _RELATION.search(answer):
        yield f"\\left({answer}\\right)"
    else:
        yield f" {answer} ."


def perturb(answer: str) -> Iterator[str]:
    """Yield different answers."""
    if re.fullmatch(r"-?\d+", answer):
        number = int(answer)
        yield from map(str, (number + 1, number - 1, -number or 3, 10 * number + 7, number + 100))
        return
    yield f"{answer}+1"
    yield answer[1:] if answer.startswith("-") else f"-({answer})"
    yield f"2({answer})"
    digits = list(re.finditer(r"\d", answer))
    if not digits:
        yield from (f"{answer}^2+3", "7")
        return
    for place, change in ((digits[0].start(), 1), (digits[-1].start(), 2)):
        yield f"{answer[:place]}{(int(answer[place]) + change) % 10}{answer[place + 1 :]}"


def list_submissions(path: Path) -> Iterator[Submission]:
    for problem in read_problems(path):
        truth = problem.ground_truth
        yield from (Submission(truth, answer, True) for answer in write_variants(truth))
        yield from (Submission(truth, answer, False) for answer in perturb(truth))


async def find_exceptions(sandbox: Sandbox, submissions: list[Submission]) -> list[Submission]:
    """Return the submissions that are graded wrongly or cannot be graded."""
    free = asyncio.Semaphore(_CONCURRENT_GRADINGS)

    async def is_right(each: Submission) -> bool:
        async with free:
            try:
                grade = await sandbox.grade(AnswerSubmitted(0, each.answer, each.truth))
            except SandboxFailure:
                return False
            return grade.correct == each.is_equal

    verdicts = await asyncio.gather(*map(is_right, submissions))
    return [each for each, is_right in zip(submissions, verdicts, strict=True) if not is_right]


async def measure(files: list[Path]) -> dict[str, dict[str, float]]:
    sandbox = make_sandbox(SandboxConfig(backend="process"), run="gold")
    figures: dict[str, dict[str, float]] = {}
    try:
        await sandbox.start()
        for file in files:
            submissions = list(list_submissions(file))
            exceptions = await find_exceptions(sandbox, submissions)
            for each in exceptions:
                print(f"{file.name}: {each.answer!r} for {each.truth!r}: {'rejected' if each.is_equal else 'accepted'}")
            num_equal = sum(each.is_equal for each in submissions)
            num_rejected = sum(each.is_equal for each in exceptions)
            num_accepted = len(exceptions) - num_rejected
            figures[file.name] = {
                "variants": num_equal,
                "accepted_share": round(1 - num_rejected / num_equal, 4),
                "perturbations": len(submissions) - num_equal,
                "rejected_share": round(1 - num_accepted / (len(submissions) - num_equal), 4),
            }
    finally:
        await sandbox.close()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", metavar="FILE", nargs="+", type=Path)
    print(json.dumps(asyncio.run(measure(parser.parse_args().files))))


if __name__ == "__main__":
    main()
