"""How busy each executor's sandbox was, summed over its incarnations."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import polars as pl

from analysis.utilization.log_schema import LogTables
from analysis.utilization.step_functions import StepFunction, build_increase_expr, build_step_function


class ExecutorUtilization(msgspec.Struct, frozen=True):
    """Means are over `span_s`, from the first line of the logs to the last."""

    executor: str  # the process
    incarnations: int
    slots: int
    span_s: float
    busy_s: float  # while at least one call ran
    calls: int  # ended
    running_mean: float
    running_peak: float  # as sampled
    queued_mean: float
    queued_peak: float  # as sampled
    queued_s_per_call: float


class ExecutorTimeSeries(NamedTuple):
    running: StepFunction
    queued: StepFunction


def list_executors(lines: LogTables) -> Sequence[str]:
    names = lines.frames["executor.load"]["process"].unique().to_list()
    return sorted(names, key=lambda name: (len(name), name))


def summarize_executor(lines: LogTables, executor: str) -> tuple[ExecutorUtilization, ExecutorTimeSeries]:
    load = lines.frames["executor.load"].filter(pl.col("process") == executor)
    counters = ("done", "busy_s", "running_s", "queued_s")
    load = load.with_columns(
        build_increase_expr(counter).over("executor").alias(f"grown_{counter}") for counter in counters
    )
    total: Mapping[str, float] = {counter: float(load[f"grown_{counter}"].sum()) for counter in counters}
    span_s = max(lines.end_s, 1e-9)
    use = ExecutorUtilization(
        executor=executor,
        incarnations=load["executor"].n_unique(),
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
    return use, ExecutorTimeSeries(_build_rate(load, "running_s"), _build_rate(load, "queued_s"))


def _build_rate(load: pl.DataFrame, counter: str) -> StepFunction:
    """Mean calls between two lines; the first line of a busy period is a second after its start."""
    span = pl.min_horizontal(pl.col("t") - pl.col("t").shift(1).fill_null(-1.0), 1.5).clip(lower_bound=1e-6)
    load = load.with_columns(span=span, rate=pl.col(f"grown_{counter}") / span)
    begins = load.select(t=pl.col("t") - pl.col("span"), order=pl.lit(1), rate="rate")
    ends = load.select("t", order=pl.lit(0), rate=pl.lit(0.0))
    return build_step_function(pl.concat([begins, ends]).sort("t", "order"), "rate")
