"""The staleness bound: the maximum age of training tokens, and the treatment of older tokens.

Version v is the policy after step v; step s updates version s - 1. The staleness of a token of
version v in step s is s - 1 - v versions; the bound is `rl.max_staleness`. With the bound 0, all
tokens of a step have the same version: the synchronous algorithm. `rl.stale_tokens` selects the
treatment of a trajectory with older tokens:

    mask  excludes stale tokens from the loss, and drops a trajectory without other tokens
    drop  drops the trajectory, and judges its group without it

The bound, and several versions within one trajectory, come from AReaL (arXiv 2505.24298).
"""

from collections.abc import Iterable
from typing import Literal

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from asterism.bus.messages import ProtocolError, StalenessCounts, TrainingSample, TrajectoryFinished

StaleTokensRule = Literal["mask", "drop"]


def compute_oldest_version(step: int, max_staleness: int) -> int:
    """Return the oldest version that `step` may train on."""
    return step - 1 - max_staleness


def apply_staleness_bound(
    trajectory: TrajectoryFinished, oldest: int, rule: StaleTokensRule
) -> TrajectoryFinished | None:
    """Return the trajectory without loss on tokens of versions before `oldest`, or None if it is dropped."""
    trained = _decode_mask(trajectory.record.loss_mask)
    stale = trained & (_decode_versions(trajectory.record.versions) < oldest)
    if not stale.any():
        return trajectory
    fresh = trained & ~stale
    if rule == "drop" or not fresh.any():
        return None
    return replace(trajectory, record=replace(trajectory.record, loss_mask=fresh.astype(np.uint8).tobytes()))


def check_versions(rows: Iterable[TrainingSample], step: int, max_staleness: int) -> None:
    """Raise ProtocolError if a loss token has a version that `step` may not train on."""
    oldest, newest = compute_oldest_version(step, max_staleness), step - 1
    for row in rows:
        versions = _decode_versions(row.record.versions)[_decode_mask(row.record.loss_mask)]
        outside = versions[(versions < oldest) | (versions > newest)]
        if len(outside):
            allowed = f"version {newest}" if oldest == newest else f"versions {oldest} to {newest}"
            raise ProtocolError(
                f"trajectory {row.trajectory_id} has {len(outside)} tokens of version {outside[0]} to train on: "
                f"step {step} takes {allowed} (rl.max_staleness = {max_staleness})"
            )


def count_masked_tokens(before: TrajectoryFinished, after: TrainingSample) -> int:
    return sum(before.record.loss_mask) - sum(after.record.loss_mask)


def count_other_versions(trajectory: TrajectoryFinished, version: int) -> int:
    """Return the number of generated tokens of other versions."""
    versions = _decode_versions(trajectory.record.versions)[_decode_mask(trajectory.record.loss_mask)]
    return int((versions != version).sum())


def add_staleness(counts: StalenessCounts, rows: Iterable[TrainingSample], version: int) -> StalenessCounts:
    """Add the rows of an update of `version` to `counts`."""
    for row in rows:
        behind = version - _decode_versions(row.record.versions)[_decode_mask(row.record.loss_mask)]
        counts = replace(
            counts,
            tokens=counts.tokens + len(behind),
            versions_behind=counts.versions_behind + int(behind.sum()),
            max_versions_behind=max(counts.max_versions_behind, int(behind.max(initial=0))),
        )
    return counts


def _decode_mask(mask: bytes) -> NDArray[np.bool_]:
    return np.frombuffer(mask, np.uint8).astype(np.bool_)


def _decode_versions(versions: bytes) -> NDArray[np.int32]:
    return np.frombuffer(versions, "<i4")
