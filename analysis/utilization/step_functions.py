"""Step functions: quantities that keep their value until they change, and their means over time."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class StepFunction(NamedTuple):
    """A function of time: `values[i]` from `times[i]` to `times[i + 1]`, and 0 before the first time."""

    times: Floats  # [N], in order
    values: Floats  # [N]

    def compute_means(self, edges: Floats) -> Floats:
        """Return the mean over each interval between successive edges, [len(edges) - 1]."""
        if not len(self.times):
            return np.zeros(len(edges) - 1)
        return np.diff(self._integrate(edges)) / np.maximum(np.diff(edges), 1e-12)

    @property
    def peak(self) -> float:
        return float(self.values.max(initial=0.0))

    def _integrate(self, at: Floats) -> Floats:
        sums = np.concatenate([[0.0], np.cumsum(np.diff(self.times) * self.values[:-1])])
        index = np.searchsorted(self.times, at, side="right") - 1
        inside = np.maximum(index, 0)
        return np.where(index < 0, 0.0, sums[inside] + (at - self.times[inside]) * self.values[inside])


def build_step_function(frame: pl.DataFrame, column: str) -> StepFunction:
    """Build the step function of a column; `frame` is sorted by `t`."""
    return StepFunction(frame["t"].cast(pl.Float64).to_numpy(), frame[column].cast(pl.Float64).to_numpy())


def insert_zeros(frame: pl.DataFrame, at: Sequence[float]) -> pl.DataFrame:
    """Return `frame` (sorted by t) with its other columns 0 from each of these times to its next row."""
    quantities = [name for name in frame.columns if name != "t"]
    zeros = pl.DataFrame({"t": list(at)}, schema={"t": pl.Float64}).with_columns(
        pl.lit(0).alias(name) for name in quantities
    )
    return pl.concat([frame, zeros], how="vertical_relaxed").sort("t", maintain_order=True)


def build_rate(frame: pl.DataFrame, increase_column: str) -> StepFunction:
    """Build a rate in units per second. `increase_column`: the increase since the previous row."""
    spans = frame.with_columns(span=pl.col("t").diff().shift(-1), ahead=pl.col(increase_column).shift(-1))
    rate = pl.when(pl.col("span") > 0).then(pl.col("ahead") / pl.col("span")).otherwise(0.0)
    return build_step_function(spans.with_columns(rate=rate), "rate")


def build_increase_expr(counter: str) -> pl.Expr:
    """Return the increase of a counter since the previous row. A counter that fell was reset to 0."""
    before = pl.col(counter).shift(1).fill_null(0)
    return pl.when(pl.col(counter) < before).then(pl.col(counter)).otherwise(pl.col(counter) - before)
