"""Scores scripted answers on every row of a task without instances: the row's ground truth, and a wrong answer."""

import asyncio
import time
from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

from asterism.engine.data.datasets import DatasetProblem
from asterism.tasks.checking.play import Play, play_script
from asterism.tasks.checking.turn_scripts import generate_answer
from asterism.tasks.solo_driver import SoloTask

MAX_ROWS = 10_000
BUDGET_S = 60.0  # time for scoring; the check counts the rows that are not scored
_MAX_PLAYS = 16  # concurrent plays
_BLOCK_ROWS = 64


class RowScores(NamedTuple):
    num_rows: int  # usable rows of the file
    num_scored: int
    without_answer: tuple[str, ...]  # names of rows
    right: Sequence[Play]  # plays with the row's ground truth as the answer, or a wrong answer if there is none
    wrong: Sequence[Play]  # plays with a wrong answer, of rows with a ground truth


async def score_rows(task: SoloTask, rows: Sequence[DatasetProblem]) -> RowScores:
    """Play one turn per row, without tool calls."""
    began_s, numbers, free = time.monotonic(), count(1 << 32), asyncio.Semaphore(_MAX_PLAYS)

    async def play(row: DatasetProblem, *, has_truth: bool) -> Play:
        async with free:
            script = generate_answer(task.rules.dialogue, row, has_truth=has_truth)
            return await play_script(task, row, script, next(numbers))

    right: list[Play] = []
    wrong: list[Play] = []
    scored = 0
    for start in range(0, min(len(rows), MAX_ROWS), _BLOCK_ROWS):
        block = rows[start : start + _BLOCK_ROWS]
        right += await asyncio.gather(*(play(row, has_truth=bool(row.ground_truth)) for row in block))
        wrong += await asyncio.gather(*(play(row, has_truth=False) for row in block if row.ground_truth))
        scored += len(block)
        if time.monotonic() - began_s > BUDGET_S:
            break
    without = tuple(row.name for row in rows[:scored] if not row.ground_truth)
    return RowScores(len(rows), scored, without, right, wrong)
