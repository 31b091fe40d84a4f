"""Finished trajectories for the group buffer."""

from asterism.bus.messages import ReleaseCounts, TokenRecord, TrajectoryFinished


def finished(
    trajectory_id: int,
    reward: float,
    *,
    group_id: int = 0,
    calls: int = 1,
    failed: int = 0,
    mentions: int | None = None,
    opens: int = 1,
    closes: int | None = None,
    spans: int | None = None,
    release: ReleaseCounts | None = None,
    turns: int = 2,
    components: dict[str, float] | None = None,
) -> TrajectoryFinished:
    """Make a trajectory of three prompt tokens and two generated tokens."""
    return TrajectoryFinished(
        trajectory_id=trajectory_id,
        group_id=group_id,
        reward=reward,
        ending="answered",
        record=TokenRecord(3, bytes(20), b"\x00\x00\x00\x01\x01", bytes(20), bytes(20)),
        turns=turns,
        calls=calls,
        calls_failed=failed,
        responses_with_error=failed if mentions is None else mentions,
        answer_opens=opens,
        answer_closes=opens if closes is None else closes,
        lease_wait_s=0.5,
        generation_s=1.0,
        tools_s=0.25,
        grading_s=0.125,
        components=components or {},
        answer_spans=min(opens, opens if closes is None else closes) if spans is None else spans,
        release=release,
    )
