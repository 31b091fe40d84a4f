"""Trajectories with environments, dialogues and tools: openings, calls, retries, restored instances, endings."""

import pytest
from msgspec.structs import replace

from asterism.bus import messages as msg
from asterism.policies.decider import Send
from asterism.policies.rollout.trajectory import GRADING_CALL
from asterism.policies.tools.task_description import TaskKind
from tests.fakes import ANSWER, CALL, PROMPT, generated
from tests.policies.rollout.conversations import (
    FIRST,
    ROW,
    SECOND,
    Conversation,
    ask,
    called,
    find,
    make_group,
    open_room,
    opened,
)

# ---------------------------------------------------------------- openings


@pytest.mark.parametrize("kind", ["environment", "dialogue"])
def test_a_trajectory_opens_its_instance_before_it_requests_a_lease(kind: TaskKind) -> None:
    made = Conversation(kind)
    assert made.started == [opened(task=kind)]
    sends = made.answer(msg.OPENING_CALL, "a <tool_call> in a room")
    requested = find(sends, msg.LeaseRequested)
    assert made.text == "questiona <tool_call> in a room<|im_end|>\n<|im_start|>assistant\n<reason>"
    assert requested.tokens == made.rollout.trajectories[0].record.num_tokens > len(PROMPT) // 4
    assert made.rollout.trajectories[0].record.prompt_tokens == requested.tokens
    request = find(made.decide(msg.LeaseGranted(0, "generator-0", 4000, 1, 0.0, "")), msg.TurnRequested)
    assert request.token_ids == made.rollout.trajectories[0].record.token_ids


def test_tools_without_an_instance_need_no_opening() -> None:
    assert [type(send.message) for send in Conversation("tools").started] == [msg.LeaseRequested]


def test_a_failed_opening_is_retried_once_and_then_fails_the_trajectory() -> None:
    made = Conversation()
    assert made.fail(msg.OPENING_CALL) == [opened()]
    sends = made.fail(msg.OPENING_CALL, "environment: reset raised ValueError: boom")
    assert sends == [
        Send(FIRST, msg.SessionEnded(0)),
        Send("head/buffer", msg.TrajectoryFailed(0, 0, "environment: reset raised ValueError: boom")),
    ]
    assert not made.rollout.trajectories


def test_a_trajectory_continues_after_the_second_attempt_of_its_opening() -> None:
    made = Conversation()
    made.fail(msg.OPENING_CALL)
    find(made.answer(msg.OPENING_CALL, "room"), msg.LeaseRequested)
    made.say(ask("door"))
    assert made.fail(0) == [called(0, at="door")]  # each call has its own retry


@pytest.mark.parametrize("outcome", [msg.EnvironmentRaised("boom"), msg.EnvironmentTimedOut(1.0)])
def test_an_opening_without_an_observation_is_refused(outcome: msg.EnvironmentOutcome) -> None:
    made = Conversation()
    with pytest.raises(msg.ProtocolError, match="trajectory 0 has no first observation"):
        made.answer(msg.OPENING_CALL, outcome)
    find(made.answer(msg.OPENING_CALL, "room"), msg.LeaseRequested)


def test_a_first_observation_that_exceeds_the_prompt_fails_the_trajectory() -> None:
    made = Conversation(prompt_tokens=60)
    failed = find(made.answer(msg.OPENING_CALL, "x" * 100), msg.TrajectoryFailed)
    assert failed.cause.startswith("environment: the prompt with the first observation exceeds dialogue.prompt_tokens")


# ---------------------------------------------------------------- calls


def test_the_calls_of_a_turn_are_sent_together_and_their_results_keep_the_order() -> None:
    made = open_room()
    sends = made.say(ask("door", "wall"))
    assert sends[:2] == [called(0, at="door"), called(1, at="wall")]
    assert isinstance(sends[2].message, msg.LeasePaused)
    assert made.answer(1, msg.EnvironmentRaised("ValueError: a wall")) == []
    find(made.answer(0, "a door"), msg.LeaseRequested)
    assert "<tool_response>\na door\n</tool_response>\n<tool_response>\n" in made.text
    assert "ValueError: a wall" in made.text
    trajectory = made.rollout.trajectories[0]
    assert (trajectory.calls, trajectory.calls_failed, trajectory.responses_with_error) == (2, 1, 1)


