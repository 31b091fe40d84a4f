"""Logs of bugs that simulated runs have found. A replay of each log must keep the invariant that the bug broke."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue
from random import Random

import numpy as np
import pytest

from asterism.actors.cli.log import waits_command
from asterism.actors.generator import Generator
from asterism.actors.replay import replay
from asterism.actors.replay.replay import replay_trajectory
from asterism.actors.runtime.decider_loop import decide_event, get_trajectory_ids
from asterism.actors.runtime.recovery import Recovery
from asterism.bus import messages as msg
from asterism.bus.addresses import HEAD, LAUNCHER, ROLLOUT
from asterism.bus.codec import decode, encode
from asterism.bus.event_log.reader import UnusableLog
from asterism.bus.event_log.records import Event
from asterism.bus.event_log.writer import EventLog
from asterism.bus.lanes import CONTROL
from asterism.bus.transport.in_process import Hub
from asterism.configs.run_folder import RunFolder
from asterism.policies.arbiter.arbiter import Arbiter
from asterism.policies.decider import Decider, Send
from asterism.policies.recipe import Recipe
from asterism.policies.rollout.rollout import Rollout
from tests.golden.logs import read, rebuild_world
from tests.simulation.clock import run_virtually
from tests.simulation.engines import TURN_TEXTS, Script, ScriptedEngine


def redecide(decider: Decider, event: Event) -> tuple[msg.AnyMessage, Sequence[Send]]:
    decided = decide_event(decider, decode(event.frame), event.time)
    return decided.message, decided.sends


def write_log(folder: RunFolder, process: str, events: Sequence[Event], keep_steps: int = 0) -> Path:
    """Write an event log and return its path. With `keep_steps`, wait for commits, which remove old events."""
    path, committed = folder.events / f"{process}.sqlite", SimpleQueue[int]()
    log = EventLog(path, keep_steps=keep_steps)
    log.on_commit = committed.put
    for left, event in zip(reversed(range(len(events))), events, strict=True):
        trajectories = get_trajectory_ids(decode(event.frame).message)
        fields = (event.time, event.actor, event.sender, event.kind, trajectories)
        seq = log.append(*fields, event.frame, epoch=event.epoch, number=event.number)
        if keep_steps and (event.kind == "StepTrained" or left < 5):
            while committed.get() < seq:
                pass
    log.close()
    return path


def test_effects_that_waited_for_queue_space_are_sent_after_recovery() -> None:
    """The head was killed during a partition from the launcher, with a full window of 16 frames.

    The launcher had received 36 of the 56 frames of these events, and the head had kept only the last 16.
    """
    source, events = read("effects_that_waited_for_queue_space")
    deciders = rebuild_world(source.run).deciders()[HEAD]
    started = [decode(event.frame).message for event in events[: len(deciders)]]
    begin = [
        encode(msg.Envelope(HEAD, f"{HEAD}/{actor}", start)) for actor, start in zip(deciders, started, strict=True)
    ]
    recovery = Recovery(HEAD, events[0].epoch, deciders, ("metrics",), source.run.bus.queue_messages)
    recovery.replay([(event, None) for event in events], begin)
    number, frames = recovery.build_link_state()["launcher", CONTROL]
    assert number == 56
    assert number - len(frames) <= 36


def test_a_turn_waits_for_the_first_weights_of_its_engine() -> None:
    """In the log, a restarted engine receives a turn before its weights."""
    _, events = read("turn_before_the_weights")
    messages = [decode(event.frame) for event in events]
    num_requested = sum(isinstance(each.message, msg.TurnRequested) for each in messages)

    async def scenario() -> list[msg.AnyMessage]:
        hub = Hub()
        rollout, head = hub.join("rollout-0", 100), hub.join(HEAD, 100)
        engine = ScriptedEngine(Random(0), Script(Random(0), TURN_TEXTS), kv_tokens=65_536)
        incarnation = max(each.message.incarnation for each in messages if isinstance(each.message, msg.TurnRequested))
        generator = Generator("generator-0", hub.join("generator-0", 100), engine, f"{HEAD}/arbiter", incarnation)
        running = asyncio.create_task(generator.run())
        for event, envelope in zip(events, messages, strict=True):
            await asyncio.sleep(event.time - asyncio.get_running_loop().time())
            sender = head if envelope.sender.startswith(HEAD) else rollout
            await sender.send("generator-0", envelope.message, envelope.sender)
        answers = [(await rollout.receive()).message for _ in range(num_requested)]
        running.cancel()
        return answers

    answers = run_virtually(scenario())
    generated = [answer for answer in answers if isinstance(answer, msg.TurnGenerated)]
    assert generated
    for answer in generated:
        assert (np.frombuffer(answer.versions, np.int32) >= 0).all()


def test_a_run_finishes_after_all_aborted_trajectories_have_ended() -> None:
    """The last step was trained, and its surplus was aborted, during a partition of head and rollout."""
    source, events = read("trajectories_aborted_at_the_end")
    deciders = rebuild_world(source.run).deciders()[HEAD]
    in_flight, num_finished = set[int](), 0
    for event in events:
        message, sends = redecide(deciders[event.actor], event)
        if event.actor == "buffer" and isinstance(message, msg.TrajectoryEnd):
            in_flight.remove(message.trajectory_id)
        for send in sends:
            if isinstance(send.message, msg.StartGroup):
                first = send.message.first_trajectory_id
                in_flight.update(range(first, first + send.message.size))
            if isinstance(send.message, msg.RunFinished) and send.to == LAUNCHER:
                assert not in_flight
                num_finished += 1
    assert num_finished == 1


def test_waits_and_states_are_refused_after_removed_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run stalls in the last of three steps, and the log keeps one step."""
    source, events = read("trajectories_aborted_at_the_end")
    _, rollout_events = read("trajectories_aborted_at_the_end.rollout")
    build = lambda process, run, folder: rebuild_world(run).deciders()[process]  # pyright: ignore # noqa: E731
    monkeypatch.setattr(waits_command, "build_deciders", build)  # pyright: ignore
    requested = max(event.time for event in events if event.kind == "StepRequested")
    ended = min(event.time for event in events if event.kind == "TrajectoryFinished" and event.time > requested)
    events, rollout_events = ([each for each in all_ if each.time < ended] for all_ in (events, rollout_events))
    whole, cut = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "cut")
    for folder, keep_steps in ((whole, 0), (cut, 1)):
        write_log(folder, ROLLOUT, rollout_events)
        log = write_log(folder, HEAD, events, keep_steps)
    assert ("head/buffer", ROLLOUT) in [
        (wait.waiter, wait.awaited) for wait in waits_command.find_waits(source.run, whole)
    ]
    with pytest.raises(UnusableLog, match=r"log\.keep_steps has removed events up to number"):
        waits_command.find_waits(source.run, cut)
    with pytest.raises(UnusableLog, match=r"log\.keep_steps has removed events up to number"):
        replay.replay_before(log, rebuild_world(source.run).deciders()[HEAD], events[-1].time)


