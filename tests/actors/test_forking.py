"""Trajectories that go on from a turn: the actors of a run around an engine and a sandbox that do as they are told."""

from __future__ import annotations

import asyncio
import json
from random import Random

import pytest

from actors.forking import Ended, go_on
from bus.messages import TrajectoryFailed, TrajectoryFinished
from configs.errors import UnusableInput
from configs.schema import Sandbox as SandboxConfig
from engine.contract import Capacity
from policies.history import History, branches
from policies.record import bytes_to_ids
from policies.trajectory import Trajectory
from sandbox.choice import sandbox_of
from sandbox.contract import Isolation, SandboxFailure
from tests.actors.test_executor import ObedientSandbox
from tests.fakes import ANSWER, CALL, END, TOKENIZER, generated
from tests.policies.test_history import RULES, TID, course, history
from tests.simulation.clock import run_virtually
from tests.simulation.engines import SayingEngine

BREAKING_CALL = CALL.replace('"1"', '"break"')


class Texts:
    """What every branch says, turn by turn, from the position where it begins."""

    def __init__(self, *texts: str) -> None:
        self._turns = [[*TOKENIZER.encode(text, trusted=True), END] for text in texts]
        self._said: dict[int, int] = {}

    def left(self, trajectory_id: int, position: int) -> list[int]:
        number = self._said.get(trajectory_id, 0)
        self._said[trajectory_id] = number + 1
        return self._turns[number]


def fork(
    *texts: str, count: int = 1, kv_tokens: int = 8192, sandbox: ObedientSandbox | None = None, strict: bool = False
) -> tuple[list[Trajectory], list[Ended]]:
    """From the beginning of turn 1 on, after one cell."""
    begins = branches(course(history()).beginnings[1], count, None)
    engine = SayingEngine(Random(1), Texts(*texts), kv_tokens, version=0)  # pyright: ignore[reportArgumentType]
    going = go_on(RULES, TOKENIZER, engine, sandbox or ObedientSandbox(), begins, strict=strict)
    return begins, run_virtually(going)


def test_a_branch_goes_on_with_the_tokens_that_there_were() -> None:
    (begins,), (ended,) = fork(ANSWER)
    assert isinstance(ended.end, TrajectoryFinished)
    assert (ended.end.reward, ended.end.ending, ended.end.turns, ended.end.calls) == (1.0, "answered", 2, 1)
    said = TOKENIZER.encode(ANSWER, trusted=True)
    record = ended.trajectory.record
    assert record.token_ids.startswith(begins.record.token_ids)
    assert record.num_tokens == begins.record.num_tokens + len(said) + 1
    assert record.versions.startswith(begins.record.versions)


@pytest.mark.parametrize(("strict", "seen"), [(False, "<f at 0x7f8652565a80>"), (True, "<f at 0x000000000000>")])
def test_what_a_strict_one_reads_has_no_memory_addresses(strict: bool, seen: str) -> None:
    sandbox = ObedientSandbox()
    sandbox.says = "<f at 0x7f8652565a80>"
    _, (ended,) = fork(CALL, ANSWER, sandbox=sandbox, strict=strict)
    assert seen in TOKENIZER.decode(bytes_to_ids(ended.trajectory.record.token_ids))


def test_its_notebook_is_made_again_before_its_next_cell() -> None:
    sandbox = ObedientSandbox()
    fork(CALL, CALL, ANSWER, sandbox=sandbox)
    assert sandbox.told[:4] == [f"restore {TID}: 1", f"run {TID}", f"run {TID}", f"grade {TID}"]
    assert sandbox.told[-1] == "close"


def test_each_branch_has_a_notebook_of_its_own() -> None:
    sandbox = ObedientSandbox()
    fork(CALL, ANSWER, count=3, sandbox=sandbox)
    restored = [told for told in sandbox.told if told.startswith("restore")]
    assert sorted(restored) == sorted(f"restore {TID + number}: 1" for number in range(3))


def test_branches_wait_where_the_engine_has_room_for_one_alone() -> None:
    begins, ended = fork(CALL, ANSWER, count=3, kv_tokens=4096)
    assert [each.trajectory.trajectory_id for each in ended] == [each.trajectory_id for each in begins]
    assert all(isinstance(each.end, TrajectoryFinished) for each in ended)


def test_a_sandbox_that_breaks_twice_is_a_failure_and_no_answer() -> None:
    sandbox = ObedientSandbox()
    _, (ended,) = fork(BREAKING_CALL, sandbox=sandbox)
    assert ended.end == TrajectoryFailed(TID, 3, "sandbox: broken")
    assert sandbox.told.count(f"run {TID}") == 2


def test_what_the_engine_refuses_at_its_start_ends_it_all() -> None:
    class Refusing(SayingEngine):
        async def start(self) -> Capacity:
            raise UnusableInput("no such file")

    sandbox = ObedientSandbox()
    engine = Refusing(Random(1), Texts(), 8192)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ExceptionGroup) as raised:
        run_virtually(go_on(RULES, TOKENIZER, engine, sandbox, [course(history()).beginnings[1]]))
    assert [str(each) for each in raised.value.exceptions] == ["no such file"]
    assert sandbox.told == ["close"]


def test_a_sandbox_that_cannot_start_ends_it_all() -> None:
    class Absent(ObedientSandbox):
        async def start(self) -> Isolation:
            raise SandboxFailure("no sandbox here")

    with pytest.raises(ExceptionGroup) as raised:
        fork(ANSWER, sandbox=Absent())
    assert [str(each) for each in raised.value.exceptions] == ["no sandbox here"]


def real_notebook(*cells: str, limit_s: float = 4.0) -> Ended:
    """A branch that runs the last cell in a real sandbox, after those that its log says went well."""
    ran = with_code(history(), cells[0])
    begins = course(ran).beginnings[1]
    engine = SayingEngine(Random(1), Texts(call_of(cells[1]), ANSWER), 8192, version=0)  # pyright: ignore[reportArgumentType]
    sandbox = sandbox_of(SandboxConfig(backend="process", time_limit_s=limit_s))
    (ended,) = asyncio.run(go_on(RULES, TOKENIZER, engine, sandbox, [begins]))
    return ended


@pytest.mark.slow
def test_a_cell_finds_what_the_logged_cells_left() -> None:
    ended = real_notebook("x = 41", "print(x + 1)")
    assert isinstance(ended.end, TrajectoryFinished)
    assert ended.end.calls_failed == 0
    assert "stdout:\n42\n" in TOKENIZER.decode(bytes_to_ids(ended.trajectory.record.token_ids))


@pytest.mark.slow
def test_a_notebook_that_cannot_be_made_again_is_a_failure_and_no_answer() -> None:
    ended = real_notebook("import time; time.sleep(60)", "print(1)", limit_s=0.2)
    assert ended.end == TrajectoryFailed(TID, 3, "sandbox: a notebook could not be made again")


def call_of(code: str) -> str:
    return CALL.replace('"1"', json.dumps(code))


def with_code(whole: History, code: str) -> History:
    """Its first call ran another code."""
    events = list(whole.events)
    events[1] = events[1]._replace(message=generated(TID, 0, call_of(code)))
    return whole._replace(events=events)
