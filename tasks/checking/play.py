"""Plays a script with a task: the decisions are those of a rollout, without limits of tokens and turns."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NoReturn

import msgspec
from msgspec.structs import replace

from asterism.bus.messages import (
    AnsweredCall,
    AnswerSubmitted,
    CodeRequested,
    EnvironmentOutcome,
    EnvironmentRaised,
    EnvironmentTimedOut,
    StartGroup,
    TrajectoryFailed,
    TurnGenerated,
    TurnRequested,
    bytes_to_ids,
    digest_outcome,
    ids_to_bytes,
)
from asterism.configs.schema.algorithm import Sampling
from asterism.engine.data.datasets import DatasetProblem
from asterism.engine.data.task_inputs import encode_row
from asterism.policies.rollout import transitions
from asterism.sandbox.contract import SandboxFailure
from asterism.tasks.checking.turn_scripts import TurnScript
from asterism.tasks.hosting.host_process import HostFailure
from asterism.tasks.solo_driver import SoloDriver, SoloEnd, SoloResult, SoloTask

UNLIMITED = 1 << 30
CallStatus = Literal["ok", "raised", "timed out", "refused"]


class PlayedCall(msgspec.Struct, frozen=True):
    """A call of a tool, or an answer of a dialogue."""

    method: str  # empty for a refused call
    arguments: str  # JSON
    status: CallStatus
    text: str  # text for the model
    duration_s: float = 0.0
    rewards: dict[str, float] = {}
    stops: bool = False  # the call ended the trajectory


class PlayedTurn(msgspec.Struct, frozen=True):
    text: str  # the assistant's text, after the prefill
    calls: list[PlayedCall]


@dataclass
class Play:
    """One trajectory, complete after `play_script`."""

    row: str  # "FILE:ROW"
    script: TurnScript
    prompt_ids: list[int] = field(default_factory=list[int])
    prompt: str = ""
    turns: list[PlayedTurn] = field(default_factory=list[PlayedTurn])
    opening_s: float | None = None
    ending: str = ""
    response_tokens: int = 0
    reward: float | None = None
    components: dict[str, float] = field(default_factory=dict[str, float])
    scoring_s: float | None = None
    failed_at: Literal["", "opening", "call", "reward"] = ""
    failure: str = ""
    outcomes: list[AnsweredCall] = field(default_factory=list[AnsweredCall])
    texts: list[str] = field(default_factory=list[str])  # texts of `outcomes`

    @property
    def has_timeout(self) -> bool:
        return any(call.status == "timed out" for turn in self.turns for call in turn.calls)


async def play_script(task: SoloTask, problem: DatasetProblem, script: TurnScript, trajectory_id: int) -> Play:
    """Play a script, and close the instance at the end."""
    player = _Player(task, Play(problem.name, script), trajectory_id)
    try:
        await player.run(problem)
    finally:
        task.services.end(trajectory_id)
        await task.sandbox.end_notebook(trajectory_id)
    return player.play


class _PlayFailed(Exception):
    """The task's code or the sandbox failed; the play records the cause."""


class _Player:
    """A SoloListener that generates the turns of a script, and scores the answer."""

    def __init__(self, task: SoloTask, play: Play, trajectory_id: int) -> None:
        self._task, self._trajectory_id, self.play = task, trajectory_id, play
        self._script, self._text = iter(play.script.turns), ""

    async def run(self, problem: DatasetProblem) -> None:
        group = self._build_group(problem)
        driver = SoloDriver(self._task, self, UNLIMITED)
        with contextlib.suppress(_PlayFailed):
            end = await driver.play(*transitions.start(self._task.rules, group, self._trajectory_id, 0.0))
            await self._end(end)
        record = driver.trajectory.record
        self.play.prompt_ids = bytes_to_ids(record.token_ids)[: record.prompt_tokens]
        self.play.prompt = self._task.tokenizer.decode(self.play.prompt_ids)
        self.play.response_tokens = record.response_tokens

    def _build_group(self, problem: DatasetProblem) -> StartGroup:
        prompt_ids = self._task.rules.renderer.render_prompt(problem.question)
        return StartGroup(
            group_id=0,
            purpose="train",
            problem=problem.name,
            ground_truth=problem.ground_truth,
            prompt_ids=ids_to_bytes(prompt_ids),
            size=1,
            first_trajectory_id=self._trajectory_id,
            sampling=Sampling(),
            seed=0,
            row=encode_row(problem) if self._task.sends_row else b"",
            task=self._task.name,
        )

    async def _end(self, end: SoloEnd) -> None:
        """Score the end of the play. Raises _PlayFailed."""
        if isinstance(end.message, TrajectoryFailed):
            self.fail_call(end.message.cause, is_opening=False)
        if isinstance(end.message, AnswerSubmitted):
            await self._score(end.message)
        self.play.ending = end.trajectory.ending

    async def _score(self, submission: AnswerSubmitted) -> None:
        try:
            score = await self._task.services.score(submission)
        except (HostFailure, SandboxFailure) as error:
            self._fail("reward", str(error))
        self.play.reward, self.play.components, self.play.scoring_s = score.reward, score.components, score.duration_s

    def _fail(self, place: Literal["opening", "call", "reward"], cause: str) -> NoReturn:
        self.play.failed_at, self.play.failure = place, cause
        raise _PlayFailed

    # ---------------------------------------------------------------- SoloListener

    async def generate(self, request: TurnRequested) -> TurnGenerated:
        self._text = next(self._script, "")
        ids = [*self._task.tokenizer.encode(self._text, trusted=True), self._task.rules.stop_token_ids[0]]
        zeros = bytes(4 * len(ids))
        return TurnGenerated(self._trajectory_id, request.turn, request.lease, ids_to_bytes(ids), zeros, zeros, "stop")

    def add_turn(self, generated: TurnGenerated, refusals: Mapping[int, str]) -> None:
        refused = [PlayedCall("", "", "refused", refusal) for refusal in refusals.values()]
        self.play.turns.append(PlayedTurn(self._text, refused))

    def add_result(self, result: SoloResult) -> None:
        request, outcome = result.request, result.outcome
        if isinstance(request, CodeRequested):
            code = msgspec.json.encode(request.code).decode()
            self._add_call(PlayedCall(request.tool, code, "ok", result.text, result.duration_s))
            return
        assert isinstance(outcome, EnvironmentOutcome)
        self.play.outcomes.append(AnsweredCall(request.method, request.arguments, digest_outcome(outcome)))
        self.play.texts.append(result.text)
        if result.is_opening:
            self.play.opening_s = result.duration_s
            return
        call = PlayedCall(request.method, request.arguments.decode(), "ok", result.text, result.duration_s)
        match outcome:
            case EnvironmentRaised():
                self._add_call(replace(call, status="raised"))
            case EnvironmentTimedOut():
                self._add_call(replace(call, status="timed out"))
            case _:
                self._add_call(replace(call, rewards=outcome.rewards, stops=outcome.stop))

    def _add_call(self, call: PlayedCall) -> None:
        self.play.turns[-1].calls.append(call)

    def fail_call(self, cause: str, *, is_opening: bool) -> NoReturn:
        self._fail("opening" if is_opening else "call", cause.removeprefix("environment: "))
