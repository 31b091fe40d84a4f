"""Drives one trajectory without a run, for `asterism chat` and `asterism task check`.

The decisions are those of a rollout (asterism.policies.rollout.transitions). The driver replaces the other processes:
it grants each lease, runs programs in the sandbox, and calls the task's instances. A listener generates the turns and
receives the results:

    task = SoloTask("maze", rules, tokenizer, services, sandbox, sends_row=True)
    trajectory, sends = transitions.start(rules, group, 0, 0.0)
    end = await SoloDriver(task, listener, context_tokens=32_768).play(trajectory, sends)
    match end.message:
        case AnswerSubmitted(): ...     # the caller may score it
        case LeaseRequested(): ...      # the context is full, or `interrupt` was called
        case TrajectoryFailed(): ...    # a call or a turn failed twice

The driver consumes a trajectory at its start or at the start of a turn, with the messages that it has sent, and
produces its end. It waits for one turn or one call at a time: the listener ends a turn, and the limits of the task and
of the sandbox end a call.
"""

import asyncio
from collections import deque
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from asterism.bus.messages import (
    AnswerSubmitted,
    CallFailed,
    CodeFinished,
    CodeOutcome,
    CodeRefused,
    CodeRequested,
    EnvironmentCalled,
    EnvironmentOutcome,
    EnvironmentRaised,
    EnvironmentReturned,
    LeaseGranted,
    LeaseRequested,
    TrajectoryFailed,
    TrajectoryFinished,
    TurnFailed,
    TurnGenerated,
    TurnRequested,
)
from asterism.policies.decider import Send
from asterism.policies.dialogue.chat_format import TextTokenizer
from asterism.policies.dialogue.tool_results import format_result
from asterism.policies.rollout import transitions
from asterism.policies.rollout.call_transitions import format_environment_result, format_refusal, select_calls
from asterism.policies.rollout.trajectory import Rules, Trajectory
from asterism.sandbox.contract import CodeResult, CodeSandbox, SandboxFailure
from asterism.sandbox.output_scrubbing import scrub_outcome
from asterism.tasks.hosting.host_pool import CallResult
from asterism.tasks.hosting.host_process import HostFailure
from asterism.tasks.hosting.task_services import TaskServices

INTERRUPTION = "KeyboardInterrupt: interrupted by the user"  # result of the interrupted call, for the model
Result = TypeVar("Result")
SoloCall = CodeRequested | EnvironmentCalled


class SoloTask(NamedTuple):
    name: str
    rules: Rules
    tokenizer: TextTokenizer
    services: TaskServices
    sandbox: CodeSandbox
    sends_row: bool = False  # whether the task's instances and reward functions get the row
    scrubs_outcomes: bool = False  # whether outcomes are scrubbed, as in a run with determinism = "strict"


class SoloResult(NamedTuple):
    """The result of a call, or the first observation of an instance."""

    request: SoloCall
    outcome: CodeOutcome | EnvironmentOutcome
    text: str  # text for the model
    place: int  # position of the call in its turn, from 0
    duration_s: float
    is_opening: bool


class SoloEnd(NamedTuple):
    trajectory: Trajectory
    message: AnswerSubmitted | LeaseRequested | TrajectoryFailed | TrajectoryFinished


class OpeningInterrupted(Exception):
    """An interrupt has stopped the call that opens an instance, so there is no trajectory to continue."""


class SoloListener(Protocol):
    """Generates the turns, and receives calls and results. An exception of a method ends `SoloDriver.play`."""

    async def generate(self, request: TurnRequested) -> TurnGenerated | TurnFailed:
        """Generate a turn; the trajectory has all results of the previous turn."""
        ...

    def add_turn(self, generated: TurnGenerated, refusals: Mapping[int, str]) -> None:
        """Receive a turn. `refusals`: the results of calls that cannot run, by their place in the turn."""
        ...

    def add_result(self, result: SoloResult) -> None: ...

    def fail_call(self, cause: str, *, is_opening: bool) -> None:
        """Receive a failure of the sandbox or of the task's host process. The call is retried once."""
        ...


