"""What the whole run was at, moment by moment: trajectories by phase, and the borders of steps."""

from __future__ import annotations

import polars as pl

from analysis.utilization.curves import with_falls
from analysis.utilization.lines import Lines

PHASES = ("leasing", "generating", "calling", "grading")


def phases(lines: Lines) -> pl.DataFrame:
    """t, and from then on the live trajectories in each phase, summed over the rollout processes."""
    counted = _counted(lines, *PHASES)
    changes = [(pl.col(phase) - pl.col(phase).shift(1).fill_null(0).over("process")).alias(phase) for phase in PHASES]
    return counted.with_columns(changes).select("t", pl.col(PHASES).cum_sum())


def _counted(lines: Lines, *columns: str | pl.Expr) -> pl.DataFrame:
    """t, process and these columns; all of a process are 0 when a life of the run has ended."""
    counted = lines.frames["trajectories.counted"].select("t", "process", *columns)
    return pl.concat(
        [
            with_falls(each.drop("process"), lines.deaths).with_columns(process=pl.lit(process))
            for (process,), each in counted.partition_by("process", as_dict=True, maintain_order=True).items()
        ]
        or [counted],
        how="diagonal_relaxed",
    ).sort("t", maintain_order=True)


def asked_of(lines: Lines, engine: str) -> pl.DataFrame:
    """t, and from then on `asked`: the trajectories that generate on this engine."""
    here = pl.col("engines").list.eval(
        pl.when(pl.element().struct.field("engine") == engine).then(pl.element().struct.field("asked")).otherwise(0)
    )
    asked = _counted(lines, here.list.sum().fill_null(0).alias("asked"))
    change = pl.col("asked") - pl.col("asked").shift(1).fill_null(0).over("process")
    return asked.select("t", change.cum_sum().alias("asked"))


def steps(lines: Lines) -> pl.DataFrame:
    """One row for each time that a step or an evaluation was asked for: name, requested, ended and its parts in seconds.

    `ended` and the parts are null where it never ended; the parts are null for an evaluation.
    """
    requested = lines.frames["step.requested"].select("name", "t", requested="t")
    ended = lines.frames["step.ended"].select("name", "t", "rollout_s", "train_s", "weights_s", ended="t")
    each = requested.join_asof(ended, on="t", by="name", strategy="forward", check_sortedness=False).drop("t")
    again = pl.col("requested").shift(-1).over("name") <= pl.col("ended")  # it was asked for anew before it ended
    parts = ("ended", "rollout_s", "train_s", "weights_s")
    return each.with_columns(
        pl.when(again.fill_null(False)).then(None).otherwise(pl.col(part)).alias(part) for part in parts
    )


def learner_phases(each_step: pl.DataFrame) -> pl.DataFrame:
    """t, and from then on `learner`: "training", "weights" (published and loaded), or ""."""
    done = each_step.filter(pl.col("train_s").is_not_null())
    trained = pl.col("ended") - pl.col("weights_s")
    borders = [
        done.select(t=trained - pl.col("train_s"), learner=pl.lit("training")),
        done.select(t=trained, learner=pl.lit("weights")),
        done.select(t=pl.col("ended"), learner=pl.lit("")),
    ]
    return pl.concat(borders).sort("t", maintain_order=True)