def test_no_turn_is_requested_from_a_departed_engine() -> None:
    """The rollout received EngineLeft before leases that the arbiter had granted on the engine."""
    source, events = read("leases_on_a_departed_engine")
    (rollout,) = rebuild_world(source.run).deciders()[ROLLOUT].values()
    left: dict[str, int] = {}
    granted = 0
    for event in events:
        message, sends = redecide(rollout, event)
        if isinstance(message, msg.EngineLeft):
            left[message.engine] = message.incarnation
        granted += isinstance(message, msg.LeaseGranted) and message.incarnation <= left.get(message.engine, 0)
        for send in sends:
            assert not isinstance(send.message, msg.TurnRequested) or send.message.incarnation > left.get(send.to, 0)
    assert granted == 2


def test_a_trajectory_replays_with_leases_on_a_departed_engine(tmp_path: Path) -> None:
    """Both leases on the departed engine were granted to trajectory 3, which started after EngineLeft."""
    source, events = read("leases_on_a_departed_engine")
    (rollout,) = rebuild_world(source.run).deciders()[ROLLOUT].values()
    assert isinstance(rollout, Rollout)
    end = replay_trajectory(write_log(RunFolder(tmp_path), ROLLOUT, events), rollout, 3).end
    assert isinstance(end, msg.TrajectoryFinished)


def test_a_stale_engine_left_does_not_affect_the_next_incarnation() -> None:
    """After a kill of all processes, generator-0 joined again before EngineLeft of its previous incarnation arrived."""
    source, events = read("stale_engine_left")
    deciders = rebuild_world(source.run).deciders()[HEAD]
    for event in events:
        redecide(deciders[event.actor], event)
    arbiter, recipe = deciders["arbiter"], deciders["recipe"]
    assert isinstance(arbiter, Arbiter) and isinstance(recipe, Recipe)
    incarnations = {"generator-0": 2, "generator-1": 1}
    assert {name: engine.incarnation for name, engine in arbiter.ledger.engines.items()} == incarnations
    assert {name: engine.incarnation for name, engine in recipe.state.engines.items()} == incarnations
