"""Plays a script with a task: the decisions are those of a rollout, without limits on tokens and turns."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Literal, NoReturn

import msgspec

from asterism.bus.messages import (
    AnsweredCall,
    AnswerGraded,
    AnswerSubmitted,
    CodeFinished,
    CodeRequested,
    EnvironmentCalled,
    EnvironmentOutcome,
    EnvironmentRaised,
    EnvironmentReturned,
    EnvironmentTimedOut,
    LeaseGranted,
    LeaseRequested,
    StartGroup,
    TrajectoryFailed,
    TrajectoryFinished,
    TurnGenerated,
    TurnRequested,
    bytes_to_ids,
    digest_outcome,
    ids_to_bytes,
)
from asterism.configs.algorithm import Sampling
from asterism.engine.data.datasets import DatasetProblem
from asterism.engine.data.task_inputs import encode_row
from asterism.engine.model.tokenizer import FastTokenizer
from asterism.policies.dialogue.tool_results import format_result
from asterism.policies.rollout import transitions
from asterism.policies.rollout.call_transitions import format_environment_result, format_refusal, select_calls
from asterism.policies.rollout.trajectory import Rules, Trajectory, TrajectoryEvent
from asterism.sandbox.contract import Sandbox, SandboxFailure
from asterism.tasks.checking.turn_scripts import TurnScript
from asterism.tasks.hosting.host_process import HostFailure
from asterism.tasks.hosting.task_services import TaskServices

UNLIMITED = 1 << 30
CallStatus = Literal["ok", "raised", "timed out", "refused"]


class PlayedCall(msgspec.Struct, frozen=True):
    """A call of a tool, or an answer of a dialogue."""

    method: str  # empty for a refused call
    arguments: str  # JSON
    status: CallStatus
    text: str  # as the model reads it
    duration_s: float = 0.0
    rewards: dict[str, float] = {}
    stops: bool = False  # it ended the trajectory


class PlayedTurn(msgspec.Struct, frozen=True):
    text: str  # of the assistant, after the prefill
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
    texts: list[str] = field(default_factory=list[str])  # of `outcomes`

    @property
    def has_timeout(self) -> bool:
        return any(call.status == "timed out" for turn in self.turns for call in turn.calls)


class PlayedTask(msgspec.Struct, frozen=True):
    """What all plays of a task share."""

    name: str
    rules: Rules
    tokenizer: FastTokenizer
    services: TaskServices
    sandbox: Sandbox
    sends_row: bool  # to its instances and reward functions


async def play_script(task: PlayedTask, problem: DatasetProblem, script: TurnScript, trajectory_id: int) -> Play:
    """Closes the instance at the end."""
    player = _Player(task, Play(problem.name, script), trajectory_id)
    try:
        await player.run(problem)
    finally:
        task.services.end(trajectory_id)
        await task.sandbox.end_notebook(trajectory_id)
    return player.play


class _PlayFailed(Exception):
    """The task's code or the sandbox failed; the play has the cause."""


