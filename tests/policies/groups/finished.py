"""Finished trajectories for the group buffer."""

from typing import Any

from asterism.bus.messages import TokenRecord, TrajectoryFinished


def finished(
    trajectory_id: int, reward: float, *, calls: int = 1, failed: int = 0, opens: int = 1, **fields: Any
) -> TrajectoryFinished:
    """Make a trajectory of three prompt tokens and two generated tokens.

    Unless `fields` has other values, each failed call has a result with an error, and each answer tag is closed.
    """
    closes = fields.get("answer_closes", opens)
    defaults: dict[str, Any] = {
        **{"group_id": 0, "ending": "answered", "turns": 2, "responses_with_error": failed, "answer_closes": closes},
        **{"answer_spans": min(opens, closes), "lease_wait_s": 0.5, "generation_s": 1.0, "tools_s": 0.25},
        **{"grading_s": 0.125, "calls": calls, "calls_failed": failed, "answer_opens": opens},
        "record": TokenRecord(3, bytes(20), b"\x00\x00\x00\x01\x01", bytes(20), bytes(20)),
    }
    return TrajectoryFinished(trajectory_id=trajectory_id, reward=reward, **defaults | fields)
