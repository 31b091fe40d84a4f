"""Run chat sessions with a scripted engine and a scripted sandbox, without processes."""

import asyncio
from collections.abc import Mapping, Sequence

import numpy as np

from asterism.actors.cli.chat.chat_session import ChatSampling, ChatSession
from asterism.bus.messages import AnswerSubmitted, CodeOk, CodeRequested, EnvironmentCalled, EnvironmentOutcome, Output
from asterism.configs.schema.algorithm import Sampling
from asterism.engine.contract import EngineFailure, Generation, GenerationRequest, TokenListener
from asterism.engine.data.datasets import DatasetProblem
from asterism.policies.dialogue.chat_format import TURN_END, TextTokenizer
from asterism.policies.rollout.trajectory import Rules
from asterism.sandbox.contract import CodeResult, Grade, SandboxFailure
from asterism.tasks.hosting.host_pool import CallResult
from asterism.tasks.hosting.task_services import TaskServices
from asterism.tasks.solo_driver import SoloTask
from tests.fakes import TOKENIZER, rules

ENDLESS = "..."  # a turn or program that ends only when it is stopped
BROKEN = "broken"  # a turn or program that fails
SAMPLING = Sampling(temperature=0.5, top_p=0.9, top_k=3)


class ScriptedLines:
    """A replacement of `input` that returns lines, then raises EOFError; it records the prompts."""

    def __init__(self, lines: Sequence[str]) -> None:
        self._lines = list(lines)
        self.prompts: list[str] = []

    def __call__(self, prompt: str) -> str:
        self.prompts.append(prompt)
        if not self._lines:
            raise EOFError
        return self._lines.pop(0)


class ScriptedEngine:
    """An engine that generates the given texts and records the requests."""

    def __init__(self, texts: Sequence[str], tokenizer: TextTokenizer = TOKENIZER) -> None:
        self._texts, self._tokenizer = list(texts), tokenizer
        self.requests: list[GenerationRequest] = []
        self.endless_turn_began = asyncio.Event()
        self._aborted = asyncio.Event()
        self.released: list[int] = []

    async def generate(self, request: GenerationRequest, on_tokens: TokenListener | None = None) -> Generation:
        self.requests.append(request)
        text, finish = self._texts.pop(0), "stop"
        if text == BROKEN:
            raise EngineFailure("out of memory")
        ids = np.array(self._tokenizer.encode(text + TURN_END, trusted=True), np.int32)
        if text.endswith(ENDLESS):
            ids, finish = ids[:-1], "abort"
        if len(ids) > request.max_new_tokens:
            ids, finish = ids[: request.max_new_tokens], "length"
        assert on_tokens is not None
        for piece in (ids[:3], ids[3:]):
            if len(piece):
                on_tokens(piece)
                await asyncio.sleep(0)
        if finish == "abort":
            self.endless_turn_began.set()
            await self._aborted.wait()
            self._aborted.clear()
        return Generation(ids, np.zeros(len(ids), np.float32), np.zeros(len(ids), np.int32), finish)

    def abort(self, sequence_id: int) -> None:
        self._aborted.set()

    def release_cache(self, sequence_id: int) -> None:
        self.released.append(sequence_id)


class ScriptedSandbox:
    """A sandbox that returns the code as its output; BROKEN raises a failure."""

    def __init__(self) -> None:
        self.calls: list[CodeRequested] = []
        self.endless_call_began = asyncio.Event()
        self.ended: list[int] = []
        self.restored: list[str] = []  # code of the cells that were restored
        self.num_cancelled = 0

    async def run(self, call: CodeRequested) -> CodeResult:
        self.calls.append(call)
        if call.code == BROKEN:
            raise SandboxFailure("the server [died]")
        if call.code == ENDLESS:
            self.endless_call_began.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.num_cancelled += 1
        return CodeResult(CodeOk(Output(call.code)), 0.01)

    async def grade(self, submission: AnswerSubmitted) -> Grade:
        raise AssertionError("a chat grades nothing")

    def restore_notebook(self, trajectory_id: int, cells: Sequence[CodeRequested]) -> None:
        self.restored = [cell.code for cell in cells]

    async def end_notebook(self, trajectory_id: int) -> None:
        self.ended.append(trajectory_id)


class ScriptedServices(TaskServices):
    """Services with one outcome per method; a call without an outcome never ends."""

    def __init__(self, outcomes: Mapping[str, EnvironmentOutcome | None]) -> None:
        super().__init__({}, {})
        self._outcomes = outcomes
        self.calls: list[EnvironmentCalled] = []
        self.endless_call_began = asyncio.Event()

    async def call(self, request: EnvironmentCalled) -> CallResult:
        self.calls.append(request)
        if (outcome := self._outcomes[request.method]) is None:
            self.endless_call_began.set()
            await asyncio.Event().wait()
        assert outcome is not None
        return CallResult(outcome, 0.01)


class RecordedView:
    """A view that records all shown texts."""

    def __init__(self, tokenizer: TextTokenizer = TOKENIZER) -> None:
        self.text, self._tokenizer = "", tokenizer

    def begin_turn(self, prefill: str) -> None:
        self.text += prefill

    def add_tokens(self, token_ids: Sequence[int]) -> None:
        self.text += self._tokenizer.decode(list(token_ids)).removesuffix(TURN_END)

    def end_turn(self) -> None:
        self.text += "\n"

    def show_result(self, title: str, text: str) -> None:
        self.text += f"[{title}] {text}\n"

    def show_problem(self, text: str) -> None:
        self.text += f"problem: {text}\n"


class ScriptedChat:
    def __init__(
        self,
        *texts: str,
        outcomes: Mapping[str, EnvironmentOutcome | None] | None = None,
        row: DatasetProblem | None = None,
        context_tokens: int = 20_000,
        **rule_changes: object,
    ) -> None:
        self.engine, self.sandbox, self.view = ScriptedEngine(texts), ScriptedSandbox(), RecordedView()
        self.services = ScriptedServices(outcomes or {})
        self.rules: Rules = rules(**rule_changes)
        task = SoloTask("", self.rules, TOKENIZER, self.services, self.sandbox)
        sampling = ChatSampling(SAMPLING, seed=7)
        self.session = ChatSession(
            *(task, row, self.engine, sampling, context_tokens, self.view),  # pyright: ignore[reportArgumentType]
        )

    def read_prompt(self, number: int) -> str:
        """Return the prompt text of the engine's request with this number."""
        return TOKENIZER.decode(self.engine.requests[number].token_ids.tolist())
