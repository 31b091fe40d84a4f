"""The logs of bugs that simulated runs have found, each with what must hold when it is read again."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from queue import SimpleQueue
from random import Random

import numpy as np
import pytest

from actors import replay, waits
from actors.generator import Generator
from actors.logged_history import history_of
from actors.recovery import Recovery
from actors.wiring import HEAD, LAUNCHER, ROLLOUT
from bus.codec import decode, encode
from bus.event_log import Event, EventLog
from bus.event_reading import UnusableLog
from bus.in_process import Hub
from bus.lanes import CONTROL
from bus.messages import (
    AnyMessage,
    EngineLeft,
    Envelope,
    LeaseGranted,
    ProtocolError,
    RunFinished,
    StartGroup,
    TrajectoryAborted,
    TrajectoryFailed,
    TrajectoryFinished,
    TurnGenerated,
    TurnRequested,
)
from configs.run_folder import RunFolder
from policies.arbiter import Arbiter
from policies.decider import Decider, Send
from policies.history import course_of
from policies.recipe import Recipe
from tests.fakes import TOKENIZER
from tests.golden.logs import read, world_again
from tests.simulation.clock import run_virtually
from tests.simulation.engines import SayingEngine, Script

End = TrajectoryFinished | TrajectoryFailed | TrajectoryAborted


def decide(decider: Decider, event: Event) -> tuple[AnyMessage, Sequence[Send]]:
    """An event again, and what came of it: nothing if it is refused."""
    message = decode(event.frame).message
    try:
        return message, decider.decide(event.time, message)
    except ProtocolError:
        return message, ()


def keep(folder: RunFolder, process: str, events: Sequence[Event], keep_steps: int = 0) -> Path:
    """The path of an event log of them. One that forgets has a commit for each step and the last events: what is old goes
    with the commits that come later."""
    path, committed = folder.events / f"{process}.sqlite", SimpleQueue[int]()
    log = EventLog(path, keep_steps=keep_steps)
    log.on_commit = committed.put
    for left, event in zip(reversed(range(len(events))), events, strict=True):
        seq = log.append(event.time, event.actor, event.sender, event.kind, event.trajectory, event.frame)
        if keep_steps and (event.kind == "StepTrained" or left < 5):
            while committed.get() < seq:
                pass
    log.close()
    return path


def test_acts_that_waited_for_room_are_sent_in_the_next_life() -> None:
    """The head and the launcher were parted, and the window of 16 was full; then the head was killed. The launcher had
    heard 36 of the 56 frames that these events caused, and the last 16 were all that the head had kept."""
    found, events = read("acts_that_waited_for_room")
    deciders = world_again(found.run).deciders()[HEAD]
    started = [decode(event.frame).message for event in events[: len(deciders)]]
    begin = [encode(Envelope(HEAD, f"{HEAD}/{actor}", start)) for actor, start in zip(deciders, started, strict=True)]
    recovery = Recovery(HEAD, events[0].session, deciders, ("metrics",), found.run.bus.queue_messages)
    recovery.read([(event, None) for event in events], begin)
    number, frames = recovery.links()["launcher", CONTROL]
    assert number == 56
    assert number - len(frames) <= 36


def test_a_turn_that_comes_before_the_weights_waits_for_them() -> None:
    """An engine had been killed and was back; its weights took longer than the turn that it had been given."""
    _, events = read("a_turn_before_the_weights")
    messages = [decode(event.frame) for event in events]
    asked = sum(isinstance(each.message, TurnRequested) for each in messages)

    async def scenario() -> list[AnyMessage]:
        hub = Hub()
        rollout, head = hub.join("rollout-0", 100), hub.join(HEAD, 100)
        engine = SayingEngine(Random(0), Script(Random(0)), kv_tokens=65_536)
        life = max(each.message.life for each in messages if isinstance(each.message, TurnRequested))
        generator = Generator("generator-0", hub.join("generator-0", 100), engine, f"{HEAD}/arbiter", life)
        running = asyncio.create_task(generator.run())
        for event, envelope in zip(events, messages, strict=True):
            await asyncio.sleep(event.time - asyncio.get_running_loop().time())
            sender = head if envelope.sender.startswith(HEAD) else rollout
            await sender.send("generator-0", envelope.message, envelope.sender)
        answers = [(await rollout.receive()).message for _ in range(asked)]
        running.cancel()
        return answers

    answers = run_virtually(scenario())
    generated = [answer for answer in answers if isinstance(answer, TurnGenerated)]
    assert generated
    for answer in generated:
        assert (np.frombuffer(answer.versions, np.int32) >= 0).all()


def test_a_run_is_over_when_everybody_who_was_to_be_stopped_has_ended() -> None:
    """Head and rollout process were parted while the last step's leftovers were to be stopped, and the step was trained on
    meanwhile."""
    found, events = read("trajectories_that_are_stopped_at_the_end")
    deciders = world_again(found.run).deciders()[HEAD]
    under_way, num_finished = set[int](), 0
    for event in events:
        message, sends = decide(deciders[event.actor], event)
        if event.actor == "buffer" and isinstance(message, End):
            under_way.remove(message.trajectory_id)
        for send in sends:
            if isinstance(send.message, StartGroup):
                first = send.message.first_trajectory_id
                under_way.update(range(first, first + send.message.size))
            if isinstance(send.message, RunFinished) and send.to == LAUNCHER:
                assert not under_way
                num_finished += 1
    assert num_finished == 1


def test_who_waits_and_a_state_are_not_made_up_where_events_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All stands still in the third of three steps, and the log keeps one."""
    found, events = read("trajectories_that_are_stopped_at_the_end")
    _, of_rollout = read("trajectories_that_are_stopped_at_the_end.rollout")
    monkeypatch.setattr(waits, "deciders_of", lambda process, run, folder: world_again(run).deciders()[process])  # pyright: ignore
    requested = max(event.time for event in events if event.kind == "StepRequested")
    ended = min(event.time for event in events if event.kind == "TrajectoryFinished" and event.time > requested)
    events, of_rollout = ([each for each in all_ if each.time < ended] for all_ in (events, of_rollout))
    whole, cut = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "cut")
    for folder, keep_steps in ((whole, 0), (cut, 1)):
        keep(folder, ROLLOUT, of_rollout)
        log = keep(folder, HEAD, events, keep_steps)
    assert ("head/buffer", ROLLOUT) in [(wait.who, wait.whom) for wait in waits.waits_of(found.run, whole)]
    with pytest.raises(UnusableLog, match=r"log\.keep_steps has removed events up to number"):
        waits.waits_of(found.run, cut)
    with pytest.raises(UnusableLog, match=r"log\.keep_steps has removed events up to number"):
        replay.replay_before(log, world_again(found.run).deciders()[HEAD], events[-1].time)


