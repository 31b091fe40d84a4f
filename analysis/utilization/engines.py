"""What each engine did with its slots, its cache and its time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import polars as pl

from analysis.utilization.curves import Curve, Floats, curve_of, grown, rate_of, with_falls
from analysis.utilization.idle import CAUSES, idle_by_cause
from analysis.utilization.lines import Lines

SILENT_S = 1.0  # an engine at work says so several times as often: after so long without a line nothing runs
_COUNTERS = (
    "busy_s",
    "decode_steps",
    "generated_tokens",
    "prefilled_tokens",
    "recomputed_tokens",
    "evicted_tokens",
    "preempted",
)


class EngineUse(msgspec.Struct, frozen=True):
    """Means are over `active_s`: the time from an engine's first weights to the end of the run, and of each life of it."""

    engine: str
    kv_tokens: int | None  # capacity; null where no line says it
    active_s: float
    busy_s: float  # active_s = busy_s + idle_s
    idle_s: float
    idle_by_cause_s: dict[str, float]
    starting_s: float  # before, without weights
    decode_steps: int
    generated_tokens: int
    prefilled_tokens: int
    recomputed_tokens: int
    evicted_tokens: int
    preempted: int
    running_mean: float
    running_peak: float
    leased_tokens_mean: float | None  # null where the arbiter's books are not in the logs
    leased_tokens_peak: float | None
    used_tokens_mean: float
    used_tokens_peak: float
    cached_tokens_mean: float
    cached_tokens_peak: float


class EngineCurves(NamedTuple):
    running: Curve
    leased: Curve | None
    used: Curve
    cached: Curve
    recomputed: Curve  # tokens a second
    evicted: Curve  # tokens a second
    idle: pl.DataFrame  # t, span_s, idle_s, cause

    def idle_means(self, edges: Floats) -> Floats:
        """The idle share of each stretch of time."""
        begins, spans = self.idle["t"].to_numpy(), self.idle["span_s"].to_numpy()
        sums = np.concatenate([[0.0], np.cumsum(self.idle["idle_s"].to_numpy())])
        times = np.maximum.accumulate(np.stack([begins, begins + spans], axis=1).ravel())
        idle = np.interp(edges, times, np.stack([sums[:-1], sums[1:]], axis=1).ravel()) if len(times) else 0 * edges
        return np.diff(idle) / np.maximum(np.diff(edges), 1e-12)


def engines_of(lines: Lines) -> Sequence[str]:
    """All that any line speaks of, if any engine says its load: without that nothing is known of them."""
    loads = lines.frames["engine.load"]["engine"]
    if loads.is_empty():
        return ()
    others = lines.frames["engine.started"]["process"], lines.frames["ledger.reported"]["engine"]
    names = pl.concat([loads, *others]).unique().to_list()
    return sorted(names, key=lambda name: (len(name), name))  # generator-2 before generator-10


def engine_use(lines: Lines, engine: str, each_step: pl.DataFrame) -> tuple[EngineUse, EngineCurves]:
    samples = _samples(lines, engine)
    curves = _curves(lines, engine, samples, each_step)
    started = lines.frames["engine.started"].filter(pl.col("process") == engine)
    active = curves.idle.filter(pl.col("cause") != "starting")
    idle = dict(active.group_by("cause").agg(pl.col("idle_s").sum()).iter_rows())
    active_s, idle_s = float(active["span_s"].sum()), float(active["idle_s"].sum())
    totals = {counter: int(samples[f"grown_{counter}"].sum()) for counter in _COUNTERS[1:]}
    return (
        EngineUse(
            engine=engine,
            kv_tokens=int(started["kv_tokens"][-1]) if started.height else None,
            active_s=active_s,
            busy_s=active_s - idle_s,
            idle_s=idle_s,
            idle_by_cause_s={cause: float(idle[cause]) for cause in CAUSES if idle.get(cause)},
            starting_s=float(curves.idle["span_s"].sum()) - active_s,
            **totals,
            running_mean=_mean(curves.running, active),
            running_peak=curves.running.peak,
            leased_tokens_mean=None if curves.leased is None else _mean(curves.leased, active),
            leased_tokens_peak=None if curves.leased is None else curves.leased.peak,
            used_tokens_mean=_mean(curves.used, active),
            used_tokens_peak=curves.used.peak,
            cached_tokens_mean=_mean(curves.cached, active),
            cached_tokens_peak=curves.cached.peak,
        ),
        curves,
    )


def _mean(curve: Curve, segments: pl.DataFrame) -> float:
    """Over all the segments, which may leave gaps."""
    if segments.is_empty():
        return 0.0
    begins, spans = segments["t"].to_numpy(), segments["span_s"].to_numpy()
    edges = np.stack([begins, begins + spans], axis=1).ravel()
    return float((curve.means(edges)[::2] * spans).sum() / spans.sum())


def _samples(lines: Lines, engine: str) -> pl.DataFrame:
    """The lines of its load with what each counter gained (`grown_...`); at its starts, and at the end of the logs, a row
    of our own. `began`: the engine was not there before this row."""
    load = lines.frames["engine.load"].filter(pl.col("engine") == engine).with_columns(began=pl.lit(False))
    zero = {column: pl.lit(0) for column in (*_COUNTERS, "running", "used_tokens", "cached_tokens")}
    started = lines.frames["engine.started"].filter(pl.col("process") == engine)
    starts = started.select("t", began=pl.lit(True), **zero)
    rows = pl.concat([starts, load], how="diagonal_relaxed").sort("t", maintain_order=True)
    if rows.height and rows["t"][-1] < lines.end_s:
        last = rows.tail(1).with_columns(t=pl.lit(lines.end_s), running=pl.lit(0), began=pl.lit(False))
        rows = pl.concat([rows, last], how="vertical_relaxed")
    return rows.with_columns(grown(counter).alias(f"grown_{counter}") for counter in _COUNTERS)


def _curves(lines: Lines, engine: str, samples: pl.DataFrame, each_step: pl.DataFrame) -> EngineCurves:
    booked = lines.frames["ledger.reported"].filter(pl.col("engine") == engine)
    silent = samples.filter(pl.col("t").shift(-1) - pl.col("t") > SILENT_S)
    falls = [*(silent["t"] + SILENT_S / 2), *lines.deaths]
    running = with_falls(samples.select("t", "running"), falls)
    held = with_falls(samples.select("t", "used_tokens", "cached_tokens"), lines.deaths)
    return EngineCurves(
        running=curve_of(running, "running"),
        leased=curve_of(with_falls(booked.select("t", "leased_tokens"), lines.deaths), "leased_tokens")
        if booked.height
        else None,
        used=curve_of(held, "used_tokens"),
        cached=curve_of(held, "cached_tokens"),
        recomputed=rate_of(samples, "grown_recomputed_tokens"),
        evicted=rate_of(samples, "grown_evicted_tokens"),
        idle=idle_by_cause(lines, engine, samples, each_step),
    )
