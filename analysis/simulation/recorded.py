"""A recorded run as something to simulate: its trajectories as a workload, its engines as a cluster.

Read from the event logs of the rollout and of the head (bus.event_log).
"""

from __future__ import annotations

from collections import defaultdict
from itertools import groupby
from math import inf
from pathlib import Path
from typing import NamedTuple

from analysis.simulation.calibration import calibrated, rows_of
from analysis.simulation.model import Cluster
from analysis.simulation.workload import Plan, Turn, Workload, plan_of
from bus.codec import decode
from bus.event_log import read_events
from bus.messages import CodeFinished, EngineJoined, EngineLoadReported, StartGroup, TrajectoryFinished, TurnGenerated


class _Times(NamedTuple):
    """Of one trajectory: when each turn had stopped, and when the last of its calls was answered."""

    stopped: dict[int, float]
    answered: dict[int, float]

    def tool_s(self, turn: int) -> float:
        return max(0.0, self.answered[turn] - self.stopped[turn]) if turn in self.answered else 0.0


def recorded_workload(
    rollout_log: Path, buffer_log: Path, *, response_tokens: int, since: float = -inf, until: float = inf
) -> Workload:
    """All training groups that were started in that time (seconds since the epoch), as if all at once; numbered anew.

    `buffer_log`: of the process that is told of each trajectory's end. A tool's latency is what the trajectory waited,
    from the request to the last result of the turn. What infrastructure lost is left out.
    """
    chosen: dict[int, int] = {}
    times: defaultdict[int, _Times] = defaultdict(lambda: _Times({}, {}))
    turns: dict[int, int] = {}
    for event, _ in read_events(rollout_log, kinds=("StartGroup", "TurnGenerated", "CodeFinished")):
        match decode(event.frame).message:
            case StartGroup(purpose="train") as group if since <= event.time < until:
                for number in range(group.first_trajectory_id, group.first_trajectory_id + group.size):
                    chosen[number] = group.group_id
            case TurnGenerated(trajectory_id=number, turn=turn, finish="stop"):
                times[number].stopped[turn] = event.time
                turns[number] = turn
            case CodeFinished(trajectory_id=number) if number in turns:
                times[number].answered[turns[number]] = event.time
            case _:
                pass
    finished = _finished(buffer_log, chosen)
    plans = [
        _plan(number, each, times[each.trajectory_id], response_tokens)
        for number, each in enumerate(sorted(finished, key=lambda each: (each.group_id, each.trajectory_id)))
    ]
    max_turns = max((len(plan.turns) for plan in plans), default=1)
    return Workload("recorded", tuple(plans), response_tokens, max_turns)


def _finished(log: Path, chosen: dict[int, int]) -> list[TrajectoryFinished]:
    messages = (decode(event.frame).message for event, _ in read_events(log, kinds=("TrajectoryFinished",)))
    return [
        message for message in messages if isinstance(message, TrajectoryFinished) and message.trajectory_id in chosen
    ]


def _plan(number: int, finished: TrajectoryFinished, times: _Times, limit: int) -> Plan:
    runs = [
        (generated == 1, sum(1 for _ in run))
        for generated, run in groupby(finished.loss_mask[finished.prompt_tokens :])
    ]
    turns: list[Turn] = []
    for generated, tokens in runs:
        if generated:
            turns.append(Turn(tokens))
        else:
            turns[-1] = turns[-1]._replace(result_tokens=tokens, tool_s=times.tool_s(len(turns) - 1))
    if finished.ending == "length" and turns:
        last, place = turns[-1], len(turns) - 1
        stopped = place in times.stopped  # it called a tool, whose result had no room any more
        turns[-1] = Turn(last.tokens, times.tool_s(place), limit) if stopped else Turn(last.tokens + limit)
    return plan_of(number, finished.group_id, finished.prompt_tokens, turns, limit)


def recorded_cluster(head_log: Path, *, max_running: int = 512) -> Cluster:
    """The engines that joined first under each name, with costs calibrated from all reports. They must be equal.

    Raises ValueError.
    """
    joined: dict[str, EngineJoined] = {}
    reports: list[EngineLoadReported] = []
    for event, _ in read_events(head_log, kinds=("EngineJoined", "EngineLoadReported")):
        message = decode(event.frame).message
        if isinstance(message, EngineJoined):
            joined.setdefault(message.engine, message)
        elif isinstance(message, EngineLoadReported):
            reports.append(message)
    kinds = {(each.kv_tokens, each.page_tokens) for each in joined.values()}
    if len(kinds) != 1:
        raise ValueError(f"{head_log}: the engines' capacities and pages are not one and the same: {sorted(kinds)}")
    ((kv_tokens, page_tokens),) = kinds
    cost = calibrated(rows_of(reports))
    return Cluster("recorded", len(joined), kv_tokens, cost, page_tokens=page_tokens, max_running=max_running)
