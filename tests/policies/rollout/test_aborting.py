"""Aborted trajectories end in every phase, release their resources, and report their ends once."""

import pytest

from asterism.bus import messages as msg
from asterism.policies.decider import Send
from asterism.policies.rollout.rollout import Rollout
from tests.fakes import ANSWER, CALL, TOKENIZER, generated, rules, start_group

EXECUTOR = "executor-0/1"
ABORT = msg.GroupAborted(0, 0, 1, "the step ended without it")


def rollout(*events: msg.AnyMessage, size: int = 1) -> Rollout:
    made = Rollout({"": rules()})
    made.decide(0.0, msg.ExecutorJoined(EXECUTOR, 4))
    made.decide(0.0, start_group(size, 0))
    for event in events:
        made.decide(1.0, event)
    return made


def granted(trajectory_id: int = 0) -> msg.LeaseGranted:
    return msg.LeaseGranted(trajectory_id, "generator-0", 4000, 1, 0.0, "")


def ends(effects: list[Send]) -> list[msg.TrajectoryAborted]:
    assert not [send for send in effects if isinstance(send.message, msg.TrajectoryFinished | msg.TrajectoryFailed)]
    return [send.message for send in effects if isinstance(send.message, msg.TrajectoryAborted)]


def released_by(effects: list[Send]) -> list[str]:
    return [send.to for send in effects if isinstance(send.message, msg.LeaseReleased)]


def test_an_abort_before_the_lease_ends_the_trajectory_and_a_late_lease_is_ignored() -> None:
    made = rollout()
    effects = list(made.decide(2.0, ABORT))
    assert ends(effects) == [msg.TrajectoryAborted(0, 0, ABORT.cause, 0)]
    assert released_by(effects) == ["head/arbiter"]
    assert list(made.decide(3.0, msg.LeaseDeferred(0, "no room"))) == []
    assert list(made.decide(3.0, granted())) == []
    assert not made.trajectories


def test_an_aborted_generating_trajectory_ends_with_the_partial_turn() -> None:
    made = rollout(granted())
    assert list(made.decide(2.0, ABORT)) == [Send("generator-0", msg.TurnAborted(0, 1))]
    effects = list(made.decide(3.0, generated(0, 0, "well, ", "abort")))
    assert ends(effects) == [msg.TrajectoryAborted(0, 0, ABORT.cause, 6)]
    assert released_by(effects) == ["generator-0", "head/arbiter"]
    (released,) = [send.message for send in effects if send.to == "head/arbiter"]
    assert released == msg.LeaseReleased(0, 14)


@pytest.mark.parametrize(
    "answer", [generated(0, 0, ANSWER), generated(0, 0, CALL), msg.TurnFailed(0, 0, 1, "engine: gone")]
)
def test_an_aborted_trajectory_ends_even_if_its_turn_completed(answer: msg.AnyMessage) -> None:
    made = rollout(granted(), ABORT)
    effects = list(made.decide(3.0, answer))
    assert len(ends(effects)) == 1
    assert {type(send.message) for send in effects} == {msg.TrajectoryAborted, msg.LeaseReleased}


def test_an_aborted_trajectory_ends_when_its_engine_leaves() -> None:
    made = rollout(granted(), ABORT)
    effects = list(made.decide(3.0, msg.EngineLeft("generator-0", "gone")))
    assert ends(effects) == [msg.TrajectoryAborted(0, 0, ABORT.cause, 0)]
    assert not made.trajectories


@pytest.mark.parametrize(
    ("said", "released", "late"),
    [
        (CALL, ["generator-0", "head/arbiter"], msg.CodeFinished(0, 0, msg.CodeOk(msg.Output("1")), 0.1, EXECUTOR)),
        (ANSWER, [], msg.AnswerGraded(0, 1.0, 0.1, EXECUTOR)),  # the answer has already released the lease
    ],
    ids=["call", "grading"],
)
def test_an_abort_during_a_call_or_grading_ends_the_session_and_a_late_result_is_ignored(
    said: str, released: list[str], late: msg.AnyMessage
) -> None:
    made = rollout(granted(), generated(0, 0, said))
    effects = list(made.decide(2.0, ABORT))
    assert ends(effects)[0].response_tokens == len(TOKENIZER.encode(said, trusted=True)) + 1
    assert Send(EXECUTOR, msg.SessionEnded(0)) in effects
    assert released_by(effects) == released
    assert made.placement.loads[EXECUTOR].open_calls == 0
    assert list(made.decide(3.0, late)) == []


def test_an_aborted_trajectory_no_longer_waits_for_an_executor() -> None:
    made = Rollout({"": rules()})
    for event in (start_group(1, 0), granted(), generated(0, 0, CALL)):
        made.decide(0.0, event)
    assert made.waiting_for_executor
    assert len(ends(list(made.decide(2.0, ABORT)))) == 1
    joined = made.decide(3.0, msg.ExecutorJoined(EXECUTOR, 4))
    assert not [send for send in joined if isinstance(send.message, msg.CodeRequested | msg.AnswerSubmitted)]


def test_an_abort_ends_only_the_live_siblings() -> None:
    made = rollout(granted(), generated(0, 0, "I give up"), size=3)
    effects = list(made.decide(2.0, msg.GroupAborted(0, 0, 3, ABORT.cause)))
    assert [end.trajectory_id for end in ends(effects)] == [1, 2]
    assert not made.trajectories


def test_a_group_that_is_aborted_twice_ends_once() -> None:
    made = rollout(granted(), ABORT)
    assert list(made.decide(2.0, ABORT)) == []
    assert len(ends(list(made.decide(3.0, generated(0, 0, "", "abort"))))) == 1
    assert list(made.decide(4.0, ABORT)) == []


def test_an_unexpected_lease_is_refused() -> None:
    made = rollout(granted(), generated(0, 0, "I give up"))
    with pytest.raises(msg.ProtocolError, match="is not live in this rollout process"):
        made.decide(3.0, granted())
