"""Summarizes the time of trajectories by activity: totals, percentiles, and the ten longest trajectories."""

from collections.abc import Mapping, Sequence

import msgspec
import polars as pl

from asterism.analysis.utilization.log_schema import LogTables

NUM_LONGEST = 10
WAITS: Mapping[str, str] = {  # keys: fields of the log line
    "lease_wait_s": "a lease",
    "generation_s": "generation",
    "tools_s": "tools",
    "grading_s": "grading",
}


class WaitStatistics(msgspec.Struct, frozen=True):
    """Seconds of one activity over all trajectories that ended."""

    total_s: float
    mean_s: float
    p50_s: float
    p99_s: float
    max_s: float


class TrajectorySummary(msgspec.Struct, frozen=True):
    trajectory_id: int
    step: str
    ending: str
    cause: str  # cause of a failure
    turns: int
    calls: int
    tokens: int
    generated_tokens: int
    lived_s: float  # the sum of the waits
    lease_wait_s: float
    generation_s: float
    tools_s: float
    grading_s: float


class TrajectoryUtilization(msgspec.Struct, frozen=True):
    started: int | None  # null if the log has no group.started lines
    ended: int
    failed: int
    aborted: int  # trajectories aborted when their step ended without them
    turns: int
    calls: int
    tokens: int  # prompt, generated and tool tokens
    generated_tokens: int
    migrations: int  # moves to another engine, between or within turns
    waits: dict[str, WaitStatistics]  # statistics by key of WAITS
    longest: tuple[TrajectorySummary, ...]


def build_ended_table(lines: LogTables) -> pl.DataFrame:
    """Return the trajectory.ended lines with `lived_s` and `step`, the name of the step or ""."""
    ended = lines.frames["trajectory.ended"].with_columns(lived_s=pl.sum_horizontal(*WAITS))
    groups = lines.frames["group.started"].select("t", "group_id", step="name")
    joined = ended.join_asof(groups, on="t", by="group_id", strategy="backward", check_sortedness=False)
    return joined.with_columns(pl.col("step").fill_null(""))


def summarize_trajectories(lines: LogTables, ended: pl.DataFrame) -> TrajectoryUtilization:
    groups = lines.frames["group.started"]
    sums = ("turns", "calls", "tokens", "generated_tokens", "migrations")
    return TrajectoryUtilization(
        started=int(groups["size"].sum()) if groups.height else None,
        ended=ended.height,
        failed=int((ended["ending"] == "failed").sum()),
        aborted=int((ended["ending"] == "aborted").sum()),
        **{name: int(ended[name].sum()) for name in sums},
        waits={name: _summarize_wait(ended[name]) for name in WAITS},
        longest=build_trajectory_summaries(
            ended.sort("lived_s", descending=True, maintain_order=True).head(NUM_LONGEST)
        ),
    )


def build_trajectory_summaries(rows: pl.DataFrame) -> tuple[TrajectorySummary, ...]:
    return tuple(
        TrajectorySummary(**row) for row in rows.select(TrajectorySummary.__struct_fields__).iter_rows(named=True)
    )


def _summarize_wait(seconds: pl.Series) -> WaitStatistics:
    if seconds.is_empty():
        return WaitStatistics(0.0, 0.0, 0.0, 0.0, 0.0)
    figures: Sequence[float | None] = (
        seconds.sum(),
        seconds.mean(),  # pyright: ignore[reportAssignmentType] - floats
        seconds.quantile(0.5, "linear"),
        seconds.quantile(0.99, "linear"),
        seconds.max(),  # pyright: ignore[reportAssignmentType]
    )
    return WaitStatistics(*(float(figure or 0.0) for figure in figures))
