"""How old what is trained on may be, and what becomes of what is older.

Version v is the policy after step v; step s updates version s - 1. A token of version v is s - 1 - v versions behind
when it is used in step s, and may be `rl.max_staleness` behind. With 0 all tokens of a step are of one version: the
synchronous algorithm. Of a trajectory whose oldest generated token is further behind, `rl.too_old` decides:

    mask  its old tokens are left out of the loss, the others count; with none left it is dropped
    drop  the trajectory is left out, and its group is judged without it

Source: the bound on versions and tokens of several versions in one trajectory, AReaL (arXiv 2505.24298).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from bus.messages import Row, StalenessCounts, TrajectoryFinished

TooOld = Literal["mask", "drop"]


def oldest_version(step: int, max_staleness: int) -> int:
    """The oldest that `step` may train on."""
    return step - 1 - max_staleness


def young_enough(trajectory: TrajectoryFinished, oldest: int, rule: TooOld) -> TrajectoryFinished | None:
    """What of the trajectory may be trained on where `oldest` is the oldest version; None: nothing."""
    counted = _flags(trajectory.loss_mask)
    old = counted & (_versions(trajectory.versions) < oldest)
    if not old.any():
        return trajectory
    left = counted & ~old
    if rule == "drop" or not left.any():
        return None
    return replace(trajectory, loss_mask=left.astype(np.uint8).tobytes())


def tokens_masked(before: TrajectoryFinished, after: Row) -> int:
    return sum(before.loss_mask) - sum(after.loss_mask)


def with_rows(counts: StalenessCounts, rows: Iterable[Row], version: int) -> StalenessCounts:
    """`counts` with further rows, to be used in an update of `version`."""
    for row in rows:
        behind = version - _versions(row.versions)[_flags(row.loss_mask)]
        counts = replace(
            counts,
            tokens=counts.tokens + len(behind),
            versions_behind=counts.versions_behind + int(behind.sum()),
            most_behind=max(counts.most_behind, int(behind.max(initial=0))),
        )
    return counts


def _flags(mask: bytes) -> NDArray[np.bool_]:
    return np.frombuffer(mask, np.uint8).astype(np.bool_)


def _versions(versions: bytes) -> NDArray[np.int32]:
    return np.frombuffer(versions, "<i4")