def test_a_timeout_is_a_result_for_the_model() -> None:
    made = Conversation("tools")
    made.say(ask("door"))
    made.answer(0, msg.EnvironmentTimedOut(1.5))
    assert "TimeoutError: no result within 1.5 s" in made.text
    assert made.rollout.trajectories[0].calls_failed == 1


def test_code_calls_and_task_calls_accept_only_answers_of_their_own_kind() -> None:
    made = open_room()
    sends = made.say(CALL + ask("door"))
    assert isinstance(sends[0].message, msg.CodeRequested)
    assert sends[1] == called(1, at="door")
    code = msg.CodeFinished(0, 1, msg.CodeOk(msg.Output("1")), 0.1, FIRST)
    with pytest.raises(msg.ProtocolError, match="call 0 of trajectory 0 does not accept EnvironmentReturned"):
        made.answer(0, "1")
    with pytest.raises(msg.ProtocolError, match="call 1 of trajectory 0 does not accept CodeFinished"):
        made.decide(code)
    assert made.decide(replace(code, call=0)) == []
    find(made.answer(1, "a door"), msg.LeaseRequested)


@pytest.mark.parametrize("kind", ["environment", "tools"])
def test_a_failed_call_is_retried_once_and_then_masks_the_trajectory(kind: TaskKind) -> None:
    made = Conversation(kind)
    if kind == "environment":
        made.answer(msg.OPENING_CALL, "room")
    made.say(ask("door"))
    assert made.fail(0) == [called(0, task=kind, at="door")]
    sends = made.fail(0, "environment: still down")
    assert find(sends, msg.TrajectoryFailed).cause == "environment: still down"
    assert Send(FIRST, msg.SessionEnded(0)) in sends
    assert not [send for send in sends if isinstance(send.message, msg.TrajectoryFinished)]


def test_a_second_result_of_a_call_is_refused_and_a_late_result_is_ignored() -> None:
    made = open_room(ask("door", "wall"))
    made.answer(0, "a door")
    with pytest.raises(msg.ProtocolError, match="call 0 of trajectory 0 is not open"):
        made.answer(0, "a door")
    with pytest.raises(msg.ProtocolError, match="call -2 of trajectory 0 is not open"):
        made.answer(msg.OPENING_CALL, "room")
    made.decide(msg.GroupAborted(0, 0, 1, "the step ended"))
    assert made.answer(1, "a wall") == []
    assert made.fail(1) == []


# ---------------------------------------------------------------- endings


def test_a_call_with_stop_ends_the_trajectory_with_the_sum_of_its_rewards() -> None:
    made = Conversation()
    made.answer(msg.OPENING_CALL, msg.Observation("room", rewards={"x": 0.5}, metrics={"m": 1.0}))
    made.say(ask("door"))
    made.answer(0, msg.Observation("a door", rewards={"x": 0.25, "y": -1.0}))
    sends = made.say(ask("wall", "end"))
    assert sends[1] == called(2, at="end")
    made.answer(1, msg.Observation("bye", stop=True, rewards={"x": 1.0}))
    submission = find(made.answer(2, msg.Observation("late", metrics={"m": 2.0})), msg.AnswerSubmitted)
    assert (submission.rewards, submission.metrics) == ({"x": 1.75, "y": -1.0}, {"m": 3.0})
    assert submission.task == "environment"
    assert submission.reward_input is not None
    assert submission.reward_input.ending == "done"
    finished = made.grade()
    assert (finished.ending, finished.reward, finished.calls, finished.turns) == ("done", 0.5, 3, 2)
    assert (finished.environment.rewards, len(finished.environment.calls)) == ({"x": 1.75, "y": -1.0}, 4)


def test_an_answer_without_a_call_ends_the_trajectory_and_the_score_closes_the_instance() -> None:
    made = open_room()
    sends = made.say(ANSWER)
    assert not [send for send in sends if isinstance(send.message, msg.SessionEnded)]
    assert find(sends, msg.AnswerSubmitted).answer == "2"
    sends = made.decide(msg.AnswerGraded(0, 1.0, 0.1, FIRST, {}))
    assert sends[0] == Send(FIRST, msg.SessionEnded(0))
    assert find(sends, msg.TrajectoryFinished).ending == "answered"


