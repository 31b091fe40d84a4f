"""An engine's costs from what it measured: least squares over its load reports."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from analysis.simulation.model import Cost
from bus.messages import EngineLoadReported


class LoadRow(NamedTuple):
    """A stretch of an engine's work."""

    seconds: float  # that it was busy
    decode_steps: int
    running: float  # sequences that decode, in the mean
    kv_tokens: float  # of theirs, in the mean
    prefilled_tokens: int


def rows_of(reports: Iterable[EngineLoadReported]) -> list[LoadRow]:
    """One for each two reports in a row between which an engine has worked. Several engines' may be mixed."""
    by_engine: dict[str, list[EngineLoadReported]] = {}
    for report in reports:
        by_engine.setdefault(report.engine, []).append(report)
    pairs = [pair for each in by_engine.values() for pair in pairwise(each)]
    return [_row(before, after) for before, after in pairs if after.decode_steps > before.decode_steps]


def _row(before: EngineLoadReported, after: EngineLoadReported) -> LoadRow:
    running_tokens = [each.used_tokens - each.cached_tokens for each in (before, after)]
    return LoadRow(
        seconds=after.busy_s - before.busy_s,
        decode_steps=after.decode_steps - before.decode_steps,
        running=(before.running + after.running) / 2,
        kv_tokens=sum(running_tokens) / 2,
        prefilled_tokens=after.prefilled_tokens - before.prefilled_tokens,
    )


def calibrated(rows: Sequence[LoadRow]) -> Cost:
    """The cost of a step, and what each sequence, cached token and prefilled token adds to it; none below 0.

    Raises ValueError where the rows are too few, or say nothing of a step.
    """
    if len(rows) < len(LoadRow._fields):
        raise ValueError(f"{len(rows)} stretches of work are too few to tell an engine's costs from")
    work = np.array(
        [
            [row.decode_steps, row.decode_steps * row.running, row.decode_steps * row.kv_tokens, row.prefilled_tokens]
            for row in rows
        ]
    )
    seconds = np.array([row.seconds for row in rows])
    fixed_s, sequence_s, kv_token_s, prefill_token_s = _least_squares(work, seconds)
    return Cost(fixed_s=fixed_s, sequence_s=sequence_s, kv_token_s=kv_token_s, prefill_token_s=prefill_token_s)


def _least_squares(work: np.ndarray, seconds: np.ndarray) -> list[float]:
    """Coefficients of the columns, those that would be negative at 0: the most negative one is left out, and so on."""
    scale = np.abs(work).max(axis=0)
    kept = [column for column in range(work.shape[1]) if scale[column] > 0]
    while kept:
        solution = np.linalg.lstsq(work[:, kept] / scale[kept], seconds, rcond=None)[0]
        if solution.min() >= 0:
            found = dict(zip(kept, solution / scale[kept], strict=True))
            return [float(found.get(column, 0.0)) for column in range(work.shape[1])]
        kept.pop(int(solution.argmin()))
    raise ValueError("the engine's reports show no work that takes time")
