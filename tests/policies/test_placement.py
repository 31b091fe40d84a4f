"""Which executor a trajectory works on, and what becomes of it when executors come and go."""

from __future__ import annotations

import pytest

from bus.messages import (
    AnswerGraded,
    AnswerSubmitted,
    AnyMessage,
    BufferCursor,
    CallFailed,
    CallsMoved,
    CodeDied,
    CodeFinished,
    CodeOk,
    CodeOutcome,
    CodeOutOfMemory,
    CodeRaised,
    CodeRefused,
    CodeRequested,
    CodeTimedOut,
    ExecutorJoined,
    ExecutorLeft,
    LeaseGranted,
    LeaseParked,
    Output,
    ProtocolError,
    RunStarted,
    SessionRestored,
    StartGroup,
    TrajectoryFailed,
)
from policies.decider import Send
from policies.notebook import keeps_effects
from policies.placement import Placement
from policies.rollout import Rollout
from tests.fakes import ANSWER, CALL, PROMPT, TOKENIZER, generated, rules


class Process:
    """A rollout process whose trajectories have leases and say what they are told to."""

    def __init__(self, trajectories: int, *joined: ExecutorJoined) -> None:
        self.rollout = Rollout(rules(), TOKENIZER)
        self.tell(StartGroup(0, "train", "q:1", "2", PROMPT, trajectories, 0, 1.0, 5))
        for number in range(trajectories):
            self.grant(number)
        for event in joined:
            self.tell(event)

    def tell(self, event: AnyMessage) -> list[Send]:
        return list(self.rollout.decide(0.0, event))

    def say(self, trajectory_id: int, text: str) -> list[Send]:
        trajectory = self.rollout.trajectories[trajectory_id]
        return self.tell(generated(trajectory_id, trajectory.turn, text, lease=trajectory.lease))

    def grant(self, trajectory_id: int) -> None:
        lease = self.rollout.trajectories[trajectory_id].lease + 1
        self.tell(LeaseGranted(trajectory_id, "generator-0", 10_000, lease, 0.0, "room"))

    def answer(self, trajectory_id: int, call: int, executor: str) -> list[Send]:
        effects = self.tell(CodeFinished(trajectory_id, call, CodeOk(Output()), 0.1, executor))
        self.grant(trajectory_id)
        return effects


def receivers(effects: list[Send]) -> list[str]:
    return [send.to for send in effects if isinstance(send.message, CodeRequested | AnswerSubmitted)]


def test_a_trajectory_is_placed_where_the_fewest_calls_are_open_for_each_slot() -> None:
    process = Process(6, ExecutorJoined("b", 1), ExecutorJoined("a", 1), ExecutorJoined("c", 2))
    placed = [receivers(process.say(number, CALL)) for number in range(6)]
    assert placed == [["a"], ["b"], ["c"], ["c"], ["a"], ["b"]]


def test_an_executor_that_fails_all_its_calls_at_once_does_not_draw_the_others() -> None:
    process = Process(12, ExecutorJoined("broken", 1), ExecutorJoined("sound", 1))
    placed: list[str] = []
    for number in range(12):
        (executor,) = receivers(process.say(number, CALL))
        placed.append(executor)
        if executor == "broken":
            process.tell(CallFailed(number, 0, "sandbox: no container", executor))
    assert placed.count("broken") <= 4
    process.answer(placed.index("broken"), 0, "broken")  # its second try
    assert process.rollout.placement.loads["broken"].failures == 0


def test_a_trajectory_stays_where_its_notebook_is() -> None:
    process = Process(3, ExecutorJoined("a", 1), ExecutorJoined("b", 9))
    assert receivers(process.say(0, CALL)) == ["a"]
    process.answer(0, 0, "a")
    assert receivers(process.say(1, CALL)) == ["a"]  # nothing is open there, and its name comes first
    assert receivers(process.say(0, CALL)) == ["a"]
    process.answer(0, 1, "a")
    assert receivers(process.say(0, ANSWER)) == ["a"]
    assert process.rollout.placement.loads["a"].open_calls == 2


def test_an_answer_makes_room_and_so_does_the_end_of_a_trajectory() -> None:
    process = Process(2, ExecutorJoined("a", 1))
    process.say(0, CALL)
    process.say(1, ANSWER)
    assert process.rollout.placement.loads["a"].open_calls == 2
    process.answer(0, 0, "a")
    process.tell(AnswerGraded(1, True, 0.1, "a"))
    assert process.rollout.placement.loads["a"].open_calls == 0