def test_no_turn_is_asked_of_an_engine_that_has_left() -> None:
    """The word that it has died came before leases that the arbiter had granted there."""
    found, events = read("grants_on_an_engine_that_has_left")
    (rollout,) = world_again(found.run).deciders()[ROLLOUT].values()
    left: dict[str, int] = {}
    granted = 0
    for event in events:
        message, sends = decide(rollout, event)
        if isinstance(message, EngineLeft):
            left[message.engine] = message.life
        granted += isinstance(message, LeaseGranted) and message.life <= left.get(message.engine, 0)
        for send in sends:
            assert not isinstance(send.message, TurnRequested) or send.message.life > left.get(send.to, 0)
    assert granted == 2


def test_a_trajectory_that_began_after_an_engine_had_left_is_found_in_its_log_as_it_went(tmp_path: Path) -> None:
    """Both leases there were granted to trajectory 3, which began after the word that the engine had died."""
    found, events = read("grants_on_an_engine_that_has_left")
    folder = RunFolder(tmp_path)
    keep(folder, ROLLOUT, events)
    (rollout,) = world_again(found.run).deciders()[ROLLOUT].values()
    ends = [send.message for event in events for send in decide(rollout, event)[1] if isinstance(send.message, End)]
    assert course_of(world_again(found.run).rules, TOKENIZER, history_of(folder, 3)).end == ends[-1]
    assert ends[-1].trajectory_id == 3


def test_the_late_word_that_an_engine_has_left_does_no_harm_to_its_next_life() -> None:
    """Everybody was killed at once. The next life of generator-0 joined before the launcher's word of the last one came."""
    found, events = read("a_late_word_of_an_engine")
    deciders = world_again(found.run).deciders()[HEAD]
    for event in events:
        decide(deciders[event.actor], event)
    arbiter, recipe = deciders["arbiter"], deciders["recipe"]
    assert isinstance(arbiter, Arbiter) and isinstance(recipe, Recipe)
    lives = {"generator-0": 2, "generator-1": 1}
    assert {name: engine.life for name, engine in arbiter.ledger.engines.items()} == lives
    assert {name: engine.life for name, engine in recipe.state.engines.items()} == lives