def test_a_failed_score_is_retried_once_and_never_becomes_a_reward_of_0() -> None:
    made = open_room(ANSWER)
    assert isinstance(made.fail(GRADING_CALL)[0].message, msg.AnswerSubmitted)
    sends = made.fail(GRADING_CALL, "reward: boom")
    assert find(sends, msg.TrajectoryFailed).cause == "reward: boom"
    assert not [send for send in sends if isinstance(send.message, msg.TrajectoryFinished)]


def test_a_dialogue_answers_every_turn_until_its_end() -> None:
    made = Conversation("dialogue")
    made.answer(msg.OPENING_CALL, "Guess.")
    step = {"role": "assistant", "content": f"<reason>seven{ANSWER}"}
    assert made.say(f"seven{ANSWER}")[0] == called(0, "step", task="dialogue", **step)
    find(made.answer(0, "No <|im_start|>."), msg.LeaseRequested)
    assert made.text.endswith("<|im_start|>user\nNo <|im_start|>.<|im_end|>\n<|im_start|>assistant\n<reason>")
    made.say("eight")
    find(made.answer(1, msg.Observation("Yes.", stop=True)), msg.AnswerSubmitted)
    assert made.grade().ending == "done"


def test_a_dialogue_ends_at_its_turn_limit_after_the_users_last_answer() -> None:
    made = Conversation("dialogue", max_turns=2)
    made.answer(msg.OPENING_CALL, "Guess.")
    made.say("seven")
    made.answer(0, msg.Observation("No.", rewards={"x": 0.5}))
    assert made.say("eight")[0] == called(1, "step", task="dialogue", role="assistant", content="<reason>eight")
    submission = find(made.answer(1, msg.Observation("No.", rewards={"x": 0.25})), msg.AnswerSubmitted)
    assert submission.rewards == {"x": 0.75}
    assert made.grade().ending == "turns"


def test_an_environment_is_not_called_after_the_last_turn() -> None:
    made = open_room(max_turns=1)
    assert find(made.say(ask("door")), msg.AnswerSubmitted).reward_input is not None
    assert made.grade().ending == "turns"


@pytest.mark.parametrize("kind", ["environment", "dialogue"])
def test_a_result_that_leaves_no_token_for_a_turn_ends_the_trajectory(kind: TaskKind) -> None:
    made = open_room(ask("door"), kind=kind, response_tokens=150, result_characters=1000)
    find(made.answer(0, "x" * 200), msg.AnswerSubmitted)
    assert made.grade().ending == "length"


# ---------------------------------------------------------------- executors


def test_an_opening_is_repeated_on_another_executor_if_its_executor_leaves() -> None:
    made = Conversation()
    made.decide(msg.ExecutorJoined(SECOND, 4))
    sends = made.decide(msg.ExecutorLeft(FIRST, "killed"))
    assert sends == [opened(SECOND), Send("launcher", msg.CallsRescheduled(FIRST, 1, 0, 0))]
    assert made.answer(msg.OPENING_CALL, "late") == []
    find(made.answer(msg.OPENING_CALL, "room", SECOND), msg.LeaseRequested)


def test_another_executor_restores_the_instance_before_the_open_call() -> None:
    made = open_room(ask("door"))
    made.answer(0, msg.EnvironmentRaised("ValueError: closed"))
    made.say(ask("wall"))
    made.decide(msg.ExecutorJoined(SECOND, 4))
    restored, call, _ = made.decide(msg.ExecutorLeft(FIRST, "killed"))
    assert call == called(1, to=SECOND, at="wall")
    assert restored.to == SECOND
    assert isinstance(restored.message, msg.EnvironmentRestored)
    assert [(each.method, each.arguments) for each in restored.message.calls] == [("", ROW), ("look", b'{"at":"door"}')]
    outcomes = (msg.Observation("room"), msg.EnvironmentRaised("ValueError: closed"))
    assert [each.digest for each in restored.message.calls] == list(map(msg.digest_outcome, outcomes))
    assert made.answer(1, "late") == []  # an answer of the executor that has left
    find(made.answer(1, "a wall", SECOND), msg.LeaseRequested)


