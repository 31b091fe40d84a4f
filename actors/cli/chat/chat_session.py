"""A conversation with a model: the decisions of a rollout, for one trajectory that a user continues.

An answer takes the trajectory from the user's text to its end (asterism.policies.rollout.transitions). The next text of the user
follows the same tokens, so that a conversation has the token ids of training. The view shows turns, calls and results
meanwhile.
"""

import asyncio
from collections import deque
from collections.abc import Coroutine, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from asterism.bus.messages import (
    AnswerSubmitted,
    CallFailed,
    CodeFinished,
    CodeRefused,
    CodeRequested,
    EnvironmentCalled,
    EnvironmentRaised,
    EnvironmentReturned,
    LeaseGranted,
    LeaseRequested,
    Observation,
    StartGroup,
    TokenRecord,
    TrajectoryFailed,
    TrajectoryFinished,
    TurnFailed,
    TurnGenerated,
    TurnRequested,
    bytes_to_ids,
    ids_to_bytes,
)
from asterism.configs.algorithm import Sampling
from asterism.engine.contract import Engine, EngineFailure, GenerationRequest
from asterism.engine.data.datasets import DatasetProblem
from asterism.engine.data.task_inputs import encode_row
from asterism.policies.decider import Send
from asterism.policies.dialogue.chat_format import TURN_END, TextTokenizer
from asterism.policies.dialogue.tool_results import format_result
from asterism.policies.rollout import transitions
from asterism.policies.rollout.call_transitions import format_environment_result, format_refusal, select_calls
from asterism.policies.rollout.trajectory import STEP, Rules, Trajectory, TrajectoryEvent
from asterism.sandbox.contract import CodeSandbox, SandboxFailure
from asterism.sandbox.output_scrubbing import scrub_outcome
from asterism.tasks.hosting.host_process import HostFailure
from asterism.tasks.hosting.task_services import TaskServices

Message = dict[str, str]  # role and content
Result = TypeVar("Result")

INTERRUPTED, CONTEXT_FULL, FAILED = "interrupted", "context", "failed"  # ends of an answer besides those of a rollout
_INTERRUPTION = "KeyboardInterrupt: interrupted by the user"  # the result of a call


class ChatRefused(Exception):
    """The conversation cannot continue; its state has not changed."""


class ChatTask(NamedTuple):
    name: str
    rules: Rules
    tokenizer: TextTokenizer
    services: TaskServices
    row: DatasetProblem | None = None  # of an environment or a dialogue
    scrubs_outcomes: bool = False  # as a run with determinism = "strict"


class ChatSampling(NamedTuple):
    parameters: Sampling
    seed: int


class AnswerEnd(NamedTuple):
    ending: str  # that of a rollout, or one of the above
    turns: int = 0
    tokens: int = 0  # after the user's text
    cause: str = ""  # of a failure


class ChatView(Protocol):
    """What shows a conversation. Texts are as the model writes and reads them."""

    def begin_turn(self, prefill: str) -> None: ...

    def add_tokens(self, token_ids: Sequence[int]) -> None: ...

    def end_turn(self) -> None: ...

    def show_result(self, title: str, text: str) -> None: ...

    def show_problem(self, text: str) -> None: ...


