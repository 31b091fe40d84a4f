"""Fit an engine's step costs to its load reports, by least absolute errors."""

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from asterism.analysis.simulation.cluster_model import StepCostModel
from asterism.bus.messages import EngineLoadReported

_IRLS_ROUNDS = 20  # rounds of iteratively reweighted least squares


class LoadInterval(NamedTuple):
    """An engine's work between two load reports."""

    seconds: float  # busy time
    decode_steps: int
    generated_tokens: int  # one for each running sequence and step
    kv_tokens: float  # mean over the running sequences' tokens
    prefilled_tokens: int


def build_load_intervals(reports: Iterable[EngineLoadReported]) -> list[LoadInterval]:
    """Build one interval for each two successive reports of an engine with work between them.

    The reports of several engines may be mixed. A counter that falls marks a restart.
    """
    by_engine: dict[str, list[EngineLoadReported]] = {}
    for report in reports:
        by_engine.setdefault(report.engine, []).append(report)
    pairs = [pair for each in by_engine.values() for pair in pairwise(each)]
    return [
        _build_interval(before, after)
        for before, after in pairs
        if after.decode_steps > before.decode_steps and after.busy_s > before.busy_s
    ]


def _build_interval(before: EngineLoadReported, after: EngineLoadReported) -> LoadInterval:
    running_tokens = [each.used_tokens - each.cached_tokens for each in (before, after)]
    return LoadInterval(
        seconds=after.busy_s - before.busy_s,
        decode_steps=after.decode_steps - before.decode_steps,
        generated_tokens=after.generated_tokens - before.generated_tokens,
        kv_tokens=sum(running_tokens) / 2,
        prefilled_tokens=after.prefilled_tokens - before.prefilled_tokens,
    )


def fit_costs(rows: Sequence[LoadInterval]) -> StepCostModel:
    """Fit the non-negative costs of a step, and of each sequence, cached token and prefilled token in it.

    An interval in which other processes used the machine affects the level of the costs, but not their
    proportions. Raises ValueError if the rows are too few or contain no work.
    """
    if len(rows) < len(LoadInterval._fields):
        raise ValueError(f"{len(rows)} intervals of work are too few to fit an engine's costs")
    seconds = np.array([row.seconds for row in rows])
    return scale_costs(_build_costs(_fit_least_absolute_errors(_build_design_matrix(rows), seconds)), rows)


def scale_costs(cost: StepCostModel, rows: Sequence[LoadInterval]) -> StepCostModel:
    """Scale the costs by one factor so that they predict the total time of these rows.

    The speed of a machine drifts: the proportions come from a whole run, the level from these rows.
    """
    parts = np.array([cost.fixed_s, cost.sequence_s, cost.kv_token_s, cost.prefill_token_s])
    predicted_s = float((_build_design_matrix(rows) @ parts).sum()) if rows else 0.0
    factor = sum(row.seconds for row in rows) / predicted_s if predicted_s > 0 else 1.0
    return _build_costs(list(parts * factor))


def _build_design_matrix(rows: Sequence[LoadInterval]) -> np.ndarray:
    """Return the factors of the four costs, float64 [rows, 4]."""
    return np.array(
        [
            [row.decode_steps, row.generated_tokens, row.decode_steps * row.kv_tokens, row.prefilled_tokens]
            for row in rows
        ],
        dtype=float,
    )


def _build_costs(parts: Sequence[float]) -> StepCostModel:
    fixed_s, sequence_s, kv_token_s, prefill_token_s = map(float, parts)
    return StepCostModel(fixed_s, sequence_s=sequence_s, kv_token_s=kv_token_s, prefill_token_s=prefill_token_s)


def _fit_least_absolute_errors(work: np.ndarray, seconds: np.ndarray) -> list[float]:
    found = _fit_non_negative_least_squares(work, seconds)
    for _ in range(_IRLS_ROUNDS):
        errors = np.abs(work @ found - seconds)
        weights = 1 / np.sqrt(np.maximum(errors, 1e-3 * float(seconds.mean())))
        found = _fit_non_negative_least_squares(work * weights[:, None], seconds * weights)
    return found


def _fit_non_negative_least_squares(work: np.ndarray, seconds: np.ndarray) -> list[float]:
    """Return the coefficients of the columns; the most negative one is set to 0 until all are non-negative."""
    scale = np.abs(work).max(axis=0)
    columns = [column for column in range(work.shape[1]) if scale[column] > 0]
    while columns:
        solution = np.linalg.lstsq(work[:, columns] / scale[columns], seconds, rcond=None)[0]
        if solution.min() >= 0:
            found = dict(zip(columns, solution / scale[columns], strict=True))
            return [float(found.get(column, 0.0)) for column in range(work.shape[1])]
        columns.pop(int(solution.argmin()))
    raise ValueError("the load reports contain no work that takes time")
