"""Why an engine computed nothing: its idle seconds by cause.

Between two lines of its load the engine says how long it was busy; the rest was idle. What the run was at during that
time gives the cause. Idle time is looked for first where nothing was asked of the engine; only what does not fit in there
passed while it had requests.
"""

from __future__ import annotations

import polars as pl

from analysis.utilization.lines import Lines
from analysis.utilization.phases import asked_of, learner_phases, phases

CAUSES = {  # in the order in which they are looked for
    "starting": "it waited for its first weights: start-up, cold start",
    "weights": "new weights were on their way, or being loaded",
    "overhead": "it had requests: messages and its own bookkeeping",
    "lease": "trajectories waited for a lease, none was granted here",
    "tools": "all trajectories waited for tools or for their grade",
    "elsewhere": "the trajectories that generated did so on other engines",
    "training": "the learner trained, nothing was to be generated",
    "nothing": "no trajectory was alive",
    "unknown": "the logs do not say",
}


def idle_by_cause(lines: Lines, engine: str, samples: pl.DataFrame, each_step: pl.DataFrame) -> pl.DataFrame:
    """Segments of the engine's time: t, span_s, idle_s, cause. `samples` has t, grown_busy_s and began (analysis.utilization.engines);
    time before an engine's start, as between two lives of a run, belongs to no segment."""
    segments = _segments(lines, engine, samples, each_step)
    asked = pl.col("cause") == "overhead"
    span = pl.col("span_s")
    free = pl.when(asked).then(0.0).otherwise(span).sum().over("sample")
    idle = (span.sum().over("sample") - pl.col("busy_s")).clip(lower_bound=0.0)
    of_free = pl.min_horizontal(idle, free) / free
    of_asked = (idle - free).clip(lower_bound=0.0) / (span.sum().over("sample") - free)
    idle_s = pl.when(asked).then(span * of_asked).otherwise(span * of_free)
    return segments.with_columns(idle_s=idle_s.fill_nan(0.0)).select("t", "span_s", "idle_s", "cause")


def _segments(lines: Lines, engine: str, samples: pl.DataFrame, each_step: pl.DataFrame) -> pl.DataFrame:
    """All that changed, in order of time, each row with what was so from then on."""
    numbered = samples.with_row_index("sample").select(
        "t", "sample", busy_s=pl.col("grown_busy_s").shift(-1), present=~pl.col("began").shift(-1)
    )
    changes = pl.concat(
        [numbered, phases(lines), asked_of(lines, engine), learner_phases(each_step), *_loading(lines, engine)],
        how="diagonal_relaxed",
    )
    ordered = changes.sort("t", maintain_order=True).with_columns(pl.exclude("t").forward_fill())
    spans = ordered.with_columns(span_s=pl.col("t").shift(-1) - pl.col("t"), cause=_cause())
    return spans.filter(pl.col("sample").is_not_null() & pl.col("present") & (pl.col("span_s") > 0))


def _loading(lines: Lines, engine: str) -> tuple[pl.DataFrame, pl.DataFrame]:
    """When the engine was reading weights, and whether it had any since it started."""
    mine = pl.col("process") == engine
    loaded = lines.frames["weights.loaded"].filter(mine)
    started = lines.frames["engine.started"].filter(mine)
    reading = pl.concat(
        [
            loaded.select(t=pl.col("t") - pl.col("load_s"), reading=pl.lit(True)),
            loaded.select("t", reading=pl.lit(False)),
        ]
    )
    if loaded.is_empty():  # nobody says when: then it had them from the start
        return reading, pl.DataFrame(schema={"t": pl.Float64, "ready": pl.Boolean})
    ready = [started.select("t", ready=pl.lit(False)), loaded.select("t", ready=pl.lit(True))]
    return reading, pl.concat(ready)


def _cause() -> pl.Expr:
    tools = pl.col("calling") + pl.col("grading")
    return (
        pl.when(~pl.col("ready"))
        .then(pl.lit("starting"))
        .when(pl.col("reading"))
        .then(pl.lit("weights"))
        .when(pl.col("asked") > 0)
        .then(pl.lit("overhead"))
        .when(pl.col("leasing") > 0)
        .then(pl.lit("lease"))
        .when(pl.col("generating") > 0)
        .then(pl.lit("elsewhere"))
        .when(tools > 0)
        .then(pl.lit("tools"))
        .when(pl.col("learner") == "training")
        .then(pl.lit("training"))
        .when(pl.col("learner") == "weights")
        .then(pl.lit("weights"))
        .when(pl.col("leasing").is_null())
        .then(pl.lit("unknown"))
        .otherwise(pl.lit("nothing"))
    )
