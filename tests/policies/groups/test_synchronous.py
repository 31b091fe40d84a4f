"""With the default settings, the head reproduces runs of the purely synchronous code."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from asterism.bus import messages as msg
from asterism.bus.codec import decode
from asterism.configs.schema.algorithm import EvaluationConfig, RlConfig, RocConfig
from asterism.configs.schema.health import HealthConfig
from asterism.configs.schema.run_config import RunConfig
from asterism.policies.groups.group_buffer import GroupBuffer
from asterism.policies.groups.group_starter import ProblemSet, TokenizedProblem
from asterism.policies.recipe import Recipe
from asterism.policies.recorder import Recorder
from asterism.policies.step_evaluations import EvaluationPlan
from tests.batches import BatchAssembler, CompleteBatch

RECORDINGS = Path(__file__).parent / "synchronous"  # recordings of whole runs of the purely synchronous code
Recording = list[tuple[str, float, bytes, list[bytes]]]  # actor, time, event, effects


@pytest.mark.parametrize("name", ["seed_1_roc", "seed_2_grpo"])
def test_a_recorded_synchronous_run_is_reproduced(name: str) -> None:
    recording = msgspec.msgpack.decode((RECORDINGS / f"{name}.msgpack").read_bytes(), type=Recording)
    run = RunConfig(
        name="recorded",
        seed=int(name.split("_")[1]),
        rl=RlConfig(steps=4, prompts=3, rollouts=4, max_refill_groups=2),
        roc=RocConfig(enabled=name.endswith("roc"), floor=1e-3),
        evaluation=EvaluationConfig(questions=3),
    )
    train, test = (
        [TokenizedProblem(f"{kind}:{number}", str(number), bytes(8)) for number in range(count)]
        for kind, count in (("train", 5), ("test", 3))
    )
    deciders = {
        "buffer": GroupBuffer(run, ProblemSet.of_one_task(train), ProblemSet.of_one_task(test)),
        "recipe": Recipe(EvaluationPlan(4, 3), ("generator-0", "generator-1"), run.rl.max_staleness),
        "recorder": Recorder(4, HealthConfig(masked_trajectories="off")),  # trajectories of the recordings fail
    }
    assert len(recording) > 100
    loaded, assembler = Counter[int](), BatchAssembler()
    for actor, now, event, effects in recording:
        message: msg.AnyMessage = decode(event).message
        if actor == "recorder" and isinstance(message, msg.WeightsLoaded):
            loaded[message.version] += 1
            if loaded[message.version] < 2:
                continue
            message = msg.WeightsSynced(message.version)
        sends = deciders[actor].decide(now, message)
        sends = [
            send for send in sends if not isinstance(send.message, msg.FailureReported)
        ]  # FailureReported is newer than the recordings
        did = [msg.Envelope("", send.to, send.message) for send in sends]
        batches = [batch for each in did for batch in assembler.add(each.message)]
        assert batches == [batch for effect in effects for batch in decode_batch(effect)]
        recorded = [decode(effect) for effect in effects if not decode_batch(effect)]
        assert without_loads(did) == without_loads(recorded)


def decode_batch(effect: bytes) -> list[CompleteBatch]:
    """Return the batch of an effect, if it has one. In the recordings, BatchReady contains the samples."""
    _, _, (kind, *fields) = msgspec.msgpack.decode(effect)
    if kind != "BatchReady":
        return []
    step, samples = msgspec.convert(fields, tuple[int, tuple[msg.TrainingSample, ...]])
    return [CompleteBatch(step, samples)]


def without_loads(effects: Sequence[msg.Envelope]) -> list[msg.Envelope]:
    """Remove the known differences: messages about weights and groups, and the receiver of RunFinished.
    The caller compares batches."""
    left_out = msg.WeightsLoaded | msg.WeightsSynced | msg.GroupJudged | msg.GroupAccepted | msg.BatchReady
    kept = [effect for effect in effects if not isinstance(effect.message, left_out)]
    return [replace(effect, to="") if isinstance(effect.message, msg.RunFinished) else effect for effect in kept]
