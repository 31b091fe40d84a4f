"""Placement of trajectories on executors, and joins and departures of executors."""

import pytest

from asterism.bus import messages as msg
from asterism.policies.decider import Send
from asterism.policies.rollout.call_transitions import keeps_effects
from asterism.policies.rollout.executor_placement import ExecutorPlacement
from tests.fakes import ANSWER, CALL
from tests.policies.rollout.conversations import Conversation


def receivers(effects: list[Send]) -> list[str]:
    return [send.to for send in effects if isinstance(send.message, msg.CodeRequested | msg.AnswerSubmitted)]


def test_a_trajectory_is_placed_on_the_executor_with_the_fewest_calls_per_slot() -> None:
    process = Conversation("tools", 6, {"b": 1, "a": 1, "c": 2})
    placed = [receivers(process.say(CALL, number)) for number in range(6)]
    assert placed == [["a"], ["b"], ["c"], ["c"], ["a"], ["b"]]


def test_an_executor_that_fails_every_call_does_not_receive_more_calls() -> None:
    process = Conversation("tools", 12, {"broken": 1, "sound": 1})
    placed: list[str] = []
    for number in range(12):
        (executor,) = receivers(process.say(CALL, number))
        placed.append(executor)
        if executor == "broken":
            process.decide(msg.CallFailed(number, 0, "sandbox: no container", executor))
    assert placed.count("broken") <= 4
    process.finish_code(0, "", "broken", placed.index("broken"))  # an answer to a retry resets the failures
    assert process.rollout.placement.loads["broken"].failures == 0


def test_a_trajectory_stays_with_its_notebook() -> None:
    process = Conversation("tools", 3, {"a": 1, "b": 9})
    assert receivers(process.say(CALL, 0)) == ["a"]
    process.finish_code(0, "", "a")
    assert receivers(process.say(CALL, 1)) == ["a"]  # executor a has no open calls, and is first by name
    assert receivers(process.say(CALL, 0)) == ["a"]
    process.finish_code(1, "", "a")
    assert receivers(process.say(ANSWER, 0)) == ["a"]
    assert process.rollout.placement.loads["a"].open_calls == 2


def test_calls_wait_in_order_for_an_executor() -> None:
    process = Conversation("tools", 3, {})
    assert receivers(process.say(CALL, 2) + process.say(ANSWER, 0) + process.say(CALL, 1)) == []
    joined = process.decide(msg.ExecutorJoined("a", 1))
    asked = [send.message for send in joined if isinstance(send.message, msg.CodeRequested | msg.AnswerSubmitted)]
    assert [request.trajectory_id for request in asked] == [2, 0, 1]
    assert joined[-1] == Send("launcher", msg.CallsRescheduled("a", sent=3, waiting=0, lost=0))


def test_the_least_busy_executors_receive_the_open_calls_of_a_departed_executor() -> None:
    process = Conversation("tools", 6, {"a": 1})
    for number in range(4):
        process.say(CALL, number)
    process.decide(msg.ExecutorJoined("b", 1))
    process.decide(msg.ExecutorJoined("c", 1))
    process.say(CALL, 4)  # trajectory 4 is placed on executor b
    left = process.decide(msg.ExecutorLeft("a", "a ended with exit code -9"))
    assert receivers(left) == ["c", "b", "c", "b"]
    assert left[-1] == Send("launcher", msg.CallsRescheduled("a", sent=4, waiting=0, lost=0))
    assert {name: load.open_calls for name, load in process.rollout.placement.loads.items()} == {"b": 3, "c": 2}


@pytest.mark.parametrize(
    ("outcome", "kept"),
    [
        (msg.CodeOk(msg.Output()), True),
        (msg.CodeRaised(msg.Output(), "E", "E"), True),
        (msg.CodeOutOfMemory(msg.Output(), 512), True),
        (msg.CodeTimedOut(msg.Output(), 4.0), False),
        (msg.CodeCrashed(msg.Output(), -9), False),
        (msg.CodeRefused("too long"), False),
    ],
)
def test_a_notebook_keeps_a_cell_if_its_process_survives_the_cell(outcome: msg.CodeOutcome, kept: bool) -> None:
    assert keeps_effects(outcome) == kept


def test_a_restarted_run_has_no_executors() -> None:
    process = Conversation("tools", 1, {"a": 1})
    process.decide(msg.RunStarted(0, msg.BufferCursor()))
    assert process.rollout.placement.find_least_busy() is None
    assert process.decide(msg.ExecutorJoined("a", 1)) == []


def test_an_executor_joins_once_and_leaves_once() -> None:
    placement = ExecutorPlacement()
    with pytest.raises(msg.ProtocolError, match="never joined"):
        placement.remove_executor("a")
    placement.add_executor(msg.ExecutorJoined("a", 1))
    with pytest.raises(msg.ProtocolError, match="joined twice"):
        placement.add_executor(msg.ExecutorJoined("a", 1))
    with pytest.raises(msg.ProtocolError, match="offers 0 slots"):
        placement.add_executor(msg.ExecutorJoined("b", 0))
    placement.remove_executor("a")
    for again in (lambda: placement.remove_executor("a"), lambda: placement.add_executor(msg.ExecutorJoined("a", 1))):
        with pytest.raises(msg.ProtocolError):
            again()
    assert placement.loads == {}
