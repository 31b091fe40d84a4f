"""Runs the steps of a run in one process, as a plain script: no bus, event log, arbiter or actors.

    rollout: decide -> engine step -> decide -> ... until the batch is complete
    then train; then copy the weights

Only the sandbox's fork servers are separate processes; they execute calls during engine steps.
`python -m benchmarks.support.single_loop_run RUN_FOLDER` runs all steps and prints their metrics
as JSON.
"""

import asyncio
import json
import sys
import time
from collections import deque
from collections.abc import Coroutine, Iterable
from pathlib import Path
from typing import Any

import torch
import uvloop

from asterism.actors.runtime.wiring import build_rules, load_problem_sets
from asterism.bus.addresses import EXECUTOR
from asterism.bus.messages import (
    AnswerGraded,
    AnswerSubmitted,
    BatchReady,
    CodeFinished,
    CodeRequested,
    ExecutorJoined,
    GroupAccepted,
    GroupJudged,
    LeaseGranted,
    LeasePaused,
    LeaseReleased,
    LeaseRequested,
    SessionEnded,
    StartGroup,
    StepCollected,
    StepRequested,
    TrajectoryFinished,
    TurnRequested,
)
from asterism.configs.load import load_run
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.run_config import RunConfig
from asterism.engine.contract import Capacity, GenerationRequest
from asterism.engine.data.task_inputs import write_task_descriptions
from asterism.engine.hf.tokenizer import load_tokenizer
from asterism.engine.inference.engine_core import EngineCore
from asterism.engine.learner.batches.training_sequence import TrainingSequence, build_rl_sequence
from asterism.engine.learner.distributed import RankGroup, gather_full_parameters
from asterism.engine.learner.trainer import Trainer
from asterism.engine.model.hf_checkpoint import load_model
from asterism.policies.decider import Send
from asterism.policies.groups.group_buffer import GroupBuffer
from asterism.policies.rollout.rollout import Rollout
from asterism.policies.rollout.trajectory import TrajectoryEvent
from asterism.policies.step_metrics import StepTimes, compute_step_metrics
from asterism.sandbox.contract import Sandbox
from asterism.sandbox.select_backend import make_sandbox
from asterism.tasks import DEFAULT_TASK

Call = asyncio.Task[TrajectoryEvent]  # call that runs in the sandbox


async def run_all_steps(run: RunConfig, folder: RunFolder) -> list[dict[str, float]]:
    """Run all steps. Return the metrics of each step, as asterism.policies.step_metrics defines them."""
    sandbox = make_sandbox(run.sandbox, run.seed, run.name)
    await sandbox.start()
    try:
        loop = SingleProcessLoop(run, folder, sandbox)
        return [await loop.run_step(number) for number in range(1, run.rl.steps + 1)]
    finally:
        await sandbox.close()


