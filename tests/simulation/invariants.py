"""Invariants of every simulated run, with or without faults."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from math import isclose
from typing import TypeVar

from asterism.actors.runtime.decider_loop import decide_event
from asterism.bus import messages as msg
from asterism.bus.addresses import HEAD, ROLLOUT, parse_process
from asterism.bus.codec import decode
from asterism.bus.event_log.records import Event
from asterism.bus.lanes import select_lane
from asterism.policies.arbiter.arbiter import Arbiter
from asterism.policies.decider import Decider
from asterism.policies.groups.group_buffer import GroupBuffer
from asterism.policies.rollout.rollout import Rollout
from tests.simulation.world import World

ENDS = (msg.TrajectoryFinished, msg.TrajectoryFailed, msg.TrajectoryAborted)
T = TypeVar("T")
CAUSES = {"engine left", "engine", "executor left", "sandbox", "grader", "environment", "reward"}


def check(world: World) -> None:
    check_each_trajectory_ends_once(world)
    check_the_steps(world)
    check_the_links(world)
    check_the_replay(world)
    check_the_engines(world)


def launches(world: World, process: str) -> list[list[Event]]:
    """Group the events of a process by launch, without refused and undecided events."""
    log, found = world.logs[process], list[list[Event]]()
    sessions: list[int] = []
    for event in log.events:
        if event.kind == "RunStarted" and event.epoch not in sessions:
            sessions.append(event.epoch)
            found.append([])
        decision = log.decisions.get(event.seq)
        if decision is not None and not decision.is_refused:
            found[-1].append(event)
    return found


def messages(events: Sequence[Event]) -> Iterator[msg.AnyMessage]:
    return (decode(event.frame).message for event in events)


def select(events: Sequence[Event], *kinds: type[T]) -> list[T]:
    """Return the messages of these kinds in the events."""
    return [message for message in messages(events) if isinstance(message, kinds)]


def check_each_trajectory_ends_once(world: World) -> None:
    """Check that each started trajectory ends once in the last launch, and at most once in earlier launches."""
    started = [
        [group.first_trajectory_id + place for group in select(events, msg.StartGroup) for place in range(group.size)]
        for events in launches(world, ROLLOUT)
    ]
    received = [select(events, *ENDS) for events in launches(world, HEAD)]
    ended = [Counter(end.trajectory_id for end in ends) for ends in received]
    assert all(count == 1 for ends in ended for count in ends.values())
    assert Counter(started[-1]) == ended[-1]
    assert len(started[-1]) == len(set(started[-1]))
    ends = [end for ends in received for end in ends]
    assert world.run.rl.group_oversampling > 1 or not any(isinstance(end, msg.TrajectoryAborted) for end in ends)
    assert {end.cause.partition(":")[0] for end in ends if isinstance(end, msg.TrajectoryFailed)} <= CAUSES


def check_the_counts(world: World) -> None:
    """Check that the metrics count each end of a trajectory, if the run has one launch.

    A run has a second launch if every trajectory of an evaluation fails, or if its launcher is killed.
    """
    if world.deaths["launcher"]:
        return
    groups = select(world.logs[ROLLOUT].events, msg.StartGroup)
    training = {group.group_id for group in groups if group.purpose == "train"}
    (received,) = launches(world, HEAD)
    ends = Counter(type(each) for each in select(received, *ENDS) if each.group_id in training)
    steps = [line.values for line in world.metrics if line.kind == "step"]
    lengths = [line.values for line in world.metrics if line.kind == "lengths"]
    late = sum(values["late_trajectories"] for values in lengths)
    counted = sum(values["trajectories"] + values["trajectories_failed"] for values in steps)
    assert counted + late == ends[msg.TrajectoryFinished] + ends[msg.TrajectoryFailed]
    assert sum(values["aborted_trajectories"] for values in lengths) == ends[msg.TrajectoryAborted]
    for values in steps:
        assert isclose(values["rollout_s"] + values["train_s"] + values["weights_s"], values["step_s"], abs_tol=1e-6)


def check_the_steps(world: World) -> None:
    """Check that each step is trained once and in order, and that no trajectory is trained on twice."""
    steps = list(range(1, world.run.rl.steps + 1))
    assert [batch.step for batch in world.batches] == steps
    written = [line.step for line in world.metrics if line.kind == "step"]
    assert written == [step for step in steps if step in written or step not in world.steps_without_metrics]
    subjects = Counter((line.kind, line.step, line.label) for line in world.metrics)
    assert set(subjects.values()) <= {1}  # lines can be missing if a run resumes after its last step
    rows = Counter(row.trajectory_id for row in world.disk.rows())
    assert not [trajectory for trajectory, count in rows.items() if count > 1]


def check_the_links(world: World) -> None:
    """Check that the message numbers of each link are consecutive within each session of each log."""
    if world.faults.echoes:
        return
    for process, log in world.logs.items():
        links: dict[tuple[str, str], list[tuple[int, int]]] = {}
        for event in log.events:
            if parse_process(event.sender) != process:
                link = (parse_process(event.sender), select_lane(event.kind))
                links.setdefault(link, []).append((event.epoch, event.number))
        for link, numbers in links.items():
            assert numbers[0][1] == 0, f"{link} to {process} begins with {numbers[0]}"
            for (session, number), following in pairwise(numbers):
                expected = (session, number + 1) if following[0] == session else (following[0], 0)
                assert following == expected and following[0] >= session, (
                    f"{link} to {process}: {following} after {session, number}"
                )


def replay(world: World, deciders: Mapping[str, Mapping[str, Decider]]) -> Iterator[Decider]:
    """Replay all events. Compare effects, state and refusals with the log. Yield the decider after each event.

    The decisions on the last events before a kill can be missing in the log.
    """
    for process, log in world.logs.items():
        for event in log.events:
            decider = deciders[process][event.actor]
            again = decide_event(decider, decode(event.frame), event.time)
            difference = again.find_difference(log.decisions.get(event.seq))
            assert not difference, f"event {event.seq} of {process}: {event.kind} to {event.actor}: other {difference}"
            yield decider


def check_the_replay(world: World) -> None:
    """Check that a replay repeats all decisions and refusals, and that leases fit their engine after each event.

    At the end no trajectory, lease, call or step is open, and the ledger has the current
    incarnation of each engine.
    """
    deciders = world.deciders()
    for decider in replay(world, deciders):
        if isinstance(decider, Arbiter) and world.run.arbiter.policy in ("worst_case", "kv_lookahead"):
            assert all(0 <= each.leased_pages <= each.total_pages for each in decider.ledger.engines.values())
    rollout, arbiter, buffer = deciders[ROLLOUT][ROLLOUT], deciders[HEAD]["arbiter"], deciders[HEAD]["buffer"]
    assert isinstance(rollout, Rollout) and isinstance(arbiter, Arbiter) and isinstance(buffer, GroupBuffer)
    assert not rollout.trajectories and not rollout.waiting_for_executor
    assert all(load.open_calls == 0 for load in rollout.placement.loads.values())
    assert not arbiter.ledger.accounts
    assert {name: engine.incarnation for name, engine in arbiter.ledger.engines.items()} == world.engine_incarnations
    assert all(engine.leased_pages == 0 for engine in arbiter.ledger.engines.values())
    assert not (buffer.state.steps or buffer.state.aborting or buffer.state.evaluation)


def check_the_engines(world: World) -> None:
    """Check that no engine has a running turn or a cached trajectory at the end."""
    for name, engine in world.engines.items():
        assert not engine.running, name
        assert not engine.cached, name


def count_resumes(world: World) -> int:
    received = [event for event in world.logs[HEAD].events if event.actor == "recipe"]
    return len(select(received, msg.RunStarted)) - 1
