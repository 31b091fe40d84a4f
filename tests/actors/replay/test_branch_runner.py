"""Trajectories continue from a turn, with the actors of a run, a scripted engine and a scripted sandbox."""

import asyncio
import json
from random import Random

import pytest

from asterism.actors.replay.branch_runner import EndedTrajectory, continue_trajectories, fork_trajectories
from asterism.bus.messages import TrajectoryFailed, TrajectoryFinished, bytes_to_ids
from asterism.configs.errors import UnusableInput
from asterism.configs.schema.machines import SandboxConfig as SandboxConfig
from asterism.engine.contract import Capacity
from asterism.policies.rollout.trajectory import Trajectory
from asterism.sandbox.contract import Isolation, SandboxFailure
from asterism.sandbox.select_backend import make_sandbox
from tests.actors.test_executor import ScriptedSandbox
from tests.fakes import ANSWER, CALL, END, TOKENIZER
from tests.recorded import RULES, TID, replay_recorded
from tests.simulation.clock import run_virtually
from tests.simulation.engines import ScriptedEngine

pytestmark = pytest.mark.slow

BREAKING_CALL = CALL.replace('"1"', '"break"')


class ScriptedTurns:
    """The turns that every branch generates."""

    def __init__(self, *texts: str) -> None:
        self._turns = [[*TOKENIZER.encode(text, trusted=True), END] for text in texts]
        self._num_turns: dict[int, int] = {}

    def left(self, trajectory_id: int, position: int) -> list[int]:
        number = self._num_turns.get(trajectory_id, 0)
        self._num_turns[trajectory_id] = number + 1
        return self._turns[number]


def fork(
    *texts: str, count: int = 1, kv_tokens: int = 8192, sandbox: ScriptedSandbox | None = None, strict: bool = False
) -> tuple[list[Trajectory], list[EndedTrajectory]]:
    """Fork at the start of turn 1, after one cell."""
    begins = fork_trajectories(replay_recorded().turn_starts[1], count, None)
    engine = ScriptedEngine(Random(1), ScriptedTurns(*texts), kv_tokens, version=0)  # pyright: ignore[reportArgumentType]
    going = continue_trajectories({"": RULES}, engine, sandbox or ScriptedSandbox(), begins, strict=strict)
    return begins, run_virtually(going)


def test_only_the_first_branch_has_the_originals_seed() -> None:
    start = replay_recorded().turn_starts[1]
    first, second, third = fork_trajectories(start, 3, None)
    assert first == start
    assert len({first.seed, second.seed, third.seed}) == 3
    assert len({first.trajectory_id, second.trajectory_id, third.trajectory_id}) == 3
    assert first.record == second.record == third.record


def test_a_branch_can_be_repeated_with_its_seed() -> None:
    start = replay_recorded().turn_starts[1]
    second = fork_trajectories(start, 3, 77)[1]
    (again,) = fork_trajectories(start, 1, second.group.seed)
    assert again.seed == second.seed
    assert fork_trajectories(start, 1, 77)[0].seed != start.seed


def test_a_branch_continues_with_the_tokens_of_its_trajectory() -> None:
    (begins,), (ended,) = fork(ANSWER)
    assert isinstance(ended.end, TrajectoryFinished)
    assert (ended.end.reward, ended.end.ending, ended.end.turns, ended.end.calls) == (1.0, "answered", 2, 1)
    generated_ids = TOKENIZER.encode(ANSWER, trusted=True)
    record = ended.trajectory.record
    assert record.token_ids.startswith(begins.record.token_ids)
    assert record.num_tokens == begins.record.num_tokens + len(generated_ids) + 1
    assert record.versions.startswith(begins.record.versions)


@pytest.mark.parametrize(("strict", "output"), [(False, "<f at 0x7f8652565a80>"), (True, "<f at 0x000000000000>")])
def test_strict_branches_scrub_memory_addresses_from_outputs(strict: bool, output: str) -> None:
    sandbox = ScriptedSandbox()
    sandbox.output = "<f at 0x7f8652565a80>"
    _, (ended,) = fork(CALL, ANSWER, sandbox=sandbox, strict=strict)
    assert output in TOKENIZER.decode(bytes_to_ids(ended.trajectory.record.token_ids))


