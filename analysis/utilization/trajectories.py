"""What trajectories waited for: in all, in the tail, and the ten that took longest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import polars as pl

from analysis.utilization.lines import Lines

LONGEST = 10
WAITS: Mapping[str, str] = {  # by their names in the log lines
    "lease_wait_s": "a lease",
    "generation_s": "generation",
    "tools_s": "tools",
    "grading_s": "its grade",
}


class Wait(msgspec.Struct, frozen=True):
    """Seconds over all trajectories that ended."""

    total_s: float
    mean_s: float
    p50_s: float
    p99_s: float
    max_s: float


class Lived(msgspec.Struct, frozen=True):
    """One trajectory."""

    trajectory_id: int
    step: str
    ending: str
    cause: str  # of a failure
    turns: int
    calls: int
    tokens: int
    generated_tokens: int
    lived_s: float  # the sum of the waits
    lease_wait_s: float
    generation_s: float
    tools_s: float
    grading_s: float


class TrajectoryUse(msgspec.Struct, frozen=True):
    started: int | None  # null where the log does not say which groups began
    ended: int
    failed: int
    aborted: int  # because their step had ended without them
    turns: int
    calls: int
    tokens: int  # prompt, generated and tool tokens
    generated_tokens: int
    migrations: int  # to another engine, between two turns or within one
    waits: dict[str, Wait]  # by WAITS
    longest: tuple[Lived, ...]


def ended_trajectories(lines: Lines) -> pl.DataFrame:
    """The lines of ends, with `lived_s`, and `step`: the name of the step that started the trajectory, or ""."""
    ended = lines.frames["trajectory.ended"].with_columns(lived_s=pl.sum_horizontal(*WAITS))
    groups = lines.frames["group.started"].select("t", "group_id", step="name")
    joined = ended.join_asof(groups, on="t", by="group_id", strategy="backward", check_sortedness=False)
    return joined.with_columns(pl.col("step").fill_null(""))


def trajectory_use(lines: Lines, ended: pl.DataFrame) -> TrajectoryUse:
    groups = lines.frames["group.started"]
    sums = ("turns", "calls", "tokens", "generated_tokens", "migrations")
    return TrajectoryUse(
        started=int(groups["size"].sum()) if groups.height else None,
        ended=ended.height,
        failed=int((ended["ending"] == "failed").sum()),
        aborted=int((ended["ending"] == "aborted").sum()),
        **{name: int(ended[name].sum()) for name in sums},
        waits={name: _wait(ended[name]) for name in WAITS},
        longest=lived(ended.sort("lived_s", descending=True, maintain_order=True).head(LONGEST)),
    )


def lived(rows: pl.DataFrame) -> tuple[Lived, ...]:
    return tuple(Lived(**row) for row in rows.select(Lived.__struct_fields__).iter_rows(named=True))


def _wait(seconds: pl.Series) -> Wait:
    if seconds.is_empty():
        return Wait(0.0, 0.0, 0.0, 0.0, 0.0)
    figures: Sequence[float | None] = (
        seconds.sum(),
        seconds.mean(),  # pyright: ignore[reportAssignmentType] - of floats
        seconds.quantile(0.5, "linear"),
        seconds.quantile(0.99, "linear"),
        seconds.max(),  # pyright: ignore[reportAssignmentType]
    )
    return Wait(*(float(figure or 0.0) for figure in figures))