class SoloDriver:
    def __init__(self, task: SoloTask, listener: SoloListener, context_tokens: int) -> None:
        """`context_tokens`: tokens of a lease, and so the limit of a sequence."""
        self._task, self._listener, self._context_tokens = task, listener, context_tokens
        self._call: asyncio.Future[Any] | None = None
        self.is_interrupted = False

    def interrupt(self) -> None:
        """Stop the running call, and give the model a result; without a call, end before the next turn."""
        if self._call is None or not self._call.cancel():
            self.is_interrupted = True

    async def play(self, trajectory: Trajectory, sends: Sequence[Send]) -> SoloEnd:
        """Play until the end. Raises OpeningInterrupted, and the exceptions of the listener."""
        self.trajectory, self.is_interrupted = trajectory, False
        waiting = deque(sends)
        while waiting:
            match waiting.popleft().message:
                case AnswerSubmitted() | TrajectoryFinished() | TrajectoryFailed() as message:
                    return SoloEnd(self.trajectory, message)
                case LeaseRequested() as message if self.is_interrupted or self._is_full:
                    return SoloEnd(self.trajectory, message)
                case LeaseRequested(trajectory_id=number, lease=lease):
                    event = LeaseGranted(number, "engine", self._context_tokens, lease, 0.0, "solo")
                case TurnRequested() as request:
                    event = await self._generate(request)
                case CodeRequested() as request:
                    event = await self._run_code(request)
                case EnvironmentCalled() as request:
                    event = await self._call_environment(request)
                case _:  # no answer is needed
                    continue
            self.trajectory, sends = transitions.advance(self._task.rules, self.trajectory, 0.0, event)
            waiting += sends
        raise AssertionError("a trajectory ends with one of its messages")

    @property
    def _is_full(self) -> bool:
        return self.trajectory.record.num_tokens >= self._context_tokens

    async def _generate(self, request: TurnRequested) -> TurnGenerated | TurnFailed:
        generated = await self._listener.generate(request)
        if isinstance(generated, TurnGenerated):
            self._listener.add_turn(generated, self._list_refusals(generated))
        return generated

    def _list_refusals(self, generated: TurnGenerated) -> Mapping[int, str]:
        rules, record = self._task.rules, self.trajectory.record
        if generated.finish != "stop" or rules.kind == "dialogue":
            return {}
        calls = rules.renderer.parse_turn(record.token_ids + generated.token_ids, record.num_tokens).calls
        found = ((place, format_refusal(rules, place, call)) for place, call in enumerate(select_calls(rules, calls)))
        return {place: refusal for place, refusal in found if refusal is not None}

    async def _run_code(self, request: CodeRequested) -> CodeFinished | CallFailed:
        task, rules = self._task, self._task.rules
        try:
            result = await self._wait_for_call(task.sandbox.run(request))
        except SandboxFailure as error:
            return self._fail_call(request, f"sandbox: {error}")
        result = result or CodeResult(CodeRefused(INTERRUPTION), 0.0)
        outcome = scrub_outcome(result.outcome) if task.scrubs_outcomes else result.outcome
        text = format_result(outcome, rules.result_characters, rules.result_format, request.code)
        self._add_result(request, outcome, text, result.duration_s)
        return CodeFinished(request.trajectory_id, request.call, outcome, result.duration_s, "")

    async def _call_environment(self, request: EnvironmentCalled) -> EnvironmentReturned | CallFailed:
        try:
            result = await self._wait_for_call(self._task.services.call(request))
        except HostFailure as error:
            return self._fail_call(request, f"environment: {error}")
        if result is None and self.trajectory.is_opening:
            raise OpeningInterrupted
        outcome, duration_s = result or CallResult(EnvironmentRaised(INTERRUPTION), 0.0)
        text = format_environment_result(outcome, self._task.rules.result_characters)
        self._add_result(request, outcome, text, duration_s)
        return EnvironmentReturned(request.trajectory_id, request.call, outcome, duration_s, "")

    async def _wait_for_call(self, work: Coroutine[Any, Any, Result]) -> Result | None:
        """Return None if an interrupt has stopped the call. Raises the exception of the call."""
        self._call = call = asyncio.ensure_future(work)
        if self.is_interrupted:  # an interrupt after the last token of the turn
            self.is_interrupted = False
            call.cancel()
        try:
            await asyncio.wait({call})
        finally:
            self._call = None
            call.cancel()
        return None if call.cancelled() else call.result()

    def _add_result(
        self, request: SoloCall, outcome: CodeOutcome | EnvironmentOutcome, text: str, duration_s: float
    ) -> None:
        place, is_opening = request.call - self.trajectory.calls, self.trajectory.is_opening
        self._listener.add_result(SoloResult(request, outcome, text, place, duration_s, is_opening))

    def _fail_call(self, request: SoloCall, cause: str) -> CallFailed:
        self._listener.fail_call(cause, is_opening=self.trajectory.is_opening)
        return CallFailed(request.trajectory_id, request.call, cause, "")