class SingleProcessLoop:
    def __init__(self, run: RunConfig, folder: RunFolder, sandbox: Sandbox) -> None:
        checkpoint = folder.expand_path(run.model.checkpoint)
        tokenizer = load_tokenizer(checkpoint)
        write_task_descriptions(folder, {"": DEFAULT_TASK})
        problems = load_problem_sets(run, folder, tokenizer)
        capacity = Capacity(run.engine.kv_tokens, run.engine.page_tokens, run.sequence_tokens)
        self._run = run
        self._sandbox = sandbox
        self._core = EngineCore(load_model(checkpoint, getattr(torch, run.engine.dtype)), capacity)
        self._trainer = Trainer(load_model(checkpoint), run, RankGroup())
        self._rollout = Rollout(build_rules(run, {"": DEFAULT_TASK}, tokenizer))
        self._rollout.decide(time.monotonic(), ExecutorJoined(EXECUTOR, run.sandbox.fork_servers))
        self._buffer = GroupBuffer(run, problems.train, problems.test)
        self._turns: dict[int, TurnRequested] = {}  # turns that the engine generates, by trajectory
        self._answers: asyncio.Queue[Call] = asyncio.Queue()  # bound of the queue: at most one answer per trajectory
        self._calls: set[Call] = set()  # unfinished sandbox calls
        self._sequences: list[TrainingSequence] = []  # sequences of the step's accepted groups
        self._collected: StepCollected | None = None

    async def run_step(self, number: int) -> dict[str, float]:
        torch.set_num_threads(self._run.engine.threads)
        times = StepTimes(step=number, requested=time.monotonic())
        collected = await self._collect(StepRequested(number, number - 1))
        times.collected, times.counts, times.failures = time.monotonic(), collected.counts, collected.failures
        torch.set_num_threads(self._run.learner.threads)
        times.training = self._trainer.run_rl_step(self._sequences)
        times.trained = time.monotonic()
        self._core.install_weights(number, gather_full_parameters(self._trainer.model))
        return {"step": number, **compute_step_metrics(times, time.monotonic())}

    async def _collect(self, request: StepRequested) -> StepCollected:
        """Collect one batch. Raises SandboxFailure: failed calls are not retried."""
        self._sequences, self._collected = [], None
        await self._carry_out(self._buffer.decide(time.monotonic(), request))
        while self._collected is None:
            if self._core.has_work:
                events = self._generate()
                await asyncio.sleep(0)  # lets the event loop receive the sandbox's answers
            else:
                events = [(await self._answers.get()).result()]
            while not self._answers.empty():
                events.append(self._answers.get_nowait().result())
            for event in events:
                await self._carry_out(self._rollout.decide(time.monotonic(), event))
        return self._collected

    def _generate(self) -> list[TrajectoryEvent]:
        """Run one engine step and return the turns that it completes. Raises EngineFailure."""
        events: list[TrajectoryEvent] = []
        for trajectory_id, result in self._core.step():
            if isinstance(result, Exception):
                raise result
            events.append(result.build_answer(self._turns.pop(trajectory_id)))
        return events

    async def _carry_out(self, effects: Iterable[Send]) -> None:
        """Carry out the effects, and the further effects of rollout and buffer that result from them."""
        messages = deque(effect.message for effect in effects)
        while messages:
            now = time.monotonic()
            match messages.popleft():
                case StartGroup() as group:
                    messages.extend(send.message for send in self._rollout.decide(now, group))
                case LeaseRequested() as request:  # the engine queues requests that have no room
                    tokens = request.tokens + request.max_new_tokens
                    granted = LeaseGranted(request.trajectory_id, "engine", tokens, request.lease, 0.0, "alone")
                    messages.extend(send.message for send in self._rollout.decide(now, granted))
                case TrajectoryFinished() as finished:
                    messages.extend(send.message for send in self._buffer.decide(now, finished))
                case TurnRequested() as turn:
                    self._turns[turn.trajectory_id] = turn
                    self._core.submit(GenerationRequest.from_turn(turn))
                case LeasePaused() | GroupJudged() | BatchReady():
                    pass
                case LeaseReleased(trajectory_id=trajectory_id):
                    self._core.release_cache(trajectory_id)
                case CodeRequested() as call:
                    self._start_call(self._run_call(call))
                case AnswerSubmitted() as answer:
                    self._start_call(self._grade(answer))
                case SessionEnded(trajectory_id=trajectory_id):
                    await self._sandbox.end_notebook(trajectory_id)
                case GroupAccepted(samples=samples):
                    self._sequences += map(build_rl_sequence, samples)
                case StepCollected() as collected:
                    self._collected = collected
                case other:
                    raise TypeError(f"the loop does not accept {type(other).__name__}")

    # ---------------------------------------------------------------- the sandbox

    def _start_call(self, call: Coroutine[Any, Any, TrajectoryEvent]) -> None:
        task = asyncio.get_running_loop().create_task(call)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        task.add_done_callback(self._answers.put_nowait)

    async def _run_call(self, call: CodeRequested) -> CodeFinished:
        result = await self._sandbox.run(call)
        return CodeFinished(call.trajectory_id, call.call, result.outcome, result.duration_s, EXECUTOR)

    async def _grade(self, answer: AnswerSubmitted) -> AnswerGraded:
        grade = await self._sandbox.grade(answer)
        return AnswerGraded(answer.trajectory_id, float(grade.correct), grade.duration_s, EXECUTOR)


def main() -> None:
    folder = RunFolder(Path(sys.argv[1]))
    print(json.dumps(uvloop.run(run_all_steps(load_run(folder.config), folder))))


if __name__ == "__main__":
    main()
