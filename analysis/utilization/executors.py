"""How busy each executor's sandbox was. Its lives, each with counters of its own, are added up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import polars as pl

from analysis.utilization.curves import Curve, curve_of, grown
from analysis.utilization.lines import Lines


class ExecutorUse(msgspec.Struct, frozen=True):
    """Means are over `span_s`, from the first line of the logs to the last."""

    executor: str  # the process
    lives: int
    slots: int
    span_s: float
    busy_s: float  # while at least one call ran
    calls: int  # ended
    running_mean: float
    running_peak: float  # as sampled
    queued_mean: float
    queued_peak: float  # as sampled
    queued_s_per_call: float


class ExecutorCurves(NamedTuple):
    running: Curve
    queued: Curve


def executors_of(lines: Lines) -> Sequence[str]:
    names = lines.frames["executor.load"]["process"].unique().to_list()
    return sorted(names, key=lambda name: (len(name), name))


def executor_use(lines: Lines, executor: str) -> tuple[ExecutorUse, ExecutorCurves]:
    load = lines.frames["executor.load"].filter(pl.col("process") == executor)
    counters = ("done", "busy_s", "running_s", "queued_s")
    load = load.with_columns(grown(counter).over("executor").alias(f"grown_{counter}") for counter in counters)
    total: Mapping[str, float] = {counter: float(load[f"grown_{counter}"].sum()) for counter in counters}
    span_s = max(lines.end_s, 1e-9)
    use = ExecutorUse(
        executor=executor,
        lives=load["executor"].n_unique(),
        slots=int(load["slots"][-1]),
        span_s=lines.end_s,
        busy_s=total["busy_s"],
        calls=int(total["done"]),
        running_mean=total["running_s"] / span_s,
        running_peak=float(np.max(load["running"].to_numpy())),
        queued_mean=total["queued_s"] / span_s,
        queued_peak=float(np.max(load["queued"].to_numpy())),
        queued_s_per_call=total["queued_s"] / max(total["done"], 1.0),
    )
    return use, ExecutorCurves(_rate(load, "running_s"), _rate(load, "queued_s"))


def _rate(load: pl.DataFrame, counter: str) -> Curve:
    """Calls on the mean between two lines. A line is written a second after work has begun: before that there was none."""
    span = pl.min_horizontal(pl.col("t") - pl.col("t").shift(1).fill_null(-1.0), 1.5).clip(lower_bound=1e-6)
    return _steps(load.with_columns(span=span, rate=pl.col(f"grown_{counter}") / span))


def _steps(load: pl.DataFrame) -> Curve:
    begins = load.select(t=pl.col("t") - pl.col("span"), order=pl.lit(1), rate="rate")
    ends = load.select("t", order=pl.lit(0), rate=pl.lit(0.0))
    return curve_of(pl.concat([begins, ends]).sort("t", "order"), "rate")
