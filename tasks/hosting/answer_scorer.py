"""Scores finished trajectories of one task: a weighted sum of the sandbox's grader, the environment and reward
functions."""

import time
from typing import NamedTuple

from asterism.bus.messages import AnswerSubmitted, add_by_name
from asterism.configs.schema.tasks import RewardConfig
from asterism.policies.tools.task_description import MATH, TaskDescription, list_reward_functions
from asterism.sandbox.contract import CodeSandbox
from asterism.tasks.hosting.host_pool import HostPool
from asterism.tasks.hosting.host_process import HostFailure


class AnswerScore(NamedTuple):
    reward: float
    components: dict[str, float]
    duration_s: float


class AnswerScorer:
    """The scorer of a task. `pool` has the reward functions and the instances, or is None for a task with neither."""

    def __init__(
        self,
        sandbox: CodeSandbox,
        config: RewardConfig,
        description: TaskDescription,
        pool: HostPool | None = None,
    ) -> None:
        functions = list_reward_functions(config, description)
        self._sandbox, self._pool = sandbox, pool
        self._weights = config.weights
        self._functions = tuple(functions)
        self._graded = [name for name, spec in functions.items() if spec == MATH]
        self._has_functions = len(self._graded) < len(functions)
        self._has_instances = description.has_instances

    async def score(self, submission: AnswerSubmitted) -> AnswerScore:
        """Score a trajectory. Raises SandboxFailure for the grader, HostFailure if a function fails or none scores."""
        began_s = time.monotonic()
        rewards = dict(submission.rewards)
        components: dict[str, float] = {}
        duration_s: float | None = None
        if self._graded:
            correct = 0.0
            if submission.reward_input is None or submission.reward_input.ending == "answered":
                grade = await self._sandbox.grade(submission)
                correct, duration_s = float(grade.correct), grade.duration_s
            components = dict.fromkeys(self._graded, correct)
        if self._pool is not None and (self._has_functions or self._has_instances):
            scored = await self._pool.score(submission)
            components |= scored.components
            rewards = add_by_name(rewards, scored.environment)
            duration_s = None
        rewards = add_by_name(rewards, {name: components[name] for name in self._functions if name in components})
        if not rewards and not self._has_instances:
            raise HostFailure("no reward function scored the trajectory")
        reward = sum(self._weights.get(name, 1.0) * value for name, value in rewards.items())
        elapsed_s = time.monotonic() - began_s if duration_s is None else duration_s
        return AnswerScore(reward, {**submission.metrics, **components, **rewards}, elapsed_s)