class ChatSession:
    def __init__(
        self,
        task: ChatTask,
        engine: Engine,
        sandbox: CodeSandbox,
        sampling: ChatSampling,
        context_tokens: int,
        view: ChatView,
        first_trajectory_id: int = 0,
    ) -> None:
        """`context_tokens`: of a conversation. `first_trajectory_id`: names the notebook of the first conversation."""
        self._task, self._engine, self._sandbox, self._view = task, engine, sandbox, view
        self._sampling, self._context_tokens = sampling, context_tokens
        self._first_trajectory_id = self._trajectory_id = first_trajectory_id
        self._trajectory: Trajectory | None = None  # after the last answer
        self.messages: list[Message] = []  # of the conversation, as cold-start rows have them
        self._is_interrupted = False
        self._call: asyncio.Future[Any] | None = None  # that an interrupt stops
        self._results: dict[int, str] = {}  # of the turn's calls, by their place in it
        self._refused: set[int] = set()  # places of calls that did not run

    async def answer(self, text: str) -> AnswerEnd:
        """Until the final answer, a limit or an interrupt. After a failure the conversation is as before it.

        Raises ChatRefused.
        """
        before = self._trajectory, list(self.messages)
        self._is_interrupted, self._results, self._refused = False, {}, set()
        trajectory, sends = self._begin(text)
        self.messages.append({"role": "user", "content": text})
        waiting, end = deque(sends), None
        while waiting and end is None:
            message = waiting.popleft().message
            end = self._find_end(trajectory, message)
            if end is None and (event := await self._respond(trajectory, message)) is not None:
                trajectory, sends = transitions.advance(self._task.rules, trajectory, 0.0, event)
                waiting += sends
        assert end is not None, "a trajectory ends with one of its messages"
        self._trajectory = trajectory
        if end.ending == FAILED:
            self._trajectory, self.messages = before
            await self._restore_notebook()
        return end

    def interrupt(self) -> None:
        """Stops the call that runs, and the model reads that; else ends the answer with its tokens so far."""
        is_call_stopped = self._call is not None and self._call.cancel()
        if not is_call_stopped:
            self._is_interrupted = True
            self._engine.abort(self._trajectory_id)

    async def reset(self) -> None:
        """Starts another conversation."""
        await self.close()
        self._trajectory, self.messages = None, []
        self._trajectory_id += 1

    async def close(self) -> None:
        """Ends the conversation's notebook and instance."""
        self._engine.release_cache(self._trajectory_id)
        self._task.services.end(self._trajectory_id)
        await self._sandbox.end_notebook(self._trajectory_id)

    # ---------------------------------------------------------------- begin and end

    async def _restore_notebook(self) -> None:
        """That of the conversation. The instance of an environment keeps its state, unless it is new."""
        await self._sandbox.end_notebook(self._trajectory_id)
        if self._trajectory is None:
            self._task.services.end(self._trajectory_id)
        else:
            self._sandbox.restore_notebook(self._trajectory_id, self._trajectory.cells)

    def _begin(self, text: str) -> tuple[Trajectory, list[Send]]:
        """Raises ChatRefused."""
        rules = self._task.rules
        if self._trajectory is not None:
            return transitions.adopt(rules, self._continue_trajectory(self._trajectory, text), 0.0)
        prompt_ids = rules.renderer.render_prompt(text)
        self._check_room(len(prompt_ids))
        row, sampling = self._task.row, self._sampling
        group = StartGroup(
            group_id=0,
            purpose="evaluate",
            problem="chat",
            ground_truth="",
            prompt_ids=ids_to_bytes(prompt_ids),
            size=1,
            first_trajectory_id=self._first_trajectory_id,
            sampling=sampling.parameters,
            seed=sampling.seed,
            row=b"" if row is None else encode_row(row._replace(question=text)),
            task=self._task.name,
        )
        return transitions.start(rules, group, self._trajectory_id, 0.0)

    def _continue_trajectory(self, trajectory: Trajectory, text: str) -> Trajectory:
        """With the user's text, after which the limits of a response count again. Raises ChatRefused."""
        if trajectory.is_done:
            raise ChatRefused("the environment has ended")
        record = _end_turn(self._task, trajectory)
        added = self._task.rules.renderer.render_user_turn(record, text)
        if added is None:
            raise ChatRefused("the chat format cannot continue after the last turn")
        record = record.append_observation(added)
        self._check_room(record.num_tokens)
        record = replace(record, prompt_tokens=record.num_tokens)
        begun = {"phase": "leasing", "turn": 0, "turn_start": 0, "requested": (), "results": (), "retries": 0}
        return replace(trajectory, record=record, answer="", ending="answered", **begun)

    def _check_room(self, num_tokens: int) -> None:
        if num_tokens >= self._context_tokens:
            raise ChatRefused(f"the conversation would have {num_tokens} of {self._context_tokens} tokens")

    def _find_end(self, trajectory: Trajectory, message: object) -> AnswerEnd | None:
        turns, tokens = trajectory.turn, trajectory.record.response_tokens
        match message:
            case LeaseRequested():
                self._keep_results()
                if self._is_interrupted:
                    return AnswerEnd(INTERRUPTED, turns, tokens)
                if trajectory.record.num_tokens >= self._context_tokens:
                    return AnswerEnd(CONTEXT_FULL, turns, tokens)
                return None
            case AnswerSubmitted() | TrajectoryFinished():
                return AnswerEnd(trajectory.ending, turns, tokens)
            case TrajectoryFailed(cause=cause):
                return AnswerEnd(FAILED, turns, tokens, cause)
            case _:
                return None

    def _keep_results(self) -> None:
        """The trajectory has the results of its last turn."""
        role = "user" if self._task.rules.kind == "dialogue" else "tool"
        for place, text in sorted(self._results.items()):
            if place in self._refused:
                self._view.show_result("not run", text)
            self.messages.append({"role": role, "content": text})
        self._results, self._refused = {}, set()

    # ---------------------------------------------------------------- turns and calls

    async def _respond(self, trajectory: Trajectory, message: object) -> TrajectoryEvent | None:
        match message:
            case LeaseRequested(lease=lease):
                return LeaseGranted(self._trajectory_id, "engine", self._context_tokens, lease, 0.0, "chat")
            case TurnRequested():
                return await self._generate(trajectory, message)
            case CodeRequested():
                return await self._run_code(trajectory, message)
            case EnvironmentCalled():
                return await self._call_environment(trajectory, message)
            case _:
                return None

    async def _generate(self, trajectory: Trajectory, request: TurnRequested) -> TurnGenerated | TurnFailed:
        pieces = asyncio.Queue[NDArray[np.int32] | None]()
        asked = GenerationRequest.from_turn(request)
        call = asyncio.ensure_future(self._engine.generate(asked, pieces.put_nowait))
        call.add_done_callback(lambda _: pieces.put_nowait(None))
        try:
            self._view.begin_turn(self._task.rules.dialogue.prefill)
            while (token_ids := await _take_pieces(pieces)) is not None:
                self._view.add_tokens(token_ids)
                if self._is_interrupted:  # also if the interrupt came before the engine had the request
                    self._engine.abort(self._trajectory_id)
            self._view.end_turn()
            generation = call.result()
        except EngineFailure as error:
            self._view.show_problem(f"engine: {error}")
            return TurnFailed(self._trajectory_id, request.turn, request.lease, f"engine: {error}")
        finally:
            call.cancel()  # after an error of the view
        generated = generation.build_answer(request)
        self._keep_turn(trajectory, generated)
        return generated

    def _keep_turn(self, trajectory: Trajectory, generated: TurnGenerated) -> None:
        rules, start = self._task.rules, trajectory.record.num_tokens
        ids = [token for token in bytes_to_ids(generated.token_ids) if token not in rules.stop_token_ids]
        self.messages.append(
            {"role": "assistant", "content": rules.dialogue.prefill + self._task.tokenizer.decode(ids)}
        )
        if generated.finish != "stop" or rules.kind == "dialogue":
            return
        parsed = rules.renderer.parse_turn(trajectory.record.token_ids + generated.token_ids, start)
        for place, call in enumerate(select_calls(rules, parsed.calls)):
            if (refusal := format_refusal(rules, place, call)) is not None:
                self._results[place] = refusal
                self._refused.add(place)

    async def _run_code(self, trajectory: Trajectory, request: CodeRequested) -> CodeFinished | CallFailed:
        try:
            result = await self._await_call(self._sandbox.run(request))
        except SandboxFailure as error:
            return self._fail_call(request.call, f"sandbox: {error}")
        outcome = CodeRefused(_INTERRUPTION) if result is None else result.outcome
        if self._task.scrubs_outcomes:
            outcome = scrub_outcome(outcome)
        rules = self._task.rules
        text = format_result(outcome, rules.result_characters, rules.result_format, request.code)
        self._keep_result(trajectory, request.call, request.tool, text)
        duration_s = 0.0 if result is None else result.duration_s
        return CodeFinished(self._trajectory_id, request.call, outcome, duration_s, "")

    async def _call_environment(
        self, trajectory: Trajectory, request: EnvironmentCalled
    ) -> EnvironmentReturned | CallFailed:
        if trajectory.is_opening and self._is_interrupted:  # its retry
            return CallFailed(self._trajectory_id, request.call, _INTERRUPTION, "")
        try:
            result = await self._await_call(self._task.services.call(request))
        except HostFailure as error:
            return self._fail_call(request.call, f"environment: {error}")
        if result is None and trajectory.is_opening:
            self._is_interrupted = True
            return self._fail_call(request.call, _INTERRUPTION)
        outcome = EnvironmentRaised(_INTERRUPTION) if result is None else result.outcome
        text = format_environment_result(outcome, self._task.rules.result_characters)
        if isinstance(outcome, Observation) and trajectory.is_opening:  # the question, and the text after it
            question, self.messages[-1]["content"] = self.messages[-1]["content"], outcome.content
            self._view.show_result("environment", outcome.content.removeprefix(question))
        elif not trajectory.is_opening:
            self._keep_result(trajectory, request.call, "user" if request.method == STEP else request.method, text)
        duration_s = 0.0 if result is None else result.duration_s
        return EnvironmentReturned(self._trajectory_id, request.call, outcome, duration_s, "")

    def _keep_result(self, trajectory: Trajectory, number: int, title: str, text: str) -> None:
        self._results[number - trajectory.calls] = text
        self._view.show_result(title, text)

    def _fail_call(self, number: int, cause: str) -> CallFailed:
        self._view.show_problem(cause)
        return CallFailed(self._trajectory_id, number, cause, "")

    async def _await_call(self, work: Coroutine[Any, Any, Result]) -> Result | None:
        """None if an interrupt has stopped it. Raises its exception."""
        self._call = call = asyncio.ensure_future(work)
        if self._is_interrupted:  # after the last token of the turn
            self._is_interrupted = False
            call.cancel()
        try:
            await asyncio.wait({call})
        finally:
            self._call = None
            call.cancel()
        return None if call.cancelled() else call.result()


def _end_turn(task: ChatTask, trajectory: Trajectory) -> TokenRecord:
    """Ends a turn without a stop token as a cold start does, with that of ChatML. Other formats have their first one."""
    record, stops = trajectory.record, task.rules.stop_token_ids
    if record.num_tokens and bytes_to_ids(record.token_ids)[-1] in stops:
        return record
    end = task.tokenizer.encode(TURN_END, trusted=True)[-1]
    stop = ids_to_bytes([end if end in stops else stops[0]])
    return record.append_generated(TurnGenerated(trajectory.trajectory_id, 0, 0, stop, bytes(4), bytes(4), "stop"))


async def _take_pieces(pieces: asyncio.Queue[NDArray[np.int32] | None]) -> list[int] | None:
    """All tokens that wait, since an engine may be faster than a terminal; None at the end, which None marks in the queue."""
    token_ids: list[int] = []
    piece = await pieces.get()
    while piece is not None:
        token_ids += piece.tolist()
        if pieces.empty():
            return token_ids
        piece = pieces.get_nowait()
    if token_ids:
        pieces.put_nowait(None)
    return token_ids or None
