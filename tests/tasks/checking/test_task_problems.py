"""Tests of the problems that are found in finished plays and in reports of host processes."""

from asterism.bus.messages import AnsweredCall, EnvironmentRaised, Observation, digest_outcome
from asterism.policies.tools.task_description import TaskDescription
from asterism.policies.tools.tool_schema import ToolSchema
from asterism.tasks.checking.play import Play, PlayedCall, PlayedTurn
from asterism.tasks.checking.task_problems import (
    find_blocking_calls,
    find_call_problems,
    find_constant_reward,
    find_leaks,
    find_long_prompts,
    find_replay_problems,
)
from asterism.tasks.checking.turn_scripts import TurnScript
from asterism.tasks.hosting.wire import Inspected

MOVE = ToolSchema("move", "Move.", {"type": "object", "properties": {}})
ENVIRONMENT = TaskDescription("environment", (MOVE,))
REPLAYABLE = TaskDescription("environment", (MOVE,), is_replayable=True)


def play(*texts: str, reward: float | None = 0.0, has_truth: bool = False, row: str = "rows.jsonl:1") -> Play:
    """Make a play; `texts` are the results of the opening and of the calls of `move`."""
    outcomes = [
        AnsweredCall("move" if place else "", b"{}", digest_outcome(Observation(text)))
        for place, text in enumerate(texts)
    ]
    script = TurnScript(("turn",), has_truth=has_truth)
    return Play(row, script, outcomes=outcomes, texts=list(texts), reward=reward)


def with_call(status: str, text: str) -> Play:
    call = PlayedCall("move", "{}", status, f"Tool call failure\n{text}")  # type: ignore[arg-type]
    return Play("rows.jsonl:1", TurnScript(("turn",)), turns=[PlayedTurn("turn", [call])])


def inspected(
    live: int = 0, threads: tuple[str, ...] = (), children: tuple[str, ...] = (), **delays_s: list[float]
) -> Inspected:
    return Inspected(1, live, threads, children, delays_s)


def test_two_results_of_a_replayable_task_are_a_problem_with_both_texts() -> None:
    (finding,) = find_replay_problems([play("", "a {x}")], [play("", "b")], REPLAYABLE)
    assert (finding.status, finding.subject) == ("problem", "replayable")
    assert finding.detail == "replayable = True, but move has two results for rows.jsonl:1: 'a {x}' and 'b'"
    (finding,) = find_replay_problems([play("a")], [play("b")], REPLAYABLE)
    assert "but reset has two results" in finding.detail


def test_equal_results_are_a_hint_only_if_the_task_is_not_declared_replayable() -> None:
    (finding,) = find_replay_problems([play("", "a")], [play("", "a")], ENVIRONMENT)
    assert (finding.status, finding.subject) == ("hint", "replayable")
    assert find_replay_problems([play("", "a")], [play("", "b")], ENVIRONMENT) == []
    assert find_replay_problems([play("", "a")], [play("", "a")], REPLAYABLE) == []


def test_a_tools_error_is_only_a_hint_for_a_value_error_or_generated_arguments() -> None:
    (finding,) = find_call_problems([with_call("raised", "KeyError: 'x'")], ENVIRONMENT, is_generated=True)
    assert (finding.status, finding.subject, finding.detail) == ("hint", "move", "move({}): KeyError: 'x'")
    assert "--turns FILE" in finding.remedy
    sql = with_call("raised", 'OperationalError: near "text": syntax error')
    assert [each.status for each in find_call_problems([sql], ENVIRONMENT, is_generated=True)] == ["hint"]
    assert [each.status for each in find_call_problems([sql], ENVIRONMENT, is_generated=False)] == ["problem"]
    (finding,) = find_call_problems([with_call("raised", "ValueError: no")], ENVIRONMENT, is_generated=False)
    assert finding.status == "hint"
    assert "--turns FILE" not in finding.remedy
    late = with_call("timed out", "TimeoutError: no result within 1 s")
    (finding,) = find_call_problems([late], ENVIRONMENT, is_generated=True)
    assert (finding.status, finding.subject) == ("problem", "move")


