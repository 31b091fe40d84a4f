"""Computes the parts of each step, and explains the duration of its last trajectory."""

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import polars as pl

from asterism.analysis.utilization.trajectory_time import WAITS, TrajectorySummary, build_trajectory_summaries

TAIL_STARTS_AFTER = 0.9  # share of a step's trajectories that end before its tail


class StepUtilization(msgspec.Struct, frozen=True):
    name: str  # "step 3", "evaluation start_greedy"
    repeats: int  # earlier launches that requested the step too; their trajectories are not included
    begin_s: float  # seconds since the logs' first line
    step_s: float | None  # null if the step never ended
    rollout_s: float | None  # null for an evaluation
    train_s: float | None
    weights_s: float | None
    trajectories: int  # number of ended trajectories
    aborted: int  # ended trajectories for which the step did not wait
    tail_s: float  # seconds from the end of nine tenths of the other trajectories to the last end
    last: TrajectorySummary | None  # last trajectory that was not aborted
    # Start of this trajectory after the step's; positive for a replacement, or after a wait in the buffer.
    last_began_s: float | None
    why: str  # parts of the last trajectory's time, the longest first


def summarize_steps(each_step: pl.DataFrame, ended: pl.DataFrame) -> Sequence[StepUtilization]:
    """Summarize each step. A trajectory belongs to the last step (of build_steps) requested before its end.

    If a resumed run repeats a step, the last repetition counts.
    """
    borders = each_step.select(t="requested", step="name", requested="requested")
    placed = ended.join_asof(borders, on="t", by="step", strategy="backward", check_sortedness=False)
    by_step = placed.filter(pl.col("requested").is_not_null()).partition_by(["step", "requested"], as_dict=True)
    empty = placed.clear()
    last_requests = each_step.with_columns(repeats=pl.len().over("name") - 1).unique(
        "name", keep="last", maintain_order=True
    )
    return [
        _summarize_step(row, by_step.get((row["name"], row["requested"]), empty))
        for row in last_requests.iter_rows(named=True)
    ]


def _summarize_step(row: dict[str, Any], trajectories: pl.DataFrame) -> StepUtilization:
    begin_s, end_s = row["requested"], row["ended"]
    assert begin_s is not None
    ended = trajectories.height
    trajectories = trajectories.filter(pl.col("ending") != "aborted")
    last = trajectories.tail(1)
    last_summary = build_trajectory_summaries(last)[0] if last.height else None
    end = float(last["t"][0]) if last.height else 0.0
    most = float(trajectories["t"][math.ceil(TAIL_STARTS_AFTER * trajectories.height) - 1]) if last.height else 0.0
    began_s = max(0.0, end - last_summary.lived_s - begin_s) if last_summary is not None else None
    return StepUtilization(
        name=row["name"],
        repeats=row["repeats"],
        begin_s=begin_s,
        step_s=None if end_s is None else end_s - begin_s,
        rollout_s=row["rollout_s"],
        train_s=row["train_s"],
        weights_s=row["weights_s"],
        trajectories=ended,
        aborted=ended - trajectories.height,
        tail_s=end - most,
        last=last_summary,
        last_began_s=began_s,
        why="" if last_summary is None or began_s is None else explain_last(last_summary, began_s),
    )


def explain_last(last: TrajectorySummary, began_s: float) -> str:
    """List the parts longer than a tenth of the time since the start of the step, the longest first."""
    parts = {f"started {began_s:.2f} s after the step": began_s}
    for name, what in WAITS.items():
        seconds: float = getattr(last, name)
        parts[_describe_wait(last, what, seconds)] = seconds
    whole = began_s + last.lived_s
    main = [(seconds, text) for text, seconds in parts.items() if seconds > whole / 10]
    return ", ".join(text for _, text in sorted(main, reverse=True)) or "no time"


def _describe_wait(last: TrajectorySummary, what: str, seconds: float) -> str:
    match what:
        case "generation":
            return f"spent {seconds:.2f} s generating {last.generated_tokens:,} tokens in {format_count(last.turns, 'turn')}"
        case "tools":
            return f"{format_count(last.calls, 'call')} took {seconds:.2f} s"
        case _:
            return f"waited {seconds:.2f} s for {what}"


def format_count(count: int, what: str) -> str:
    """Format a count; `what` is in the singular."""
    plural = what.removesuffix("y") + "ies" if what.endswith("y") else what + "s"
    return f"{count:,} {what if count == 1 else plural}"
