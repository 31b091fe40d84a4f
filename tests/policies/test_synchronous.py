"""With the defaults, rollouts that may run ahead of the learner change nothing: the head does what it did without them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from bus.codec import decode
from bus.messages import AnyMessage, Envelope, RunFinished, WeightsHeld, WeightsLoaded
from configs.schema import Evaluation, Rl, Roc, Run
from policies.accounting import Recorder
from policies.group_buffer import GroupBuffer, Problem
from policies.recipe import Recipe

RECORDINGS = (
    Path(__file__).parent / "synchronous"
)  # of whole runs, by the code that knew only the synchronous algorithm
Recording = list[tuple[str, float, bytes, list[bytes]]]  # actor, time, event, effects


@pytest.mark.parametrize("name", ["seed_1_roc", "seed_2_grpo"])
def test_a_recorded_synchronous_run_is_decided_as_it_was(name: str) -> None:
    recording = msgspec.msgpack.decode((RECORDINGS / f"{name}.msgpack").read_bytes(), type=Recording)
    run = Run(
        name="recorded",
        seed=int(name.split("_")[1]),
        rl=Rl(steps=4, prompts=3, rollouts=4, refills=2),
        roc=Roc(enabled=name.endswith("roc")),
        evaluation=Evaluation(questions=3),
    )
    train, test = (
        [Problem(f"{kind}:{number}", str(number), bytes(8)) for number in range(count)]
        for kind, count in (("train", 5), ("test", 3))
    )
    deciders = {
        "buffer": GroupBuffer(run, train, test),
        "recipe": Recipe(4, 3, 1.0, ("generator-0", "generator-1"), run.rl.max_staleness),
        "recorder": Recorder(4),
    }
    assert len(recording) > 100
    loaded = Counter[int]()
    for actor, now, event, effects in recording:
        message: AnyMessage = decode(event).message
        if actor == "recorder" and isinstance(message, WeightsLoaded):
            loaded[message.version] += 1
            if loaded[message.version] < 2:
                continue
            message = WeightsHeld(message.version)
        did = [Envelope("", send.to, send.message) for send in deciders[actor].decide(now, message)]
        assert without_loads(did) == without_loads([decode(effect) for effect in effects])


def without_loads(effects: Sequence[Envelope]) -> list[Envelope]:
    """The recorder was told of each engine's weights then, and is told when all have them now. The launcher heard of the
    run's end from the recipe then, and hears it from the buffer now."""
    kept = [effect for effect in effects if not isinstance(effect.message, WeightsLoaded | WeightsHeld)]
    return [replace(effect, to="") if isinstance(effect.message, RunFinished) else effect for effect in kept]
