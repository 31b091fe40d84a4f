"""The same steps in one process, as a script would take them: no bus, no event log, no arbiter, no actor.

    rollout: decide -> engine step -> decide -> ... until the batch is there; then train; then copy the weights

Only the sandbox's fork servers are other processes, as they have to be, and they work while the engine steps.
`python -m benchmarks._single_process RUN_FOLDER` takes all steps of that run, and prints their metrics as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import deque
from collections.abc import Coroutine, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import uvloop

from actors.problems import load_problems
from actors.wiring import EXECUTOR, rules
from bus.messages import (
    AnswerGraded,
    AnswerSubmitted,
    BatchReady,
    CodeFinished,
    CodeRequested,
    ExecutorJoined,
    LeaseGranted,
    LeaseParked,
    LeaseReleased,
    LeaseRequested,
    SessionEnded,
    StartGroup,
    StepCollected,
    StepRequested,
    TrajectoryFinished,
    TurnGenerated,
    TurnRequested,
)
from configs.load import load_resolved
from configs.run_folder import RunFolder
from configs.schema import Run
from engine.batching import ContinuousBatch
from engine.checkpoint import load_model
from engine.contract import Capacity, GenerationRequest
from engine.distributed import Ranks, whole_parameters
from engine.tokenizer import load_tokenizer
from engine.trainer import Trainer
from policies.accounting import StepTimes, step_metrics
from policies.decider import Send
from policies.group_buffer import GroupBuffer
from policies.rollout import Rollout
from policies.trajectory import TrajectoryEvent
from sandbox.choice import sandbox_of
from sandbox.contract import Sandbox

Call = asyncio.Task[TrajectoryEvent]  # of the sandbox


async def all_steps(run: Run, folder: RunFolder) -> list[dict[str, float]]:
    """Every step's metrics, by the definitions of a run's (policies.accounting.step_metrics)."""
    sandbox = sandbox_of(run.sandbox, run.seed, run.name)
    await sandbox.start()
    try:
        loop = SingleProcess(run, folder, sandbox)
        return [await loop.step(number) for number in range(1, run.rl.steps + 1)]
    finally:
        await sandbox.close()


class SingleProcess:
    def __init__(self, run: Run, folder: RunFolder, sandbox: Sandbox) -> None:
        checkpoint = folder.expand(run.model.checkpoint)
        tokenizer = load_tokenizer(checkpoint)
        problems = load_problems(run, folder, tokenizer)
        capacity = Capacity(run.engine.kv_tokens, run.engine.page_tokens, run.dialogue.sequence_tokens)
        self._run = run
        self._sandbox = sandbox
        self._core = ContinuousBatch(load_model(checkpoint, getattr(torch, run.engine.dtype)), capacity)
        self._trainer = Trainer(load_model(checkpoint), run, Ranks())
        self._rollout = Rollout(rules(run, tokenizer), tokenizer)
        self._rollout.decide(time.monotonic(), ExecutorJoined(EXECUTOR, run.sandbox.fork_servers))
        self._buffer = GroupBuffer(run, problems.train, problems.test)
        self._turns: dict[int, TurnRequested] = {}  # that are being generated, by trajectory
        self._answers: asyncio.Queue[Call] = asyncio.Queue()  # the sandbox's; one for each trajectory at most
        self._calls: set[Call] = set()  # under way
        self._batch: BatchReady | None = None
        self._collected: StepCollected | None = None

    async def step(self, number: int) -> dict[str, float]:
        torch.set_num_threads(self._run.engine.threads)
        times = StepTimes(step=number, requested=time.monotonic())
        batch, collected = await self._collect(StepRequested(number, number - 1))
        times.collected, times.counts, times.failures = time.monotonic(), collected.counts, collected.failures
        torch.set_num_threads(self._run.learner.threads)
        times.training = self._trainer.rl_step(batch.rows)
        times.trained = time.monotonic()
        self._core.install(number, whole_parameters(self._trainer.model))
        return {"step": number, **step_metrics(times, time.monotonic())}

    async def _collect(self, request: StepRequested) -> tuple[BatchReady, StepCollected]:
        """Raises SandboxFailure: a script has no second try."""
        self._batch = self._collected = None
        await self._carry_out(self._buffer.decide(time.monotonic(), request))
        while self._batch is None or self._collected is None:
            if self._core.has_work:
                events = self._generate()
                await asyncio.sleep(0)  # lets the sandbox's answers in
            else:
                events = [(await self._answers.get()).result()]
            while not self._answers.empty():
                events.append(self._answers.get_nowait().result())
            for event in events:
                await self._carry_out(self._rollout.decide(time.monotonic(), event))
        return self._batch, self._collected

    def _generate(self) -> list[TrajectoryEvent]:
        """One step of the engine: the turns that it completes. Raises EngineFailure."""
        events: list[TrajectoryEvent] = []
        for trajectory_id, result in self._core.step():
            if isinstance(result, Exception):
                raise result
            token_ids, logprobs = result.token_ids.tobytes(), result.logprobs.tobytes()
            turn = self._turns.pop(trajectory_id)
            versions = result.versions.tobytes()
            events.append(
                TurnGenerated(trajectory_id, turn.turn, turn.lease, token_ids, logprobs, versions, result.finish)
            )
        return events

    async def _carry_out(self, effects: Iterable[Send]) -> None:
        """The effects, and those of whatever they make the rollout and the buffer decide."""
        messages = deque(effect.message for effect in effects)
        while messages:
            now = time.monotonic()
            match messages.popleft():
                case StartGroup() as group:
                    messages.extend(send.message for send in self._rollout.decide(now, group))
                case LeaseRequested() as request:  # what has no room waits in the engine
                    tokens = request.tokens + request.max_new_tokens
                    granted = LeaseGranted(request.trajectory_id, "engine", tokens, request.lease, 0.0, "alone")
                    messages.extend(send.message for send in self._rollout.decide(now, granted))
                case TrajectoryFinished() as finished:
                    messages.extend(send.message for send in self._buffer.decide(now, finished))
                case TurnRequested() as turn:
                    self._turns[turn.trajectory_id] = turn
                    self._core.submit(_generation_request(turn))
                case LeaseParked():
                    pass
                case LeaseReleased(trajectory_id=trajectory_id):
                    self._core.forget(trajectory_id)
                case CodeRequested() as call:
                    self._begin(self._run_call(call))
                case AnswerSubmitted() as answer:
                    self._begin(self._grade(answer))
                case SessionEnded(trajectory_id=trajectory_id):
                    await self._sandbox.end_session(trajectory_id)
                case BatchReady() as batch:
                    self._batch = batch
                case StepCollected() as collected:
                    self._collected = collected
                case other:
                    raise TypeError(f"the loop has no use for {type(other).__name__}")

    # ---------------------------------------------------------------- the sandbox

    def _begin(self, call: Coroutine[Any, Any, TrajectoryEvent]) -> None:
        task = asyncio.get_running_loop().create_task(call)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        task.add_done_callback(self._answers.put_nowait)

    async def _run_call(self, call: CodeRequested) -> CodeFinished:
        result = await self._sandbox.run(call)
        return CodeFinished(call.trajectory_id, call.call, result.outcome, result.duration_s, EXECUTOR)

    async def _grade(self, answer: AnswerSubmitted) -> AnswerGraded:
        grade = await self._sandbox.grade(answer)
        return AnswerGraded(answer.trajectory_id, grade.correct, grade.duration_s, EXECUTOR)


def _generation_request(turn: TurnRequested) -> GenerationRequest:
    return GenerationRequest(
        sequence_id=turn.trajectory_id,
        token_ids=np.frombuffer(turn.token_ids, dtype=np.int32),
        max_new_tokens=turn.max_new_tokens,
        temperature=turn.temperature,
        top_p=turn.top_p,
        top_k=turn.top_k,
        stop_token_ids=turn.stop_token_ids,
        seed=turn.seed,
    )


def main() -> None:
    folder = RunFolder(Path(sys.argv[1]))
    print(json.dumps(uvloop.run(all_steps(load_resolved(folder.config), folder))))


if __name__ == "__main__":
    main()
