"""Measures the load of each executor's sandbox, summed over its incarnations."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import polars as pl

from asterism.analysis.utilization.log_schema import LogTables
from asterism.analysis.utilization.step_functions import StepFunction, build_increase_expr, build_step_function


class ExecutorUtilization(msgspec.Struct, frozen=True):
    """Use of an executor. Means are over `span_s`: from the first weights of an engine to the end of the logs."""

    executor: str  # name of the process
    incarnations: int
    slots: int  # fork servers; each runs many calls at once
    span_s: float
    busy_s: float  # seconds with at least one call in a fork server
    calls: int  # number of ended calls
    running_mean: float  # calls in fork servers: running there, or waiting for a CPU
    running_peak: float  # highest sample
    queued_mean: float  # calls queued before the fork servers
    queued_peak: float  # highest sample
    running_s_per_call: float
    queued_s_per_call: float
    code_s_per_call: float | None  # mean duration of the code of a call; null if not logged


class ExecutorTimeSeries(NamedTuple):
    running: StepFunction
    queued: StepFunction


def list_executors(lines: LogTables) -> Sequence[str]:
    names = lines.frames["executor.load"]["process"].unique().to_list()
    return sorted(names, key=lambda name: (len(name), name))


def summarize_executor(lines: LogTables, executor: str) -> tuple[ExecutorUtilization, ExecutorTimeSeries]:
    load = lines.frames["executor.load"].filter(pl.col("process") == executor)
    counters = ("done", "busy_s", "running_s", "queued_s", "code_s")
    load = load.with_columns(
        build_increase_expr(counter).over("executor").alias(f"grown_{counter}") for counter in counters
    )
    begin_s = lines.find_first_weights_s()
    working = load.filter(pl.col("t") > begin_s)
    total: Mapping[str, float] = {counter: float(working[f"grown_{counter}"].sum()) for counter in counters}
    span_s, calls = max(lines.end_s - begin_s, 1e-9), max(total["done"], 1.0)
    use = ExecutorUtilization(
        executor=executor,
        incarnations=load["executor"].n_unique(),
        slots=int(load["slots"][-1]),
        span_s=span_s,
        busy_s=total["busy_s"],
        calls=int(total["done"]),
        running_mean=total["running_s"] / span_s,
        running_peak=float(np.max(load["running"].to_numpy())),
        queued_mean=total["queued_s"] / span_s,
        queued_peak=float(np.max(load["queued"].to_numpy())),
        running_s_per_call=total["running_s"] / calls,
        queued_s_per_call=total["queued_s"] / calls,
        code_s_per_call=None if load["code_s"].null_count() else total["code_s"] / calls,
    )
    return use, ExecutorTimeSeries(_build_rate(load, "running_s"), _build_rate(load, "queued_s"))


def _build_rate(load: pl.DataFrame, counter: str) -> StepFunction:
    """Return the mean calls between two lines; the first line of a busy period is a second after its start."""
    span = pl.min_horizontal(pl.col("t") - pl.col("t").shift(1).fill_null(-1.0), 1.5).clip(lower_bound=1e-6)
    load = load.with_columns(span=span, rate=pl.col(f"grown_{counter}") / span)
    begins = load.select(t=pl.col("t") - pl.col("span"), order=pl.lit(1), rate="rate")
    ends = load.select("t", order=pl.lit(0), rate=pl.lit(0.0))
    return build_step_function(pl.concat([begins, ends]).sort("t", "order"), "rate")
