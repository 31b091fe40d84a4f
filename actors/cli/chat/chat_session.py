"""A chat session plays one trajectory that a user continues, with the decisions of a rollout.

An answer takes the trajectory from the user's text to its end (asterism.tasks.solo_driver). The next text of the user
follows the same tokens, so that a conversation has the token ids of training. The view shows turns, calls and results
meanwhile.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from asterism.bus.messages import (
    CodeRequested,
    LeaseRequested,
    Observation,
    StartGroup,
    TokenRecord,
    TrajectoryFailed,
    TurnFailed,
    TurnGenerated,
    TurnRequested,
    bytes_to_ids,
    ids_to_bytes,
)
from asterism.configs.schema.algorithm import Sampling
from asterism.engine.contract import Engine, EngineFailure, GenerationRequest
from asterism.engine.data.datasets import DatasetProblem
from asterism.engine.data.task_inputs import encode_row
from asterism.policies.decider import Send
from asterism.policies.dialogue.chat_format import TURN_END
from asterism.policies.rollout import transitions
from asterism.policies.rollout.trajectory import STEP, Trajectory
from asterism.tasks.solo_driver import INTERRUPTION, OpeningInterrupted, SoloDriver, SoloEnd, SoloResult, SoloTask

Message = dict[str, str]  # role and content

INTERRUPTED, CONTEXT_FULL, FAILED = "interrupted", "context", "failed"  # further endings of an answer


class ChatRefused(Exception):
    """The conversation cannot continue; its state has not changed."""


class ChatSampling(NamedTuple):
    parameters: Sampling
    seed: int


class AnswerEnd(NamedTuple):
    ending: str  # an ending of a rollout, or one of the three above
    turns: int = 0
    tokens: int = 0  # number of tokens after the user's text
    cause: str = ""  # cause of a failure


class ChatView(Protocol):
    """A display of a conversation. It gets texts exactly as the model writes and reads them."""

    def begin_turn(self, prefill: str) -> None: ...

    def add_tokens(self, token_ids: Sequence[int]) -> None: ...

    def end_turn(self) -> None: ...

    def show_result(self, title: str, text: str) -> None: ...

    def show_problem(self, text: str) -> None: ...


class ChatSession:
    """One conversation at a time with one engine. Implements SoloListener."""

    def __init__(
        self,
        task: SoloTask,
        row: DatasetProblem | None,
        engine: Engine,
        sampling: ChatSampling,
        context_tokens: int,
        view: ChatView,
        first_trajectory_id: int = 0,
    ) -> None:
        """`row` opens an environment or a dialogue. `context_tokens` limits a conversation. `first_trajectory_id` names
        the notebook of the first conversation."""
        self._task, self._row, self._engine, self._view = task, row, engine, view
        self._sampling, self._context_tokens = sampling, context_tokens
        self._first_trajectory_id = self._trajectory_id = first_trajectory_id
        self._trajectory: Trajectory | None = None  # state after the last answer
        self._driver = SoloDriver(task, self, context_tokens)
        self._results: dict[int, str] = {}  # results of the turn's calls, by place in the turn
        self._refused: set[int] = set()  # places of calls that did not run
        self.messages: list[Message] = []  # messages of the conversation, as in rows of a cold start

    async def answer(self, text: str) -> AnswerEnd:
        """Answer until the final answer, a limit or an interrupt. A failure leaves the conversation as it was before.

        Raises ChatRefused.
        """
        before = self._trajectory, list(self.messages)
        self._results, self._refused = {}, set()
        trajectory, sends = self._begin(text)
        self.messages.append({"role": "user", "content": text})
        try:
            played = await self._driver.play(trajectory, sends)
            self._trajectory, end = played.trajectory, self._describe_end(played)
        except OpeningInterrupted:
            self._view.show_problem(INTERRUPTION)
            end = AnswerEnd(FAILED, cause=INTERRUPTION)
        if end.ending == FAILED:
            self._trajectory, self.messages = before
            await self._restore_notebook()
        return end

    def interrupt(self) -> None:
        """Stop the running call, so that the model reads INTERRUPTION as its result; without a call, end the answer."""
        self._driver.interrupt()
        if self._driver.is_interrupted:
            self._engine.abort(self._trajectory_id)

    async def reset(self) -> None:
        await self.close()
        self._trajectory, self.messages = None, []
        self._trajectory_id += 1

    async def close(self) -> None:
        """End the conversation's notebook and environment instance, and release its cache."""
        self._engine.release_cache(self._trajectory_id)
        self._task.services.end(self._trajectory_id)
        await self._task.sandbox.end_notebook(self._trajectory_id)

    # ---------------------------------------------------------------- begin and end

    def _describe_end(self, end: SoloEnd) -> AnswerEnd:
        turns, tokens = end.trajectory.turn, end.trajectory.record.response_tokens
        match end.message:
            case LeaseRequested():
                self._end_results()
                return AnswerEnd(INTERRUPTED if self._driver.is_interrupted else CONTEXT_FULL, turns, tokens)
            case TrajectoryFailed(cause=cause):
                return AnswerEnd(FAILED, turns, tokens, cause)
            case _:
                return AnswerEnd(end.trajectory.ending, turns, tokens)

    async def _restore_notebook(self) -> None:
        """Restore the conversation's notebook. An earlier environment instance keeps its state; a new one ends."""
        await self._task.sandbox.end_notebook(self._trajectory_id)
        if self._trajectory is None:
            self._task.services.end(self._trajectory_id)
        else:
            self._task.sandbox.restore_notebook(self._trajectory_id, self._trajectory.cells)

    def _begin(self, text: str) -> tuple[Trajectory, list[Send]]:
        """Start the trajectory, or continue it with the text. Raises ChatRefused."""
        rules = self._task.rules
        if self._trajectory is not None:
            return transitions.adopt(rules, self._continue_trajectory(self._trajectory, text), 0.0)
        prompt_ids = rules.renderer.render_prompt(text)
        self._check_room(len(prompt_ids))
        row, sampling = self._row, self._sampling
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
        """Append the user's text; the limits of a response start again after it. Raises ChatRefused."""
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

    # ---------------------------------------------------------------- SoloListener

    async def generate(self, request: TurnRequested) -> TurnGenerated | TurnFailed:
        self._end_results()
        pieces = asyncio.Queue[NDArray[np.int32] | None]()
        asked = GenerationRequest.from_turn(request)
        call = asyncio.ensure_future(self._engine.generate(asked, pieces.put_nowait))
        call.add_done_callback(lambda _: pieces.put_nowait(None))
        try:
            self._view.begin_turn(self._task.rules.dialogue.prefill)
            while (token_ids := await _take_pieces(pieces)) is not None:
                self._view.add_tokens(token_ids)
                if self._driver.is_interrupted:  # true also if ^C came before the engine had the request
                    self._engine.abort(request.trajectory_id)
            self._view.end_turn()
            return call.result().build_answer(request)
        except EngineFailure as error:
            self._view.show_problem(f"engine: {error}")
            return TurnFailed(request.trajectory_id, request.turn, request.lease, f"engine: {error}")
        finally:
            call.cancel()  # stops the generation after an error of the view

    def add_turn(self, generated: TurnGenerated, refusals: Mapping[int, str]) -> None:
        rules = self._task.rules
        ids = [token for token in bytes_to_ids(generated.token_ids) if token not in rules.stop_token_ids]
        content = rules.dialogue.prefill + self._task.tokenizer.decode(ids)
        self.messages.append({"role": "assistant", "content": content})
        self._results |= refusals
        self._refused |= refusals.keys()

    def add_result(self, result: SoloResult) -> None:
        if not result.is_opening:
            method = result.request.tool if isinstance(result.request, CodeRequested) else result.request.method
            self._results[result.place] = result.text
            self._view.show_result("user" if method == STEP else method, result.text)
        elif isinstance(result.outcome, Observation):  # the content is the question and the environment's text after it
            question, self.messages[-1]["content"] = self.messages[-1]["content"], result.outcome.content
            self._view.show_result("environment", result.outcome.content.removeprefix(question))

    def _end_results(self) -> None:
        role = "user" if self._task.rules.kind == "dialogue" else "tool"
        for place, text in sorted(self._results.items()):
            if place in self._refused:
                self._view.show_result("not run", text)
            self.messages.append({"role": role, "content": text})
        self._results, self._refused = {}, set()

    def fail_call(self, cause: str, *, is_opening: bool) -> None:
        self._view.show_problem(cause)


def _end_turn(task: SoloTask, trajectory: Trajectory) -> TokenRecord:
    """Add a missing stop token to a turn: that of ChatML, as a cold start does, or the first one of its format."""
    record, stops = trajectory.record, task.rules.stop_token_ids
    if record.num_tokens and bytes_to_ids(record.token_ids)[-1] in stops:
        return record
    end = task.tokenizer.encode(TURN_END, trusted=True)[-1]
    stop = ids_to_bytes([end if end in stops else stops[0]])
    return record.append_generated(TurnGenerated(trajectory.trajectory_id, 0, 0, stop, bytes(4), bytes(4), "stop"))


async def _take_pieces(pieces: asyncio.Queue[NDArray[np.int32] | None]) -> list[int] | None:
    """Take all tokens that wait, since an engine may be faster than a terminal. None marks the end."""
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
