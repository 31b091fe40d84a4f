"""Computes the time, decode slots and KV cache use of each engine."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import polars as pl

from asterism.analysis.utilization.idle import CAUSES, compute_idle_by_cause
from asterism.analysis.utilization.log_schema import LogTables
from asterism.analysis.utilization.step_functions import (
    Floats,
    StepFunction,
    build_increase_expr,
    build_rate,
    build_step_function,
    insert_zeros,
)

# A busy engine reports its load several times a second: after a longer gap it counts as idle.
MAX_LOAD_GAP_S = 1.0
_COUNTERS = (
    "busy_s",
    "decode_steps",
    "generated_tokens",
    "prefilled_tokens",
    "recomputed_tokens",
    "evicted_tokens",
    "preempted",
)


class EngineUtilization(msgspec.Struct, frozen=True):
    """Use of an engine. Means are over `active_s`: from the first weights of each incarnation to its end."""

    engine: str
    kv_tokens: int | None  # capacity; null if not logged
    active_s: float
    busy_s: float  # active_s = busy_s + idle_s
    idle_s: float
    idle_by_cause_s: dict[str, float]
    starting_s: float  # seconds before the first weights
    decode_steps: int
    generated_tokens: int
    prefilled_tokens: int
    recomputed_tokens: int
    evicted_tokens: int
    preempted: int
    running_mean: float
    running_peak: float
    leased_tokens_mean: float | None  # null if the KV ledger is not in the logs
    leased_tokens_peak: float | None
    used_tokens_mean: float
    used_tokens_peak: float
    cached_tokens_mean: float
    cached_tokens_peak: float


class EngineTimeSeries(NamedTuple):
    running: StepFunction
    running_peak: float  # highest sample
    leased: StepFunction | None
    used: StepFunction
    cached: StepFunction
    recomputed: StepFunction  # tokens per second
    evicted: StepFunction  # tokens per second
    idle: pl.DataFrame  # columns t, span_s, idle_s, cause

    def compute_idle_shares(self, edges: Floats) -> Floats:
        """Return the idle share of each interval between two edges."""
        begins, spans = self.idle["t"].to_numpy(), self.idle["span_s"].to_numpy()
        sums = np.concatenate([[0.0], np.cumsum(self.idle["idle_s"].to_numpy())])
        times = np.maximum.accumulate(np.stack([begins, begins + spans], axis=1).ravel())
        idle = np.interp(edges, times, np.stack([sums[:-1], sums[1:]], axis=1).ravel()) if len(times) else 0 * edges
        return np.diff(idle) / np.maximum(np.diff(edges), 1e-12)


def list_engines(lines: LogTables) -> Sequence[str]:
    """List all engines in the logs, or none if no line engine.load exists."""
    loads = lines.frames["engine.load"]["engine"]
    if loads.is_empty():
        return ()
    others = lines.frames["engine.started"]["process"], lines.frames["ledger.reported"]["engine"]
    names = pl.concat([loads, *others]).unique().to_list()
    return sorted(names, key=lambda name: (len(name), name))  # generator-2 before generator-10


def summarize_engine(
    lines: LogTables, engine: str, each_step: pl.DataFrame
) -> tuple[EngineUtilization, EngineTimeSeries]:
    samples = _build_samples(lines, engine)
    curves = _build_time_series(lines, engine, samples, each_step)
    started = lines.frames["engine.started"].filter(pl.col("process") == engine)
    active = curves.idle.filter(pl.col("cause") != "starting")
    idle = dict(active.group_by("cause").agg(pl.col("idle_s").sum()).iter_rows())
    active_s, idle_s = float(active["span_s"].sum()), float(active["idle_s"].sum())
    totals = {counter: int(samples[f"grown_{counter}"].sum()) for counter in _COUNTERS[1:]}
    return (
        EngineUtilization(
            engine=engine,
            kv_tokens=int(started["kv_tokens"][-1]) if started.height else None,
            active_s=active_s,
            busy_s=active_s - idle_s,
            idle_s=idle_s,
            idle_by_cause_s={cause: float(idle[cause]) for cause in CAUSES if idle.get(cause)},
            starting_s=float(curves.idle["span_s"].sum()) - active_s,
            **totals,
            running_mean=_compute_mean(curves.running, active),
            running_peak=curves.running_peak,
            leased_tokens_mean=None if curves.leased is None else _compute_mean(curves.leased, active),
            leased_tokens_peak=None if curves.leased is None else curves.leased.peak,
            used_tokens_mean=_compute_mean(curves.used, active),
            used_tokens_peak=curves.used.peak,
            cached_tokens_mean=_compute_mean(curves.cached, active),
            cached_tokens_peak=curves.cached.peak,
        ),
        curves,
    )


def _build_running_from_counters(samples: pl.DataFrame) -> StepFunction:
    """Compute the mean sequences between two samples: a decode step generates one token per running sequence."""
    tokens, steps, busy_s = (pl.col(f"grown_{name}") for name in ("generated_tokens", "decode_steps", "busy_s"))
    sequence_s = pl.when(steps > 0).then(tokens / steps * busy_s).otherwise(0.0)
    return build_rate(samples.with_columns(sequence_s=sequence_s), "sequence_s")


def _compute_mean(curve: StepFunction, segments: pl.DataFrame) -> float:
    """Compute the mean over all segments; gaps between segments do not count."""
    if segments.is_empty():
        return 0.0
    begins, spans = segments["t"].to_numpy(), segments["span_s"].to_numpy()
    edges = np.stack([begins, begins + spans], axis=1).ravel()
    return float((curve.compute_means(edges)[::2] * spans).sum() / spans.sum())


def _build_samples(lines: LogTables, engine: str) -> pl.DataFrame:
    """Collect load reports, counter increases (`grown_...`), and rows for starts (`began`) and the end."""
    load = lines.frames["engine.load"].filter(pl.col("engine") == engine).with_columns(began=pl.lit(False))
    zero = {column: pl.lit(0) for column in (*_COUNTERS, "running", "used_tokens", "cached_tokens")}
    started = lines.frames["engine.started"].filter(pl.col("process") == engine)
    starts = started.select("t", began=pl.lit(True), **zero)
    rows = pl.concat([starts, load], how="diagonal_relaxed").sort("t", maintain_order=True)
    if rows.height and rows["t"][-1] < lines.end_s:
        last = rows.tail(1).with_columns(t=pl.lit(lines.end_s), running=pl.lit(0), began=pl.lit(False))
        rows = pl.concat([rows, last], how="vertical_relaxed")
    return rows.with_columns(build_increase_expr(counter).alias(f"grown_{counter}") for counter in _COUNTERS)


def _build_time_series(
    lines: LogTables, engine: str, samples: pl.DataFrame, each_step: pl.DataFrame
) -> EngineTimeSeries:
    ledger_reports = lines.frames["ledger.reported"].filter(pl.col("engine") == engine)
    before_gaps = samples.filter(pl.col("t").shift(-1) - pl.col("t") > MAX_LOAD_GAP_S)
    zero_times = [*(before_gaps["t"] + MAX_LOAD_GAP_S / 2), *lines.launch_ends_s]
    sampled = build_step_function(insert_zeros(samples.select("t", "running"), zero_times), "running")
    is_counted = bool(samples["grown_decode_steps"].sum())
    kv_tokens = insert_zeros(samples.select("t", "used_tokens", "cached_tokens"), lines.launch_ends_s)
    leased = insert_zeros(ledger_reports.select("t", "leased_tokens"), lines.launch_ends_s)
    return EngineTimeSeries(
        running=_build_running_from_counters(samples) if is_counted else sampled,
        running_peak=sampled.peak,
        leased=build_step_function(leased, "leased_tokens") if ledger_reports.height else None,
        used=build_step_function(kv_tokens, "used_tokens"),
        cached=build_step_function(kv_tokens, "cached_tokens"),
        recomputed=build_rate(samples, "grown_recomputed_tokens"),
        evicted=build_rate(samples, "grown_evicted_tokens"),
        idle=compute_idle_by_cause(lines, engine, samples, each_step),
    )