def test_calls_wait_in_their_order_while_there_is_no_executor() -> None:
    process = Process(3)
    assert receivers(process.say(2, CALL) + process.say(0, ANSWER) + process.say(1, CALL)) == []
    joined = process.tell(ExecutorJoined("a", 1))
    asked = [send.message for send in joined if isinstance(send.message, CodeRequested | AnswerSubmitted)]
    assert [request.trajectory_id for request in asked] == [2, 0, 1]
    assert joined[-1] == Send("launcher", CallsMoved("a", sent=3, waiting=0, lost=0))


def test_what_was_under_way_goes_to_those_that_are_left_by_their_load() -> None:
    process = Process(6, ExecutorJoined("a", 1))
    for number in range(4):
        process.say(number, CALL)
    process.tell(ExecutorJoined("b", 1))
    process.tell(ExecutorJoined("c", 1))
    process.say(4, CALL)  # b
    left = process.tell(ExecutorLeft("a", "a ended with exit code -9"))
    assert receivers(left) == ["c", "b", "c", "b"]
    assert left[-1] == Send("launcher", CallsMoved("a", sent=4, waiting=0, lost=0))
    assert {name: load.open_calls for name, load in process.rollout.placement.loads.items()} == {"b": 3, "c": 2}


def test_a_call_that_has_had_its_second_try_is_lost_with_its_executor_and_named() -> None:
    process = Process(1, ExecutorJoined("a", 1), ExecutorJoined("b", 1))
    process.say(0, CALL)
    process.tell(ExecutorLeft("a", "a ended with exit code -9"))
    left = process.tell(ExecutorLeft("b", "b ended with exit code -9"))
    failed = [send.message for send in left if isinstance(send.message, TrajectoryFailed)]
    assert failed == [TrajectoryFailed(0, 0, "executor left: b ended with exit code -9")]
    assert left[-1] == Send("launcher", CallsMoved("b", sent=0, waiting=0, lost=1))
    assert not process.rollout.trajectories


def test_the_notebook_goes_ahead_of_the_next_call_and_only_once() -> None:
    process = Process(1, ExecutorJoined("a", 1), ExecutorJoined("b", 1))
    (first,) = [send.message for send in process.say(0, CALL) if isinstance(send.message, CodeRequested)]
    process.answer(0, 0, "a")
    assert process.tell(ExecutorLeft("a", "gone")) == []
    asked = process.say(0, CALL)
    assert [type(send.message) for send in asked] == [LeaseParked, SessionRestored, CodeRequested]
    assert asked[1] == Send("b", SessionRestored(0, (first,)))
    process.answer(0, 1, "b")
    assert [type(send.message) for send in process.say(0, CALL)] == [CodeRequested, LeaseParked]


@pytest.mark.parametrize(
    ("outcome", "kept"),
    [
        (CodeOk(Output()), True),
        (CodeRaised(Output(), "E", "E"), True),
        (CodeOutOfMemory(Output(), 512), True),
        (CodeTimedOut(Output(), 4.0), False),
        (CodeDied(Output(), -9), False),
        (CodeRefused("too long"), False),
    ],
)
def test_a_notebook_holds_what_its_process_lived_through(outcome: CodeOutcome, kept: bool) -> None:
    assert keeps_effects(outcome) == kept


def test_a_new_life_of_the_run_knows_no_executor_of_the_last_one() -> None:
    process = Process(1, ExecutorJoined("a", 1))
    process.tell(RunStarted(0, BufferCursor()))
    assert process.rollout.placement.least_busy() is None
    assert process.tell(ExecutorJoined("a", 1)) == []


def test_an_executor_joins_once_and_leaves_once() -> None:
    placement = Placement()
    with pytest.raises(ProtocolError, match="never joined"):
        placement.leave("a")
    placement.join(ExecutorJoined("a", 1))
    with pytest.raises(ProtocolError, match="joined twice"):
        placement.join(ExecutorJoined("a", 1))
    with pytest.raises(ProtocolError, match="offers 0 slots"):
        placement.join(ExecutorJoined("b", 0))
    placement.leave("a")
    for again in (lambda: placement.leave("a"), lambda: placement.join(ExecutorJoined("a", 1))):
        with pytest.raises(ProtocolError):
            again()
    assert placement.loads == {}
