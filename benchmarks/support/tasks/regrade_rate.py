"""Measures regrading: trajectories' instances are opened again, and their calls repeated."""

import time
from collections.abc import Iterator
from pathlib import Path

from asterism.actors.replay.regrading import StoredTrajectory, regrade
from asterism.bus.messages import (
    AnsweredCall,
    AnswerSubmitted,
    EnvironmentHistory,
    EnvironmentOutcome,
    RewardInput,
    StartGroup,
    TokenRecord,
    TrajectoryFinished,
    digest_outcome,
)
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.algorithm import Sampling
from asterism.configs.schema.machines import SandboxConfig as SandboxConfig
from asterism.sandbox.select_backend import make_sandbox
from asterism.tasks.hosting.task_services import TaskServices, build_task_services
from benchmarks.support.tasks.counters import Counter
from benchmarks.support.tasks.host_calls import (
    ADDITION,
    DESCRIPTION,
    ROW,
    TASK,
    WrongResult,
    add_one,
    build_run,
    open_instance,
    open_pool,
)

CALLS = 3  # calls of each trajectory, after its opening


async def measure_regrading(trajectories: int, folder: Path) -> float:
    """Return the trajectories per second that one host process scores again."""
    sandbox = make_sandbox(SandboxConfig(backend="process"))  # not started: only the environment gives rewards
    services = build_task_services(
        build_run(Counter), RunFolder(folder), {TASK: DESCRIPTION}, sandbox, repeats_calls=True
    )
    try:
        history = await _record_history()
        await _regrade_all(history, range(1), services)  # starts the process
        began_s = time.perf_counter()
        await _regrade_all(history, range(1, trajectories + 1), services)
        return trajectories / (time.perf_counter() - began_s)
    finally:
        await services.close()


async def _record_history() -> EnvironmentHistory:
    history = EnvironmentHistory()

    def add(method: str, arguments: bytes, outcome: EnvironmentOutcome) -> EnvironmentHistory:
        return history.add_call(AnsweredCall(method, arguments, digest_outcome(outcome)), outcome)

    async with open_pool(Counter) as pool:
        history = add("", ROW, (await open_instance(pool, 0)).outcome)
        for call in range(CALLS):
            history = add(*ADDITION, (await add_one(pool, 0, call)).outcome)
    return history


async def _regrade_all(history: EnvironmentHistory, trajectory_ids: range, tasks: TaskServices) -> None:
    """Score all trajectories again. Raises WrongResult."""
    async for regraded in regrade(_iter_stored(history, trajectory_ids), tasks):
        if regraded.failure or regraded.is_changed:
            raise WrongResult(f"{regraded.trajectory_id}: {regraded.new_reward} {regraded.failure}")


def _iter_stored(
    history: EnvironmentHistory, trajectory_ids: range
) -> Iterator[tuple[StoredTrajectory, AnswerSubmitted]]:
    record = TokenRecord(1, bytes(8), b"\0\1", bytes(8), bytes(8))
    reward_input = RewardInput("done", ROW, record.prompt_tokens, record.token_ids, record.loss_mask)
    for each in trajectory_ids:
        group = StartGroup(each, "train", f"problem {each}", "", bytes(4), 1, each, Sampling(), 0, ROW, TASK)
        finished = TrajectoryFinished(
            *(each, each, float(CALLS), "done", record),
            turns=CALLS + 1,
            calls=CALLS,
            calls_failed=0,
            responses_with_error=0,
            answer_opens=0,
            answer_closes=0,
            answer_spans=0,
            lease_wait_s=0.0,
            generation_s=0.0,
            tools_s=0.0,
            grading_s=0.0,
            environment=history,
        )
        yield StoredTrajectory(group, finished), AnswerSubmitted(each, "", "", reward_input, TASK)
