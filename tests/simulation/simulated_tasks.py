"""The host processes of tasks under a virtual clock. The nth call of an instance returns n."""

import asyncio
from collections import defaultdict
from random import Random

from asterism.bus import messages as msg
from asterism.policies.tools.task_description import TaskDescriptions
from asterism.tasks.hosting.answer_scorer import AnswerScore
from asterism.tasks.hosting.host_pool import CallResult
from asterism.tasks.hosting.host_process import HostFailure
from asterism.tasks.hosting.task_services import TaskServices


class SimulatedTasks(TaskServices):
    """Fake host processes. Calls and scores fail with the probability `failure_rate`."""

    def __init__(self, random: Random, failure_rate: float, descriptions: TaskDescriptions) -> None:
        super().__init__({}, {})
        self._random, self._failure_rate, self._descriptions = random, failure_rate, descriptions
        self._instances: dict[int, int | None] = {}  # number of calls by trajectory; None if the instance is lost
        self._turns: defaultdict[int, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def call(self, request: msg.EnvironmentCalled) -> CallResult:
        async with self._turns[request.trajectory_id]:
            await self._work()
            outcome = self._open(request) if request.call == msg.OPENING_CALL else self._advance(request)
            return CallResult(outcome, 0.1)

    def _open(self, request: msg.EnvironmentCalled) -> msg.EnvironmentOutcome:
        assert request.trajectory_id not in self._instances, "an instance was opened twice"
        self._instances[request.trajectory_id] = 0
        return msg.Observation("opened")

    def _advance(self, request: msg.EnvironmentCalled) -> msg.EnvironmentOutcome:
        count = self._instances[request.trajectory_id]  # a call before the opening is a KeyError
        if count is None:
            raise HostFailure("the process that had the instance died")
        self._instances[request.trajectory_id] = count + 1
        if request.method != "step" and self._random.random() < 0.1:
            return msg.EnvironmentRaised(f"seen {count + 1}")
        return msg.Observation(f"seen {count + 1}", self._random.random() < 0.1, {"seen": 0.5})

    async def _work(self) -> None:
        await asyncio.sleep(self._random.choice([0.01, 0.1, 4.0]))
        if self._random.random() < self._failure_rate:
            raise HostFailure("gone")

    def restore(self, message: msg.EnvironmentRestored) -> None:
        assert message.trajectory_id not in self._instances, "an instance was restored twice"
        assert message.calls[0].method == ""
        is_replayable = self._descriptions[message.task].is_replayable
        self._instances[message.trajectory_id] = len(message.calls) - 1 if is_replayable else None

    async def repeat(self, message: msg.EnvironmentRestored) -> msg.EnvironmentHistory:
        raise NotImplementedError

    async def score(self, submission: msg.AnswerSubmitted) -> AnswerScore:
        await self._work()
        if self._instances.get(submission.trajectory_id, 0) is None:
            raise HostFailure("the process that had the instance died")
        rewards = submission.rewards or {"correct": float(self._random.random() < 0.5)}
        return AnswerScore(sum(rewards.values()), rewards, 0.01)

    def end(self, trajectory_id: int) -> None:
        self._instances.pop(trajectory_id, None)

    async def close(self) -> None:
        pass
