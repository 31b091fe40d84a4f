"""An engine's costs from what it measured: least absolute errors over its load reports."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from analysis.simulation.model import Cost
from bus.messages import EngineLoadReported

_ROUNDS = 20  # of weighted least squares, each nearer to the least absolute errors


class LoadRow(NamedTuple):
    """A stretch of an engine's work."""

    seconds: float  # that it was busy
    decode_steps: int
    generated_tokens: int  # one for each running sequence in each step
    kv_tokens: float  # of the running ones, in the mean
    prefilled_tokens: int


def rows_of(reports: Iterable[EngineLoadReported]) -> list[LoadRow]:
    """One for each two reports in a row between which an engine has worked. Several engines' may be mixed; where one's
    counters fall it has begun anew."""
    by_engine: dict[str, list[EngineLoadReported]] = {}
    for report in reports:
        by_engine.setdefault(report.engine, []).append(report)
    pairs = [pair for each in by_engine.values() for pair in pairwise(each)]
    return [
        _row(before, after)
        for before, after in pairs
        if after.decode_steps > before.decode_steps and after.busy_s > before.busy_s
    ]


def _row(before: EngineLoadReported, after: EngineLoadReported) -> LoadRow:
    running_tokens = [each.used_tokens - each.cached_tokens for each in (before, after)]
    return LoadRow(
        seconds=after.busy_s - before.busy_s,
        decode_steps=after.decode_steps - before.decode_steps,
        generated_tokens=after.generated_tokens - before.generated_tokens,
        kv_tokens=sum(running_tokens) / 2,
        prefilled_tokens=after.prefilled_tokens - before.prefilled_tokens,
    )


def calibrated(rows: Sequence[LoadRow]) -> Cost:
    """The cost of a step, and what each sequence, cached token and prefilled token adds to it; none below 0.

    A stretch in which something else took the machine says nothing of their proportions, but counts in their height.
    Raises ValueError where the rows are too few, or say nothing of a step.
    """
    if len(rows) < len(LoadRow._fields):
        raise ValueError(f"{len(rows)} stretches of work are too few to tell an engine's costs from")
    seconds = np.array([row.seconds for row in rows])
    return scaled_to(_cost(_least_errors(_work(rows), seconds)), rows)


def scaled_to(cost: Cost, rows: Sequence[LoadRow]) -> Cost:
    """The same costs, all by the factor with which they take these rows' time together. A machine's speed drifts: what is
    told from a whole run is right in its proportions, and in its height at the time in question."""
    parts = np.array([cost.fixed_s, cost.sequence_s, cost.kv_token_s, cost.prefill_token_s])
    told = float((_work(rows) @ parts).sum()) if rows else 0.0
    factor = sum(row.seconds for row in rows) / told if told > 0 else 1.0
    return _cost(list(parts * factor))


def _work(rows: Sequence[LoadRow]) -> np.ndarray:
    """What each of the four costs is to be multiplied by; float64 [rows, 4]."""
    return np.array(
        [
            [row.decode_steps, row.generated_tokens, row.decode_steps * row.kv_tokens, row.prefilled_tokens]
            for row in rows
        ],
        dtype=float,
    )


def _cost(parts: Sequence[float]) -> Cost:
    fixed_s, sequence_s, kv_token_s, prefill_token_s = map(float, parts)
    return Cost(fixed_s, sequence_s=sequence_s, kv_token_s=kv_token_s, prefill_token_s=prefill_token_s)


def _least_errors(work: np.ndarray, seconds: np.ndarray) -> list[float]:
    found = _least_squares(work, seconds)
    for _ in range(_ROUNDS):
        errors = np.abs(work @ found - seconds)
        weights = 1 / np.sqrt(np.maximum(errors, 1e-3 * float(seconds.mean())))
        found = _least_squares(work * weights[:, None], seconds * weights)
    return found


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