def test_the_first_error_of_a_tool_is_reported_once() -> None:
    plays = [with_call("raised", f"KeyError: {number}") for number in range(3)]
    (finding,) = find_call_problems(plays, ENVIRONMENT, is_generated=True)
    assert finding.detail == "move({}): KeyError: 0"


def test_tools_that_no_play_called_are_a_hint() -> None:
    (finding,) = find_call_problems([play("")], ENVIRONMENT, is_generated=True)
    assert (finding.status, finding.detail) == ("hint", "never called: move; the plays ended before")


def test_an_equal_reward_for_the_truth_and_a_wrong_answer_is_a_problem() -> None:
    plays = [play(has_truth=True), play(), play(has_truth=True)]
    (finding,) = find_constant_reward(plays, has_instances=False)
    assert finding.status == "problem"
    (finding,) = find_constant_reward(plays, has_instances=True)
    assert finding.status == "hint"
    (finding,) = find_constant_reward([play(), play()], has_instances=False)
    assert finding.status == "hint"


def test_different_rewards_or_a_single_reward_are_not_constant() -> None:
    assert find_constant_reward([play(reward=1.0), play(reward=0.0)], has_instances=False) == []
    assert find_constant_reward([play(), play(reward=None)], has_instances=False) == []


def test_a_function_blocks_if_two_calls_delay_the_event_loop() -> None:
    assert find_blocking_calls(inspected(move=[0.2, 0.001, 0.001])) == []
    (finding,) = find_blocking_calls(inspected(move=[0.2, 0.06, 0.001], reset=[0.0, 0.0]))
    assert (finding.subject, finding.detail[:37]) == ("move", "blocks the event loop for 200 ms; all")
    assert [finding.subject for finding in find_blocking_calls(inspected(move=[0.2]))] == ["move"]


def test_a_new_instance_that_is_alive_after_the_plays_leaks() -> None:
    assert find_leaks(inspected(1), inspected(1), 3) == []
    (finding,) = find_leaks(inspected(1), inspected(2), 3)
    assert (finding.subject, finding.detail) == ("instances", "1 of 3 instances are alive after `close`")


def test_threads_and_processes_leak_if_each_play_leaves_one() -> None:
    before = inspected(threads=("poll",))
    shared = inspected(threads=("poll", "poll", "poll"), children=("server",))
    assert find_leaks(before, shared, 3) == []
    after = inspected(threads=("poll", *["watch"] * 3), children=("sleep 1",) * 3)
    assert [finding.subject for finding in find_leaks(before, after, 3)] == ["threads", "child processes"]


def test_long_prompts_are_a_problem_only_with_the_tokenizer_of_a_model() -> None:
    assert find_long_prompts({"rows.jsonl:1": 8}, 8, has_model_tokenizer=True) == []
    (finding,) = find_long_prompts({"rows.jsonl:1": 8, "rows.jsonl:2": 9}, 8, has_model_tokenizer=True)
    assert finding.status == "problem"
    assert finding.detail == ("1 of 2 prompts have more than dialogue.prompt_tokens = 8 tokens, up to 9: rows.jsonl:2")
    (finding,) = find_long_prompts({"rows.jsonl:2": 9}, 8, has_model_tokenizer=False)
    assert (finding.status, "--tokenizer" in finding.remedy) == ("hint", True)


def test_the_replay_check_also_compares_raised_errors() -> None:
    raised = AnsweredCall("move", b"{}", digest_outcome(EnvironmentRaised("KeyError: 1")))
    one = Play("r:1", TurnScript(("t",)), outcomes=[raised], texts=["KeyError: 1"])
    other = play("")
    other.outcomes[0] = AnsweredCall("move", b"{}", digest_outcome(EnvironmentRaised("KeyError: 2")))
    assert len(find_replay_problems([one], [other], REPLAYABLE)) == 1
