"""The whole report of one folder of logs, as figures, as JSON, and as the curves of its picture.

use = utilization_of(Path("runs/demo/logs"))
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from analysis.utilization.curves import Floats, curve_of
from analysis.utilization.engines import EngineCurves, EngineUse, engine_use, engines_of
from analysis.utilization.executors import ExecutorCurves, ExecutorUse, executor_use, executors_of
from analysis.utilization.lines import Lines, read_lines
from analysis.utilization.phases import PHASES, phases, steps
from analysis.utilization.steps import StepUse, step_use
from analysis.utilization.trajectories import TrajectoryUse, ended_trajectories, trajectory_use

BINS = 400  # stretches of time in the timeline
_WITHOUT: Mapping[str, str] = {
    "engine.load": "nothing is known of engines' slots, caches, tokens and time",
    "ledger.reported": "nothing is known of leased KV tokens",
    "executor.load": "nothing is known of executors, unless no call was made",
    "trajectories.counted": "the causes of idle time are not known, nor how many waited when",
    "trajectory.ended": "nothing is known of trajectories' waits",
    "group.started": "trajectories are not told apart by their steps",
    "step.requested": "steps are not known",
}


class Timeline(msgspec.Struct, frozen=True):
    """Means over stretches of `bin_s` seconds. The first begins with the first weights, else with the logs' first line."""

    begin_s: float  # since the logs' first line
    bin_s: float
    engines: dict[str, dict[str, list[float]]]  # running, idle, leased, used, cached, recomputed and evicted a second
    executors: dict[str, dict[str, list[float]]]  # running, queued
    trajectories: dict[str, list[float]]  # leasing, generating, calling, grading


class Utilization(msgspec.Struct, frozen=True):
    began_at: str  # ISO 8601
    span_s: float
    engines: tuple[EngineUse, ...]
    executors: tuple[ExecutorUse, ...]
    trajectories: TrajectoryUse
    steps: tuple[StepUse, ...]
    lines: int
    unusable_lines: int
    doubts: tuple[str, ...]  # what is missing, torn, or does not add up
    timeline: Timeline


class _Curves(NamedTuple):
    engines: Mapping[str, EngineCurves]
    executors: Mapping[str, ExecutorCurves]


def utilization_of(logs: Path) -> Utilization:
    """Of the `*.jsonl` in a folder, a real run's or a simulated one's. Raises AnalysisError if there are none."""
    lines = read_lines(logs)
    each_step = steps(lines)
    ended = ended_trajectories(lines)
    engines = [engine_use(lines, engine, each_step) for engine in engines_of(lines)]
    executors = [executor_use(lines, executor) for executor in executors_of(lines)]
    trajectories = trajectory_use(lines, ended)
    curves = _Curves(
        {use.engine: curves for use, curves in engines}, {use.executor: curves for use, curves in executors}
    )
    return Utilization(
        began_at=lines.began_at.isoformat() if lines.began_at is not None else "",
        span_s=lines.end_s,
        engines=tuple(use for use, _ in engines),
        executors=tuple(use for use, _ in executors),
        trajectories=trajectories,
        steps=tuple(step_use(each_step, ended)),
        lines=lines.num_lines,
        unusable_lines=lines.num_unusable,
        doubts=tuple(_doubts(lines, [use for use, _ in engines], trajectories)),
        timeline=_timeline(lines, curves),
    )


def to_json(use: Utilization) -> bytes:
    return msgspec.json.format(msgspec.json.encode(use), indent=2) + b"\n"


# ---------------------------------------------------------------- what does not add up


def _doubts(lines: Lines, engines: Sequence[EngineUse], trajectories: TrajectoryUse) -> list[str]:
    doubts = [f"no line {event}: {effect}" for event, effect in _WITHOUT.items() if lines.frames[event].is_empty()]
    if lines.num_unusable:
        more = lines.num_unusable - len(lines.unusable)
        named = "; ".join(lines.unusable) + (f"; and {more:,} more" if more else "")
        doubts.append(f"{lines.num_unusable:,} of {lines.num_lines:,} lines could not be read: {named}")
    silent = [use.engine for use in engines if not (lines.frames["engine.load"]["engine"] == use.engine).any()]
    if silent and len(silent) < len(engines):
        doubts.append(f"no line engine.load of {', '.join(silent)}: it counts as idle")
    if trajectories.started is not None and trajectories.started != trajectories.ended:
        doubts.append(
            f"{trajectories.started:,} trajectories were started and {trajectories.ended:,} ended: "
            "the others were abandoned, or their lines are missing"
        )
    generated = sum(use.generated_tokens for use in engines)
    if generated and abs(generated - trajectories.generated_tokens) > 0.01 * generated:
        doubts.append(
            f"engines generated {generated:,} tokens, the trajectories that ended have {trajectories.generated_tokens:,}"
        )
    return doubts


# ---------------------------------------------------------------- over time


def _timeline(lines: Lines, curves: _Curves) -> Timeline:
    loaded = lines.frames["weights.loaded"]["t"]
    begin_s = float(loaded[0]) if loaded.len() else 0.0
    edges = np.linspace(begin_s, max(lines.end_s, begin_s + 1e-6), BINS + 1)
    counted = phases(lines)
    return Timeline(
        begin_s=begin_s,
        bin_s=float(edges[1] - edges[0]),
        engines={engine: _engine_bins(each, edges) for engine, each in curves.engines.items()},
        executors={
            executor: {"running": _rounded(each.running.means(edges)), "queued": _rounded(each.queued.means(edges))}
            for executor, each in curves.executors.items()
        },
        trajectories={phase: _rounded(curve_of(counted, phase).means(edges)) for phase in PHASES},
    )


def _engine_bins(curves: EngineCurves, edges: Floats) -> dict[str, list[float]]:
    bins = {
        "running": curves.running.means(edges),
        "idle": curves.idle_means(edges),
        "used": curves.used.means(edges),
        "cached": curves.cached.means(edges),
        "recomputed": curves.recomputed.means(edges),
        "evicted": curves.evicted.means(edges),
    }
    if curves.leased is not None:
        bins["leased"] = curves.leased.means(edges)
    return {name: _rounded(values) for name, values in bins.items()}


def _rounded(values: Floats) -> list[float]:
    return [round(value, 3) for value in values.tolist()]
