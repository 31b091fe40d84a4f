"""Quantities that hold their value until they change: their means over stretches of time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

Floats = NDArray[np.float64]


class Curve(NamedTuple):
    """`values[i]` holds from `times[i]` to `times[i + 1]`, the last one for good; before the first one it is 0."""

    times: Floats  # [N], in order
    values: Floats  # [N]

    def means(self, edges: Floats) -> Floats:
        """The mean over each stretch between two neighbours of `edges`; [len(edges) - 1]."""
        if not len(self.times):
            return np.zeros(len(edges) - 1)
        return np.diff(self._integral(edges)) / np.maximum(np.diff(edges), 1e-12)

    def mean(self, begin: float, end: float) -> float:
        return float(self.means(np.array([begin, end]))[0])

    @property
    def peak(self) -> float:
        return float(self.values.max(initial=0.0))

    def _integral(self, at: Floats) -> Floats:
        sums = np.concatenate([[0.0], np.cumsum(np.diff(self.times) * self.values[:-1])])
        place = np.searchsorted(self.times, at, side="right") - 1
        inside = np.maximum(place, 0)
        return np.where(place < 0, 0.0, sums[inside] + (at - self.times[inside]) * self.values[inside])


def curve_of(frame: pl.DataFrame, column: str) -> Curve:
    """`frame` is in order of `t`."""
    return Curve(frame["t"].cast(pl.Float64).to_numpy(), frame[column].cast(pl.Float64).to_numpy())


def with_falls(frame: pl.DataFrame, at: Sequence[float]) -> pl.DataFrame:
    """`frame` (t and quantities, in order) with all quantities at 0 from these moments on, until its next row."""
    quantities = [name for name in frame.columns if name != "t"]
    falls = pl.DataFrame({"t": list(at)}, schema={"t": pl.Float64}).with_columns(
        pl.lit(0).alias(name) for name in quantities
    )
    return pl.concat([frame, falls], how="vertical_relaxed").sort("t", maintain_order=True)


def rate_of(frame: pl.DataFrame, growth: str) -> Curve:
    """How fast something grew: `growth` is what was added since the row before (see `grown`), in units a second."""
    spans = frame.with_columns(span=pl.col("t").diff().shift(-1), ahead=pl.col(growth).shift(-1))
    rate = pl.when(pl.col("span") > 0).then(pl.col("ahead") / pl.col("span")).otherwise(0.0)
    return curve_of(spans.with_columns(rate=rate), "rate")


def grown(counter: str) -> pl.Expr:
    """What a counter has gained since the row before; one that fell has begun anew, at 0."""
    before = pl.col(counter).shift(1).fill_null(0)
    return pl.when(pl.col(counter) < before).then(pl.col(counter)).otherwise(pl.col(counter) - before)