def test_the_notebook_is_restored_before_the_next_cell() -> None:
    sandbox = ScriptedSandbox()
    fork(CALL, CALL, ANSWER, sandbox=sandbox)
    assert sandbox.requests[:4] == [f"restore {TID}: 1", f"run {TID}", f"run {TID}", f"grade {TID}"]
    assert sandbox.requests[-1] == "close"


def test_each_branch_has_a_separate_notebook() -> None:
    sandbox = ScriptedSandbox()
    fork(CALL, ANSWER, count=3, sandbox=sandbox)
    restored = [request for request in sandbox.requests if request.startswith("restore")]
    assert sorted(restored) == sorted(f"restore {TID + number}: 1" for number in range(3))


def test_branches_wait_if_the_kv_cache_has_room_for_only_one_branch() -> None:
    begins, ended = fork(CALL, ANSWER, count=3, kv_tokens=4096)
    assert [each.trajectory.trajectory_id for each in ended] == [each.trajectory_id for each in begins]
    assert all(isinstance(each.end, TrajectoryFinished) for each in ended)


def test_a_call_that_fails_twice_in_the_sandbox_fails_the_trajectory() -> None:
    sandbox = ScriptedSandbox()
    _, (ended,) = fork(BREAKING_CALL, sandbox=sandbox)
    assert ended.end == TrajectoryFailed(TID, 3, "sandbox: broken")
    assert sandbox.requests.count(f"run {TID}") == 2


def test_an_engine_start_error_ends_all_branches() -> None:
    class Refusing(ScriptedEngine):
        async def start(self) -> Capacity:
            raise UnusableInput("no such file")

    sandbox = ScriptedSandbox()
    engine = Refusing(Random(1), ScriptedTurns(), 8192)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ExceptionGroup) as raised:
        run_virtually(continue_trajectories({"": RULES}, engine, sandbox, [replay_recorded().turn_starts[1]]))
    assert [str(each) for each in raised.value.exceptions] == ["no such file"]
    assert sandbox.requests == ["close"]


def test_a_sandbox_start_error_ends_all_branches() -> None:
    class Absent(ScriptedSandbox):
        async def start(self) -> Isolation:
            raise SandboxFailure("no sandbox here")

    with pytest.raises(ExceptionGroup) as raised:
        fork(ANSWER, sandbox=Absent())
    assert [str(each) for each in raised.value.exceptions] == ["no sandbox here"]


def real_notebook(*cells: str, limit_s: float = 4.0) -> EndedTrajectory:
    """Return the end of a branch that restores the first cell in a real sandbox, and then runs the second."""
    begins = replay_recorded([call_of(cells[0])]).turn_starts[1]
    engine = ScriptedEngine(Random(1), ScriptedTurns(call_of(cells[1]), ANSWER), 8192, version=0)  # pyright: ignore[reportArgumentType]
    sandbox = make_sandbox(SandboxConfig(backend="process", time_limit_s=limit_s))
    (ended,) = asyncio.run(continue_trajectories({"": RULES}, engine, sandbox, [begins]))
    return ended


@pytest.mark.slow
def test_a_cell_sees_the_state_of_the_logged_cells() -> None:
    ended = real_notebook("x = 41", "print(x + 1)")
    assert isinstance(ended.end, TrajectoryFinished)
    assert ended.end.calls_failed == 0
    assert "stdout:\n42\n" in TOKENIZER.decode(bytes_to_ids(ended.trajectory.record.token_ids))


@pytest.mark.slow
def test_a_notebook_that_cannot_be_restored_fails_the_trajectory() -> None:
    ended = real_notebook("import time; time.sleep(60)", "print(1)", limit_s=0.2)
    assert ended.end == TrajectoryFailed(TID, 3, "sandbox: a notebook could not be rebuilt")


def call_of(code: str) -> str:
    return CALL.replace('"1"', json.dumps(code))
