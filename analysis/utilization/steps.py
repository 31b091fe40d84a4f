"""Each step's parts, and who finished it last and why."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec
import polars as pl

from analysis.utilization.trajectories import WAITS, Lived, lived

MOST = 0.9  # of a step's trajectories: what comes after they have ended is its tail


class StepUse(msgspec.Struct, frozen=True):
    name: str  # "step 3", "evaluation start_greedy"
    begin_s: float  # since the logs' first line
    step_s: float | None  # null where it never ended
    rollout_s: float | None  # null for an evaluation
    train_s: float | None
    weights_s: float | None
    trajectories: int  # ended
    aborted: int  # of them: the step ended without them, and waited for none of them
    tail_s: float  # from when nine tenths of the others had ended until the last one had
    last: Lived | None  # of the others
    last_began_s: float | None  # after the step's beginning: it stood in for another one, or waited in the buffer
    why: str  # what took the last one's time, the longest first


def step_use(each_step: pl.DataFrame, ended: pl.DataFrame) -> Sequence[StepUse]:
    """`each_step` as analysis.utilization.phases.steps has it; a trajectory counts for the last step of its name that was
    asked for before it ended."""
    borders = each_step.select(t="requested", step="name", requested="requested")
    placed = ended.join_asof(borders, on="t", by="step", strategy="backward", check_sortedness=False)
    by_step = placed.filter(pl.col("requested").is_not_null()).partition_by(["step", "requested"], as_dict=True)
    empty = placed.clear()
    return [_use(row, by_step.get((row["name"], row["requested"]), empty)) for row in each_step.iter_rows(named=True)]


def _use(row: dict[str, float | None], trajectories: pl.DataFrame) -> StepUse:
    begin_s, end_s = row["requested"], row["ended"]
    assert begin_s is not None
    ended = trajectories.height
    trajectories = trajectories.filter(pl.col("ending") != "aborted")
    last = trajectories.tail(1)
    who = lived(last)[0] if last.height else None
    end = float(last["t"][0]) if last.height else 0.0
    most = float(trajectories["t"][math.ceil(MOST * trajectories.height) - 1]) if last.height else 0.0
    began_s = max(0.0, end - who.lived_s - begin_s) if who is not None else None
    return StepUse(
        name=str(row["name"]),
        begin_s=begin_s,
        step_s=None if end_s is None else end_s - begin_s,
        rollout_s=row["rollout_s"],
        train_s=row["train_s"],
        weights_s=row["weights_s"],
        trajectories=ended,
        aborted=ended - trajectories.height,
        tail_s=end - most,
        last=who,
        last_began_s=began_s,
        why="" if who is None or began_s is None else why_last(who, began_s),
    )


def why_last(who: Lived, began_s: float) -> str:
    """What took more than a tenth of the time from the step's beginning to its end, the longest first."""
    parts = {f"began {began_s:.2f} s after the step": began_s}
    for name, what in WAITS.items():
        seconds: float = getattr(who, name)
        parts[_told(who, what, seconds)] = seconds
    whole = began_s + who.lived_s
    main = [(seconds, text) for text, seconds in parts.items() if seconds > whole / 10]
    return ", ".join(text for _, text in sorted(main, reverse=True)) or "it took no time"


def _told(who: Lived, what: str, seconds: float) -> str:
    match what:
        case "generation":
            return f"generated {who.generated_tokens:,} tokens in {_times(who.turns, 'turn')} for {seconds:.2f} s"
        case "tools":
            return f"{_times(who.calls, 'call')} took {seconds:.2f} s"
        case _:
            return f"waited {seconds:.2f} s for {what}"


def _times(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
