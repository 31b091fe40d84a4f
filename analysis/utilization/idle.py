"""Attributes the idle seconds of an engine to causes.

Two successive load reports give the engine's busy time between them; the rest is idle time. The
phase of the run at that time gives the cause. Idle time is attributed first to periods in which the
engine had no requests; only the remainder is attributed to periods with requests.
"""

import polars as pl

from asterism.analysis.utilization.log_schema import LogTables
from asterism.analysis.utilization.phases import build_engine_demand, build_learner_phases, build_phase_counts

CAUSES = {  # causes in order of precedence
    "starting": "waiting for the first weights: start-up, cold start",
    "weights": "new weights were being transferred or loaded",
    "overhead": "engine overhead: messages and bookkeeping",
    "lease": "trajectories waited for a lease; none was granted here",
    "tools": "all trajectories waited for tools or grading",
    "elsewhere": "all generation was on other engines",
    "training": "the learner trained; nothing to generate",
    "nothing": "no live trajectories",
    "unknown": "not in the logs",
}


def compute_idle_by_cause(
    lines: LogTables, engine: str, samples: pl.DataFrame, each_step: pl.DataFrame
) -> pl.DataFrame:
    """Return segments of the engine's time, with columns t, span_s, idle_s and cause.

    `samples` has t, grown_busy_s and began (see asterism.analysis.utilization.engine_time). The time before a
    start of the engine, for example between two launches, belongs to no segment.
    """
    segments = _build_segments(lines, engine, samples, each_step)
    asked = pl.col("cause") == "overhead"
    span = pl.col("span_s")
    free = pl.when(asked).then(0.0).otherwise(span).sum().over("sample")
    idle = (span.sum().over("sample") - pl.col("busy_s")).clip(lower_bound=0.0)
    of_free = pl.min_horizontal(idle, free) / free
    of_asked = (idle - free).clip(lower_bound=0.0) / (span.sum().over("sample") - free)
    idle_s = pl.when(asked).then(span * of_asked).otherwise(span * of_free)
    return segments.with_columns(idle_s=idle_s.fill_nan(0.0)).select("t", "span_s", "idle_s", "cause")


def _build_segments(lines: LogTables, engine: str, samples: pl.DataFrame, each_step: pl.DataFrame) -> pl.DataFrame:
    """Merge all changes in order of time; each row has the state from t on."""
    numbered = samples.with_row_index("sample").select(
        "t", "sample", busy_s=pl.col("grown_busy_s").shift(-1), present=~pl.col("began").shift(-1)
    )
    numbered = numbered.with_columns(busy_s=_move_excess(numbered))
    changes = pl.concat(
        [
            numbered,
            build_phase_counts(lines),
            build_engine_demand(lines, engine),
            build_learner_phases(each_step),
            *_build_loading_tables(lines, engine),
        ],
        how="diagonal_relaxed",
    )
    ordered = changes.sort("t", maintain_order=True).with_columns(pl.exclude("t").forward_fill())
    spans = ordered.with_columns(span_s=pl.col("t").shift(-1) - pl.col("t"), cause=_build_cause_expr())
    return spans.filter(pl.col("sample").is_not_null() & pl.col("present") & (pl.col("span_s") > 0))


def _move_excess(samples: pl.DataFrame) -> pl.Series:
    """Return busy seconds until the next sample, at most the time until it; an excess moves to earlier samples.

    An engine reports the time of a step when the step has ended, also the part before the last report.
    """
    spans = (samples["t"].shift(-1) - samples["t"]).to_list()
    kept: list[float | None] = []
    excess = 0.0
    for busy_s, span_s, is_present in zip(
        *(reversed(each) for each in (samples["busy_s"].to_list(), spans, samples["present"].to_list())), strict=True
    ):
        if busy_s is None or not is_present:  # another incarnation follows
            kept.append(busy_s)
            excess = 0.0
        else:
            kept.append(min(busy_s + excess, span_s))
            excess = max(0.0, busy_s + excess - span_s)
    return pl.Series("busy_s", kept[::-1], dtype=pl.Float64)


def _build_loading_tables(lines: LogTables, engine: str) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return when the engine was loading weights, and whether it has had weights since its start."""
    mine = pl.col("process") == engine
    loaded = lines.frames["weights.loaded"].filter(mine)
    started = lines.frames["engine.started"].filter(mine)
    reading = pl.concat(
        [
            loaded.select(t=pl.col("t") - pl.col("load_s"), reading=pl.lit(True)),
            loaded.select("t", reading=pl.lit(False)),
        ]
    )
    if loaded.is_empty():  # not logged: then the engine has had weights since its start
        return reading, pl.DataFrame(schema={"t": pl.Float64, "ready": pl.Boolean})
    ready = [started.select("t", ready=pl.lit(False)), loaded.select("t", ready=pl.lit(True))]
    return reading, pl.concat(ready)


def _build_cause_expr() -> pl.Expr:
    learner = pl.col("learner")
    rules = (  # the first rule that holds gives the cause
        (~pl.col("ready"), "starting"),
        (pl.col("reading"), "weights"),
        (pl.col("asked") > 0, "overhead"),
        (pl.col("leasing") > 0, "lease"),
        (pl.col("generating") > 0, "elsewhere"),
        (pl.col("calling") + pl.col("grading") > 0, "tools"),
        (learner == "training", "training"),
        (learner == "weights", "weights"),
        (pl.col("leasing").is_null(), "unknown"),
    )
    cause: pl.Expr = pl.lit("nothing")
    for condition, name in reversed(rules):
        cause = pl.when(condition).then(pl.lit(name)).otherwise(cause)
    return cause
