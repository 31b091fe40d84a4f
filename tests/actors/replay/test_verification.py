"""The event logs of a live run are replayed in parts, without the data files (`log.verify`)."""

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from asterism.actors.replay import verification
from asterism.actors.replay.replay import LogReplay
from asterism.actors.replay.verification import RunVerifier
from asterism.actors.runtime.logged_problems import LoggedProblems, ProblemCounts, Purpose, write_problem_counts
from asterism.actors.runtime.wiring import ProblemSets, build_head_deciders
from asterism.bus.addresses import HEAD, ROLLOUT
from asterism.bus.event_log.writer import EventLog
from asterism.configs.run_folder import RunFolder
from asterism.policies.decider import Decider
from asterism.policies.groups.group_starter import ProblemSet, TokenizedProblem
from tests.edited_logs import editing_log
from tests.recorded import write_world_logs
from tests.simulation.test_faults import live
from tests.simulation.world import World

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def world() -> World:
    return live(0)


def load_no_file() -> Sequence[TokenizedProblem]:
    raise AssertionError("the data files must not be read")


def build_logged_problems(world: World, folder: RunFolder, purpose: Purpose, count: int) -> LoggedProblems:
    log = folder.events / f"{ROLLOUT}.sqlite"
    return LoggedProblems(log, world.run, purpose, count, load_no_file, lambda: False)


def build_deciders(world: World, folder: RunFolder, process: str) -> Mapping[str, Decider]:
    if process == ROLLOUT:
        return world.deciders()[ROLLOUT]
    train, test = (each.counts for each in world.problems())
    logged = [build_logged_problems(world, folder, *each) for each in (("train", train), ("evaluate", test))]
    return build_head_deciders(world.run, ProblemSets(*map(ProblemSet, logged, (train, test))))


@pytest.fixture
def folder(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    monkeypatch.setattr(verification, "build_deciders", lambda process, run, at, _: build_deciders(world, at, process))
    folder = write_world_logs(world, tmp_path)
    write_problem_counts(folder, ProblemCounts(*(each.counts for each in world.problems())))
    return folder


def change(log: Path, sql: str) -> None:
    with editing_log(log) as connection:
        connection.execute(sql)


@pytest.mark.parametrize("first_look_s", [0.0, 60.0])
def test_the_logs_of_a_finished_run_replay_without_its_data_files(
    world: World, folder: RunFolder, monkeypatch: pytest.MonkeyPatch, first_look_s: float
) -> None:
    lines: list[str] = []
    looked, catch_up = threading.Event(), LogReplay.catch_up

    def catch_up_and_tell(replay: LogReplay, *, proceed: Callable[[], bool], growing: bool = False) -> None:
        catch_up(replay, proceed=proceed, growing=growing)
        if growing and replay.num_events:
            looked.set()

    monkeypatch.setattr(LogReplay, "catch_up", catch_up_and_tell)
    verifier = RunVerifier(world.run, folder, first_look_s)
    if not first_look_s:
        assert looked.wait(60)
    result = verifier.finish(lines.append)
    assert (result.identical, result.num_events) == (True, sum(len(each.events) for each in world.logs.values()))
    assert ("events, 0 already replayed" in lines[0]) == bool(first_look_s)
    assert "replayed in" in lines[-1]


@pytest.mark.parametrize("process", [HEAD, ROLLOUT])
@pytest.mark.parametrize("first_look_s", [0.0, 60.0])
def test_a_damaged_log_is_found(world: World, folder: RunFolder, process: str, first_look_s: float) -> None:
    log = folder.events / f"{process}.sqlite"
    change(log, "UPDATE decisions SET effects = x'00' WHERE seq = (SELECT max(seq) / 2 FROM decisions)")
    result = RunVerifier(world.run, folder, first_look_s).finish(lambda line: None)
    assert result.identical is False
    assert result.difference is not None
    assert (result.difference.process, result.difference.what) == (process, "effects")


def test_a_complete_replay_follows_a_failure_of_the_verifying_thread(world: World, folder: RunFolder) -> None:
    failed, failing = threading.Event(), pytest.MonkeyPatch()

    def fail(replay: LogReplay, **options: object) -> None:
        failing.undo()
        failed.set()
        raise OSError("the disk does not answer")

    failing.setattr(LogReplay, "catch_up", fail)
    verifier = RunVerifier(world.run, folder, 0.0)
    assert failed.wait(60)
    result = verifier.finish(lambda line: None)
    assert (result.identical, result.num_events) == (True, sum(len(each.events) for each in world.logs.values()))


def test_a_changed_question_in_the_rollout_log_is_found(world: World, folder: RunFolder) -> None:
    """The head's decision to start the group has the fingerprint of the original question."""
    change(
        folder.events / f"{ROLLOUT}.sqlite",
        "UPDATE events SET frame = CAST(replace(frame, 'q:', 'p:') AS BLOB) WHERE kind = 'StartGroup'",
    )
    result = RunVerifier(world.run, folder).finish(lambda line: None)
    assert result.difference is not None
    assert result.difference.process == HEAD


def test_a_growing_log_is_replayed_up_to_its_last_decision(world: World, tmp_path: Path) -> None:
    logged, path = world.logs[ROLLOUT], tmp_path / "rollout-0.sqlite"
    events = logged.events[:30]

    def write(first: int, last: int, *, decided: int) -> None:
        log = EventLog(path)
        for event in events[first:last]:
            log.append(event.time, event.actor, event.sender, event.kind, event.trajectory, event.frame)
        for event in events[first:decided]:
            log.append_decision(event.seq, logged.decisions[event.seq].effects, logged.decisions[event.seq].state)
        log.close()

    write(0, 20, decided=19)
    replay = LogReplay(ROLLOUT, path, world.deciders()[ROLLOUT])
    replay.catch_up(growing=True)
    assert (replay.num_events, replay.num_left, replay.difference) == (19, 1, None)
    decision = logged.decisions[events[19].seq]
    log = EventLog(path)
    log.append_decision(20, b"other", decision.state)
    log.close()
    write(20, 30, decided=30)
    replay.catch_up(growing=True)
    assert replay.difference is not None
    assert (replay.difference.event.seq, replay.num_events) == (20, 20)


def test_a_problem_that_no_process_logged_is_read_from_the_data_file(world: World, tmp_path: Path) -> None:
    log = tmp_path / "rollout-0.sqlite"
    EventLog(log).close()
    polls = iter((True, True, False))
    problems = LoggedProblems(
        log, world.run, "train", (9,), lambda: world.problems().train.problems, lambda: next(polls)
    )
    assert problems[5] == world.problems().train.problems[5]
    assert next(polls, None) is None  # the problems polled the log until it could not grow
