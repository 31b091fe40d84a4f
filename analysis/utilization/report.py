"""Computes the utilization report of one folder of logs: totals, JSON, and time series."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np

from asterism.analysis.utilization.engine_time import (
    EngineTimeSeries,
    EngineUtilization,
    list_engines,
    summarize_engine,
)
from asterism.analysis.utilization.executor_time import (
    ExecutorTimeSeries,
    ExecutorUtilization,
    list_executors,
    summarize_executor,
)
from asterism.analysis.utilization.log_schema import LogTables, read_log_tables
from asterism.analysis.utilization.phases import build_phase_counts, build_steps
from asterism.analysis.utilization.step_functions import Floats, StepFunction, build_step_function
from asterism.analysis.utilization.step_time import StepUtilization, summarize_steps
from asterism.analysis.utilization.trajectory_time import (
    TrajectoryUtilization,
    build_ended_table,
    summarize_trajectories,
)
from asterism.policies.rollout.trajectory import PHASES

NUM_BINS = 400  # intervals of the timeline
_EFFECTS_OF_MISSING_LINES: Mapping[str, str] = {
    "engine.load": "slots, caches, tokens and time of the engines are unknown",
    "ledger.reported": "leased KV tokens are unknown",
    "executor.load": "the executors' load is unknown, unless there were no calls",
    "trajectories.counted": "causes of idle time and waiting trajectories are unknown",
    "trajectory.ended": "waits of trajectories are unknown",
    "group.started": "the steps of trajectories are unknown",
    "step.requested": "steps are unknown",
}


class Timeline(msgspec.Struct, frozen=True):
    """Means over intervals of `bin_s` seconds, from the first weights or the logs' first line on."""

    begin_s: float  # seconds since the logs' first line
    bin_s: float
    # means of running, idle, leased, used, cached; recomputed and evicted tokens per second
    engines: dict[str, dict[str, list[float]]]
    executors: dict[str, dict[str, list[float]]]  # means of running and queued calls
    trajectories: dict[str, list[float]]  # means by phase: leasing, generating, calling, grading


class Utilization(msgspec.Struct, frozen=True):
    """The report of one run. Seconds do not include the pauses between its launches."""

    began_at: str  # ISO 8601
    span_s: float  # seconds from the logs' first line to the last
    paused_s: float
    engines: tuple[EngineUtilization, ...]
    executors: tuple[ExecutorUtilization, ...]
    trajectories: TrajectoryUtilization
    steps: tuple[StepUtilization, ...]
    lines: int
    unusable_lines: int
    doubts: tuple[str, ...]  # missing, truncated or inconsistent log data
    timeline: Timeline


def compute_utilization(logs: Path) -> Utilization:
    """Compute the report of `logs`, the folder of a real or simulated run. Raises AnalysisError without `*.jsonl`."""
    lines = read_log_tables(logs)
    each_step = build_steps(lines)
    ended = build_ended_table(lines)
    engines = [summarize_engine(lines, engine, each_step) for engine in list_engines(lines)]
    executors = [summarize_executor(lines, executor) for executor in list_executors(lines)]
    trajectories = summarize_trajectories(lines, ended)
    engine_curves = {use.engine: curves for use, curves in engines}
    executor_curves = {use.executor: curves for use, curves in executors}
    return Utilization(
        began_at=lines.began_at.isoformat() if lines.began_at is not None else "",
        span_s=lines.end_s,
        paused_s=lines.paused_s,
        engines=tuple(use for use, _ in engines),
        executors=tuple(use for use, _ in executors),
        trajectories=trajectories,
        steps=tuple(summarize_steps(each_step, ended)),
        lines=lines.num_lines,
        unusable_lines=lines.num_unusable,
        doubts=tuple(_find_doubts(lines, [use for use, _ in engines], trajectories)),
        timeline=_build_timeline(lines, engine_curves, executor_curves),
    )


def to_json(use: Utilization) -> bytes:
    return msgspec.json.format(msgspec.json.encode(use), indent=2) + b"\n"


# ---------------------------------------------------------------- doubts


def _find_doubts(
    lines: LogTables, engines: Sequence[EngineUtilization], trajectories: TrajectoryUtilization
) -> list[str]:
    doubts = [
        f"no line {event}: {effect}"
        for event, effect in _EFFECTS_OF_MISSING_LINES.items()
        if lines.frames[event].is_empty()
    ]
    if lines.num_unusable:
        more = lines.num_unusable - len(lines.unusable)
        named = "; ".join(lines.unusable) + (f"; and {more:,} more" if more else "")
        doubts.append(f"{lines.num_unusable:,} of {lines.num_lines:,} lines could not be read: {named}")
    without_load = [use.engine for use in engines if not (lines.frames["engine.load"]["engine"] == use.engine).any()]
    if without_load and len(without_load) < len(engines):
        doubts.append(f"no line engine.load of {', '.join(without_load)}: counted as idle")
    if trajectories.started is not None and trajectories.started != trajectories.ended:
        doubts.append(
            f"{trajectories.started:,} trajectories were started and {trajectories.ended:,} ended: "
            "the others were abandoned, or their lines are missing"
        )
    probed = int(lines.frames["weights.loaded"]["probe_tokens"].sum())
    generated = sum(use.generated_tokens for use in engines) - probed
    if generated and abs(generated - trajectories.generated_tokens) > 0.01 * generated:
        doubts.append(
            f"the engines generated {generated:,} tokens, but ended trajectories have {trajectories.generated_tokens:,}"
        )
    return doubts


# ---------------------------------------------------------------- timeline


def _build_timeline(
    lines: LogTables, engines: Mapping[str, EngineTimeSeries], executors: Mapping[str, ExecutorTimeSeries]
) -> Timeline:
    begin_s = lines.find_first_weights_s()
    edges = np.linspace(begin_s, max(lines.end_s, begin_s + 1e-6), NUM_BINS + 1)
    counted = build_phase_counts(lines)
    return Timeline(
        begin_s=begin_s,
        bin_s=float(edges[1] - edges[0]),
        engines={name: _build_engine_bins(each, edges) for name, each in engines.items()},
        executors={name: _build_bins(each._asdict(), edges) for name, each in executors.items()},
        trajectories=_build_bins({phase: build_step_function(counted, phase) for phase in PHASES}, edges),
    )


def _build_engine_bins(curves: EngineTimeSeries, edges: Floats) -> dict[str, list[float]]:
    step_functions = {name: curve for name, curve in curves._asdict().items() if isinstance(curve, StepFunction)}
    return {**_build_bins(step_functions, edges), "idle": _round_values(curves.compute_idle_shares(edges))}


def _build_bins(curves: Mapping[str, StepFunction], edges: Floats) -> dict[str, list[float]]:
    return {name: _round_values(curve.compute_means(edges)) for name, curve in curves.items()}


def _round_values(values: Floats) -> list[float]:
    return [round(value, 3) for value in values.tolist()]
