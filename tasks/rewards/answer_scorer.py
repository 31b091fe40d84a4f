"""Scores finished trajectories: the sandbox's grader, reward functions, and their weighted sum."""

import time
from typing import NamedTuple

from bus.messages import AnswerSubmitted
from configs.dialogue_options import DialogueConfig
from configs.schema import RewardConfig
from sandbox.contract import Sandbox
from tasks.rewards.reward_client import RewardClient, RewardFailure
from tasks.rewards.reward_functions import RewardSettings

MATH = "math"  # in reward.functions: the sandbox's grader
CORRECT = "correct"  # component of the grader if there are no reward functions


class Score(NamedTuple):
    reward: float
    components: dict[str, float]
    duration_s: float


class AnswerScorer:
    """Without a configuration it only grades. `checkpoint`: the folder of the tokenizer, for reward functions."""

    def __init__(
        self,
        sandbox: Sandbox,
        config: RewardConfig | None = None,
        dialogue: DialogueConfig | None = None,
        checkpoint: str = "",
    ) -> None:
        config, dialogue = config or RewardConfig(), dialogue or DialogueConfig()
        functions = config.functions or {CORRECT: MATH}
        self._sandbox = sandbox
        self._weights = {name: config.weights.get(name, 1.0) for name in functions}
        self._graded = [name for name, spec in functions.items() if spec == MATH]
        others = {name: spec for name, spec in functions.items() if spec != MATH}
        settings = RewardSettings(others, checkpoint, config.time_limit_s, dialogue.prefill, dialogue.stop_tokens)
        self._client = RewardClient(settings) if others else None

    async def score(self, submission: AnswerSubmitted) -> Score:
        """Raises SandboxFailure for the grader, RewardFailure for a function or if none scores the trajectory."""
        began_s = time.monotonic()
        components: dict[str, float] = {}
        duration_s: float | None = None
        if self._graded:
            correct = 0.0
            if submission.reward_input is None or submission.reward_input.ending == "answered":
                grade = await self._sandbox.grade(submission)
                correct, duration_s = float(grade.correct), grade.duration_s
            components = dict.fromkeys(self._graded, correct)
        if self._client is not None:
            components |= await self._client.score(submission)
            duration_s = None
        scored = self._weights.keys() & components.keys()
        if not scored:
            raise RewardFailure("no reward function scored the trajectory")
        reward = sum(self._weights[name] * components[name] for name in self._weights if name in scored)
        return Score(reward, components, time.monotonic() - began_s if duration_s is None else duration_s)

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