def test_a_score_is_requested_again_on_the_executor_that_restores_the_instance() -> None:
    made = open_room(ANSWER)
    made.decide(msg.ExecutorJoined(SECOND, 4))
    sends = made.decide(msg.ExecutorLeft(FIRST, "killed"))
    assert [type(send.message) for send in sends] == [
        msg.EnvironmentRestored,
        msg.AnswerSubmitted,
        msg.CallsRescheduled,
    ]
    assert made.grade(executor=SECOND).reward == 0.5


def test_an_instance_without_an_open_call_is_restored_with_its_next_call() -> None:
    made = open_room()
    made.decide(msg.ExecutorLeft(FIRST, "killed"))
    made.decide(msg.ExecutorJoined(SECOND, 4))
    restored, call = made.say(ask("door"))[-2:]
    assert isinstance(restored.message, msg.EnvironmentRestored)
    assert call == called(0, to=SECOND, at="door")


def test_tools_have_no_instance_to_restore() -> None:
    made = Conversation("tools")
    made.say(ask("door"))
    made.answer(0, msg.Observation("a door", rewards={"x": 1.0}))
    made.say(ask("wall"))
    made.decide(msg.ExecutorJoined(SECOND, 4))
    sends = made.decide(msg.ExecutorLeft(FIRST, "killed"))
    assert sends[0] == called(1, task="tools", to=SECOND, at="wall")
    made.answer(1, "a wall", SECOND)
    assert find(made.say(ANSWER), msg.AnswerSubmitted).rewards == {"x": 1.0}


def test_a_call_that_was_lost_twice_fails_the_trajectory() -> None:
    made = Conversation()
    made.fail(msg.OPENING_CALL)
    sends = made.decide(msg.ExecutorLeft(FIRST, "killed"))
    assert find(sends, msg.TrajectoryFailed).cause == "executor left: killed"
    assert find(sends, msg.CallsRescheduled) == msg.CallsRescheduled(FIRST, 0, 0, 1)


# ---------------------------------------------------------------- aborts and tasks


@pytest.mark.parametrize("during", ["opening", "call", "lease"])
def test_an_abort_ends_the_instance(during: str) -> None:
    made = Conversation() if during == "opening" else open_room(*([ask("door")] if during == "call" else []))
    sends = made.decide(msg.GroupAborted(0, 0, 1, "the step ended"))
    assert Send(FIRST, msg.SessionEnded(0)) in sends
    assert find(sends, msg.TrajectoryAborted).cause == "the step ended"
    if during != "lease":
        assert made.answer(msg.OPENING_CALL if during == "opening" else 0, "late") == []
    assert not made.rollout.trajectories


def test_groups_of_several_tasks_share_a_rollout_process() -> None:
    made = Conversation("environment")
    (lease,) = made.decide(make_group("tools", group_id=1, first=1))
    assert isinstance(lease.message, msg.LeaseRequested)
    (opening,) = made.decide(make_group("dialogue", group_id=2, first=2))
    assert opening.message == msg.EnvironmentCalled(2, msg.OPENING_CALL, "dialogue", "", ROW)
    made.answer(msg.OPENING_CALL, "room")
    made.answer(msg.OPENING_CALL, "Guess.", trajectory_id=2)
    made.decide(msg.LeaseGranted(2, "generator-0", 4000, 1, 0.0, ""))
    sends = made.decide(generated(2, 0, "no call"))
    assert isinstance(sends[0].message, msg.EnvironmentCalled)
    assert (sends[0].message.task, sends[0].message.method) == ("dialogue", "step")
    assert find(made.say("no call"), msg.AnswerSubmitted).task == "environment"


def test_a_group_of_an_unknown_task_is_refused() -> None:
    made = Conversation()
    with pytest.raises(msg.ProtocolError, match='group 1 has the unknown task "other"'):
        made.decide(make_group("other", group_id=1, first=1))
    assert made.rollout.trajectories.keys() == {0}
