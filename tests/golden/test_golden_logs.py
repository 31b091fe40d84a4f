"""The logs of bugs that simulated runs have found, each with what must hold when it is read again."""

from __future__ import annotations

import asyncio
from random import Random

import numpy as np

from actors.generator import Generator
from actors.problems import Problems
from actors.recovery import Recovery
from actors.wiring import HEAD, head_deciders
from bus.codec import decode, encode
from bus.in_process import Hub
from bus.lanes import CONTROL
from bus.messages import Envelope, TurnGenerated, TurnRequested
from policies.group_buffer import Problem
from policies.record import ids_to_bytes
from tests.golden.logs import read
from tests.simulation.clock import run_virtually
from tests.simulation.engines import SayingEngine, Script


def test_acts_that_waited_for_room_are_sent_in_the_next_life() -> None:
    """The head and the launcher were parted, and the window of 16 was full; then the head was killed. The launcher had
    heard 36 of the 56 frames that these events caused, and the last 16 were all that the head had kept."""
    found, events = read("acts_that_waited_for_room")
    made = [Problem(f"q:{number}", "2", ids_to_bytes([65, 66, number])) for number in range(9)]
    deciders = head_deciders(found.run, Problems(made, made[:4]))
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

    async def scenario() -> list[object]:
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
