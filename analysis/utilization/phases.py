"""The phases of a run over time: trajectories by phase, learner phases, and steps."""

import polars as pl

from asterism.analysis.utilization.log_schema import LogTables
from asterism.analysis.utilization.step_functions import insert_zeros
from asterism.policies.rollout.trajectory import PHASES


def build_phase_counts(lines: LogTables) -> pl.DataFrame:
    """Return column t, and the live trajectories in each phase from t on, over all rollout processes."""
    counted = _select_counts(lines, *PHASES)
    changes = [(pl.col(phase) - pl.col(phase).shift(1).fill_null(0).over("process")).alias(phase) for phase in PHASES]
    return counted.with_columns(changes).select("t", pl.col(PHASES).cum_sum())


def _select_counts(lines: LogTables, *columns: str | pl.Expr) -> pl.DataFrame:
    """Select columns t, process and the given ones. The given ones become 0 at the end of each launch."""
    counted = lines.frames["trajectories.counted"].select("t", "process", *columns)
    return pl.concat(
        [
            insert_zeros(each.drop("process"), lines.launch_ends_s).with_columns(process=pl.lit(process))
            for (process,), each in counted.partition_by("process", as_dict=True, maintain_order=True).items()
        ]
        or [counted],
        how="diagonal_relaxed",
    ).sort("t", maintain_order=True)


def build_engine_demand(lines: LogTables, engine: str) -> pl.DataFrame:
    """Return column t, and `asked`: the trajectories that generate on this engine from t on."""
    here = pl.col("engines").list.eval(
        pl.when(pl.element().struct.field("engine") == engine).then(pl.element().struct.field("asked")).otherwise(0)
    )
    asked = _select_counts(lines, here.list.sum().fill_null(0).alias("asked"))
    change = pl.col("asked") - pl.col("asked").shift(1).fill_null(0).over("process")
    return asked.select("t", change.cum_sum().alias("asked"))


def build_steps(lines: LogTables) -> pl.DataFrame:
    """Return a row for each request: name, requested, ended and parts, in seconds. Unknown values are null."""
    requested = lines.frames["step.requested"].select("name", "t", requested="t")
    ended = lines.frames["step.ended"].select("name", "t", "rollout_s", "train_s", "weights_s", ended="t")
    each = requested.join_asof(ended, on="t", by="name", strategy="forward", check_sortedness=False).drop("t")
    # The step was requested again before it ended.
    is_superseded = pl.col("requested").shift(-1).over("name") <= pl.col("ended")
    parts = ("ended", "rollout_s", "train_s", "weights_s")
    return each.with_columns(
        pl.when(is_superseded.fill_null(False)).then(None).otherwise(pl.col(part)).alias(part) for part in parts
    )


def build_learner_phases(each_step: pl.DataFrame) -> pl.DataFrame:
    """Return column t, and `learner` from t on: "training", "weights" (published and loaded), or ""."""
    done = each_step.filter(pl.col("train_s").is_not_null())
    trained = pl.col("ended") - pl.col("weights_s")
    borders = [
        done.select(t=trained - pl.col("train_s"), learner=pl.lit("training")),
        done.select(t=trained, learner=pl.lit("weights")),
        done.select(t=pl.col("ended"), learner=pl.lit("")),
    ]
    return pl.concat(borders).sort("t", maintain_order=True)