class _Player:
    """Stands for the engines, the arbiter and the executor of one trajectory."""

    def __init__(self, task: PlayedTask, play: Play, trajectory_id: int) -> None:
        self._task, self._trajectory_id, self.play = task, trajectory_id, play
        self._script = iter(play.script.turns)

    async def run(self, problem: DatasetProblem) -> None:
        rules = self._task.rules
        group = self._build_group(problem)
        trajectory, sends = transitions.start(rules, group, self._trajectory_id, 0.0)
        waiting = deque(sends)
        while waiting:
            try:
                event = await self._answer(trajectory, waiting.popleft().message)
            except _PlayFailed:
                break
            if event is not None:
                trajectory, sends = transitions.advance(rules, trajectory, 0.0, event)
                waiting += sends
        self._keep_prompt(trajectory)
        self.play.response_tokens = trajectory.record.response_tokens

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

    def _keep_prompt(self, trajectory: Trajectory) -> None:
        record = trajectory.record
        self.play.prompt_ids = bytes_to_ids(record.token_ids)[: record.prompt_tokens]
        self.play.prompt = self._task.tokenizer.decode(self.play.prompt_ids)

    async def _answer(self, trajectory: Trajectory, message: object) -> TrajectoryEvent | None:
        """Raises _PlayFailed."""
        match message:
            case LeaseRequested(lease=lease):
                return LeaseGranted(self._trajectory_id, "engine", UNLIMITED, lease, 0.0, "check")
            case TurnRequested():
                return self._generate_turn(message)
            case EnvironmentCalled():
                return await self._call(trajectory, message)
            case CodeRequested():
                return await self._run_code(message)
            case AnswerSubmitted():
                return await self._score(message)
            case TrajectoryFinished(ending=ending):
                self.play.ending = ending
            case TrajectoryFailed(cause=cause):
                self.play.failed_at, self.play.failure = "call", cause
            case _:
                pass
        return None

    # ---------------------------------------------------------------- turns

    def _generate_turn(self, request: TurnRequested) -> TurnGenerated:
        text, rules = next(self._script, ""), self._task.rules
        token_ids = [*self._task.tokenizer.encode(text, trusted=True), rules.stop_token_ids[0]]
        parsed = rules.renderer.parse_turn(ids_to_bytes(token_ids), 0)
        calls = () if rules.kind == "dialogue" else select_calls(rules, parsed.calls)
        refusals = (format_refusal(rules, place, call) for place, call in enumerate(calls))
        refused = [PlayedCall("", "", "refused", refusal) for refusal in refusals if refusal is not None]
        self.play.turns.append(PlayedTurn(text, refused))
        return TurnGenerated(
            self._trajectory_id,
            request.turn,
            request.lease,
            ids_to_bytes(token_ids),
            bytes(4 * len(token_ids)),
            bytes(4 * len(token_ids)),
            "stop",
        )

    # ---------------------------------------------------------------- calls

    async def _call(self, trajectory: Trajectory, request: EnvironmentCalled) -> EnvironmentReturned:
        try:
            result = await self._task.services.call(request)
        except HostFailure as error:
            self._fail("opening" if trajectory.is_opening else "call", f"{error}")
        outcome = result.outcome
        text = format_environment_result(outcome, self._task.rules.result_characters)
        self.play.outcomes.append(AnsweredCall(request.method, request.arguments, digest_outcome(outcome)))
        self.play.texts.append(text)
        if trajectory.is_opening:
            self.play.opening_s = result.duration_s
        else:
            self._keep_call(request, outcome, text, result.duration_s)
        return EnvironmentReturned(self._trajectory_id, request.call, outcome, result.duration_s, "")

    def _keep_call(self, request: EnvironmentCalled, outcome: EnvironmentOutcome, text: str, duration_s: float) -> None:
        status: CallStatus = "ok"
        rewards, stops = dict[str, float](), False
        match outcome:
            case EnvironmentRaised():
                status = "raised"
            case EnvironmentTimedOut():
                status = "timed out"
            case _:
                rewards, stops = outcome.rewards, outcome.stop
        call = PlayedCall(request.method, request.arguments.decode(), status, text, duration_s, rewards, stops)
        self.play.turns[-1].calls.append(call)

    async def _run_code(self, request: CodeRequested) -> CodeFinished:
        try:
            result = await self._task.sandbox.run(request)
        except SandboxFailure as error:
            self._fail("call", f"sandbox: {error}")
        rules = self._task.rules
        text = format_result(result.outcome, rules.result_characters, rules.result_format, request.code)
        call = PlayedCall(request.tool, msgspec.json.encode(request.code).decode(), "ok", text, result.duration_s)
        self.play.turns[-1].calls.append(call)
        return CodeFinished(self._trajectory_id, request.call, result.outcome, result.duration_s, "")

    async def _score(self, submission: AnswerSubmitted) -> AnswerGraded:
        try:
            score = await self._task.services.score(submission)
        except (HostFailure, SandboxFailure) as error:
            self._fail("reward", str(error))
        self.play.reward, self.play.components = score.reward, score.components
        self.play.scoring_s = score.duration_s
        return AnswerGraded(self._trajectory_id, score.reward, score.duration_s, "", score.components)

    def _fail(self, place: Literal["opening", "call", "reward"], cause: str) -> NoReturn:
        self.play.failed_at, self.play.failure = place, cause
        raise _PlayFailed
