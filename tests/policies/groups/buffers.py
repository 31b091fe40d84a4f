"""A driver for the group buffer, and readers of its effects."""

from collections.abc import Sequence
from typing import Self

from msgspec.structs import replace

from asterism.bus import messages as msg
from asterism.configs.schema.algorithm import GREEDY, RlConfig, RocConfig, Sampling
from asterism.configs.schema.run_config import RunConfig
from asterism.policies.decider import Send
from asterism.policies.groups.group_buffer import GroupBuffer
from asterism.policies.groups.group_starter import ProblemSet, TokenizedProblem
from tests.batches import BatchAssembler, CompleteBatch
from tests.policies.groups.finished import finished

TRAIN = [TokenizedProblem(f"train:{number}", str(number), bytes(8)) for number in range(99)]
MIXED = (1.0, 0.0)


def make_run(**rl: object) -> RunConfig:
    settings: dict[str, object] = {"steps": 9, "prompts": 2, "rollouts": 2, "max_refill_groups": 0, "max_staleness": 1}
    return RunConfig(name="test", rl=RlConfig(**settings | rl), roc=RocConfig(enabled=False))  # pyright: ignore[reportArgumentType]


def make_finished(trajectory_id: int, *versions: int, reward: float = 1.0, group_id: int = 0) -> msg.TrajectoryFinished:
    """Make a trajectory of three prompt tokens, then one generated token of each version."""
    count = 3 + len(versions)
    return replace(
        finished(trajectory_id, reward, group_id=group_id),
        record=msg.TokenRecord(
            prompt_tokens=3,
            token_ids=bytes(4 * count),
            loss_mask=b"\0\0\0" + b"\1" * len(versions),
            logprobs=bytes(4 * count),
            versions=msg.ids_to_bytes([-1, -1, -1, *versions]),
        ),
    )


def list_starts(effects: list[Send]) -> list[msg.StartGroup]:
    return [send.message for send in effects if isinstance(send.message, msg.StartGroup)]


def list_aborts(effects: list[Send]) -> list[msg.GroupAborted]:
    return [send.message for send in effects if isinstance(send.message, msg.GroupAborted)]


def get_collected(effects: list[Send]) -> msg.StepCollected:
    return next(send.message for send in effects if isinstance(send.message, msg.StepCollected))


class BufferDriver:
    """A group buffer, its started groups, and the batches that it has sent."""

    def __init__(
        self, run: RunConfig, train: Sequence[TokenizedProblem] = TRAIN, test: ProblemSet | None = None
    ) -> None:
        self.buffer = GroupBuffer(run, ProblemSet.of_one_task(train), test or ProblemSet.of_one_task(TRAIN[:2]))
        self.groups: dict[int, msg.StartGroup] = {}
        self.batches: list[CompleteBatch] = []
        self._assembler = BatchAssembler()

    @classmethod
    def start(cls, *ended: int, steps: int = 1, **rl: object) -> Self:
        """Request the first steps of a run with these settings, and end the groups in `ended` without stale tokens."""
        driver = cls(make_run(**rl))
        for step in range(1, steps + 1):
            driver.request_step(step)
        for group_id in ended:
            driver.end(group_id, 0)
        return driver

    def request_step(self, step: int, version: int = 0) -> list[Send]:
        return self.decide(msg.StepRequested(step, version))

    def start_step(self, step: int, version: int = 0) -> list[msg.StartGroup]:
        return list_starts(self.request_step(step, version))

    def start_evaluation(
        self, questions: int, sampling: Sampling = GREEDY, label: str = "step_sampled", version: int = 0
    ) -> list[msg.StartGroup]:
        return list_starts(self.decide(msg.EvaluationRequested(label, sampling, questions, version)))

    def decide(self, event: msg.AnyMessage) -> list[Send]:
        effects = list(self.buffer.decide(0.0, event))
        self.groups |= {group.group_id: group for group in list_starts(effects)}
        self.batches += [batch for effect in effects for batch in self._assembler.add(effect.message)]
        return effects

    def end(self, group_id: int, *versions: int, rewards: Sequence[float | None] = MIXED) -> list[Send]:
        """End all trajectories of the group, each with tokens of these versions.

        A trajectory with the reward None ends with an infrastructure failure.
        """
        effects: list[Send] = []
        for tid, reward in enumerate(rewards, self.groups[group_id].first_trajectory_id):
            if reward is None:
                effects += self.decide(msg.TrajectoryFailed(tid, group_id, "sandbox: gone"))
            else:
                effects += self.decide(make_finished(tid, *versions, reward=reward, group_id=group_id))
        return effects
