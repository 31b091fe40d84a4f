"""Transitions of a trajectory that calls tools, an environment or a dialogue."""

from typing import assert_never

from msgspec.structs import replace

from asterism.bus.messages import (
    OPENING_CALL,
    AnsweredCall,
    AnswerSubmitted,
    CallFailed,
    CodeFinished,
    CodeOk,
    CodeOutcome,
    CodeOutOfMemory,
    CodeRaised,
    CodeRequested,
    CodeTimedOut,
    EnvironmentCalled,
    EnvironmentOutcome,
    EnvironmentRaised,
    EnvironmentRestored,
    EnvironmentReturned,
    EnvironmentTimedOut,
    LeasePaused,
    Observation,
    ProtocolError,
    SessionRestored,
    ToolCount,
    build_blank_record,
    digest_outcome,
    ids_to_bytes,
)
from asterism.configs.schema.dialogue import DialogueConfig
from asterism.policies.decider import Send
from asterism.policies.dialogue.parse_turn import MalformedCall, ToolCall
from asterism.policies.dialogue.tool_results import (
    contains_error,
    format_call_not_run,
    format_malformed_call,
    format_result,
    is_failure,
    truncate_middle,
)
from asterism.policies.rollout.endings import EXECUTOR, Transition, fail, request_lease, retry, stop
from asterism.policies.rollout.trajectory import Rules, Trajectory


def call_tools(rules: Rules, trajectory: Trajectory, now: float) -> Transition:
    if rules.kind != "dialogue" and trajectory.turn >= rules.max_turns:
        return stop(rules, trajectory, now, "turns")
    texts = tuple(format_refusal(rules, place, call) for place, call in enumerate(trajectory.requested))
    refused = [text for text in texts if text is not None]
    trajectory = replace(
        trajectory.enter_phase("calling", now),
        results=texts,
        calls_failed=trajectory.calls_failed + len(refused),
        responses_with_error=trajectory.responses_with_error
        + sum(contains_error(None, text, rules.result_format) for text in refused),
    )
    numbers = [trajectory.calls + place for place, text in enumerate(texts) if text is None]
    if not numbers:
        return append_results(rules, trajectory, now)
    requests = [trajectory.build_call_request(number) for number in numbers]
    uses_notebook = any(isinstance(request, CodeRequested) and request.tool == "jupyter_code" for request in requests)
    has_session = trajectory.has_session or uses_notebook
    paused = Send(rules.arbiter, LeasePaused(trajectory.trajectory_id, trajectory.record.num_tokens))
    return replace(trajectory, has_session=has_session), [*(Send(EXECUTOR, request) for request in requests), paused]


def select_calls(
    rules: Rules | DialogueConfig, calls: tuple[ToolCall | MalformedCall, ...]
) -> tuple[ToolCall | MalformedCall, ...]:
    """Return the calls of a turn that receive a result."""
    return calls if rules.surplus_calls == "error" else calls[: rules.max_calls_per_turn]


def format_refusal(rules: Rules | DialogueConfig, place: int, call: ToolCall | MalformedCall) -> str | None:
    """Return the result of a call that cannot run, or None if the call can run."""
    if isinstance(call, MalformedCall):
        return format_malformed_call(call, rules.result_characters, rules.result_format)
    if place >= rules.max_calls_per_turn:
        reason = f"not run: at most {rules.max_calls_per_turn} calls a turn"
        return format_call_not_run(reason, rules.result_characters, rules.result_format)
    return None


def on_code_finished(rules: Rules, trajectory: Trajectory, now: float, event: CodeFinished) -> Transition:
    call = trajectory.build_call_request(event.call)
    assert isinstance(call, CodeRequested)
    text = format_result(event.outcome, rules.result_characters, rules.result_format, call.code)
    changes_notebook = call.tool == "jupyter_code" and keeps_effects(event.outcome)
    trajectory = replace(
        _set_result(trajectory, event.call, text),
        cells=(*trajectory.cells, call) if changes_notebook else trajectory.cells,
        calls_failed=trajectory.calls_failed + is_failure(event.outcome),
        tools=_count_call(trajectory.tools, call.tool, timed_out=isinstance(event.outcome, CodeTimedOut)),
        responses_with_error=trajectory.responses_with_error + contains_error(event.outcome, text, rules.result_format),
    )
    if None in trajectory.results:
        return trajectory, []
    return append_results(rules, trajectory, now)


def _count_call(tools: dict[str, ToolCount], name: str, *, timed_out: bool) -> dict[str, ToolCount]:
    before = tools.get(name, ToolCount())
    return {**tools, name: ToolCount(before.calls + 1, before.timed_out + timed_out)}


def _set_result(trajectory: Trajectory, number: int, text: str) -> Trajectory:
    place = number - trajectory.calls
    return replace(trajectory, results=(*trajectory.results[:place], text, *trajectory.results[place + 1 :]))


def keeps_effects(outcome: CodeOutcome) -> bool:
    """Return false for a cell that timed out, crashed or was refused: the notebook then restores its earlier state."""
    return isinstance(outcome, CodeOk | CodeRaised | CodeOutOfMemory)


def retry_call(rules: Rules, trajectory: Trajectory, now: float, event: CallFailed) -> Transition:
    """Retry the call, or fail the trajectory; SessionEnded then stops the other open calls."""
    if event.call in trajectory.retried_calls:
        return fail(rules, trajectory, now, event.cause)
    trajectory = replace(trajectory, retried_calls=(*trajectory.retried_calls, event.call))
    return trajectory, [Send(EXECUTOR, trajectory.build_call_request(event.call))]


def lose_executor(rules: Rules, trajectory: Trajectory, now: float, cause: str) -> Transition:
    """Mark the open calls as retried, or fail the trajectory if one of them was retried before."""
    trajectory = replace(trajectory, executor="")
    if trajectory.phase == "grading":
        return retry(rules, trajectory, now, cause)
    open_calls = trajectory.open_calls
    if not set(open_calls).isdisjoint(trajectory.retried_calls):
        return fail(rules, trajectory, now, cause)
    return replace(trajectory, retried_calls=(*trajectory.retried_calls, *open_calls)), []


CallRequest = SessionRestored | EnvironmentRestored | CodeRequested | EnvironmentCalled | AnswerSubmitted


def build_pending_requests(trajectory: Trajectory) -> list[CallRequest]:
    """Build the requests for a newly assigned executor: environment and notebook, then the open calls."""
    restored: list[CallRequest] = []
    tid = trajectory.trajectory_id
    if trajectory.environment.calls:
        restored.append(EnvironmentRestored(tid, trajectory.group.task, trajectory.environment.calls))
    if trajectory.phase == "grading":
        return [*restored, trajectory.build_submission()]
    if not trajectory.open_calls:
        return []
    if trajectory.cells:
        restored.append(SessionRestored(tid, trajectory.cells))
    return [*restored, *map(trajectory.build_call_request, trajectory.open_calls)]


def append_results(rules: Rules, trajectory: Trajectory, now: float) -> Transition:
    """Append the results, and end the trajectory if no token or turn is left for an answer."""
    texts = [text for text in trajectory.results if text is not None]
    if rules.kind == "dialogue":
        observation = rules.renderer.render_user_turn(trajectory.record, texts[0])
    else:
        observation = rules.renderer.render_tool_turn(trajectory.record, texts)
    answer = trajectory.answer if rules.kind == "dialogue" else ""
    trajectory = replace(
        trajectory, calls=trajectory.calls + len(trajectory.results), requested=(), results=(), answer=answer
    )
    if rules.kind == "dialogue" and trajectory.turn >= rules.max_turns:
        return stop(rules, trajectory, now, "turns")
    if observation is None and rules.kind == "dialogue":  # the turn ended within its reasoning
        return stop(rules, trajectory, now, "no_answer")
    if observation is None:
        return fail(rules, trajectory, now, "renderer: the chat format cannot continue after the turn's calls")
    if trajectory.record.response_tokens + len(observation) >= rules.response_tokens:
        return stop(rules, trajectory, now, "length")
    return request_lease(
        rules, replace(trajectory.enter_phase("leasing", now), record=trajectory.record.append_observation(observation))
    )


# ---------------------------------------------------------------- environments


def open_environment(trajectory: Trajectory) -> Transition:
    """Request the first observation. The trajectory requests a lease after the observation."""
    opening = replace(trajectory, phase="calling", holds_lease=False, has_session=True)
    return opening, [Send(EXECUTOR, opening.build_call_request(OPENING_CALL))]


def on_opened(rules: Rules, trajectory: Trajectory, now: float, event: EnvironmentReturned) -> Transition:
    """Append the first observation, which ends the prompt, and request a lease."""
    observation = event.outcome
    if not isinstance(observation, Observation):
        raise ProtocolError(
            f"trajectory {trajectory.trajectory_id} has no first observation; the executor must send CallFailed"
        )
    added = rules.renderer.render_opening(observation.content)
    prompt_ids = trajectory.group.prompt_ids + ids_to_bytes(added)
    trajectory = replace(_add_answered_call(trajectory, event), record=build_blank_record(prompt_ids))
    length = trajectory.record.num_tokens
    if length > rules.prompt_tokens:
        cause = (
            f"environment: the prompt with the first observation exceeds dialogue.prompt_tokens = {rules.prompt_tokens}"
        )
        return fail(rules, trajectory, now, cause)
    return request_lease(rules, trajectory.enter_phase("leasing", now))


def on_environment_returned(rules: Rules, trajectory: Trajectory, now: float, event: EnvironmentReturned) -> Transition:
    outcome = event.outcome
    text = format_environment_result(outcome, rules.result_characters)
    failed = not isinstance(outcome, Observation)
    request = trajectory.build_call_request(event.call)
    assert isinstance(request, EnvironmentCalled)
    tools = _count_call(trajectory.tools, request.method, timed_out=isinstance(outcome, EnvironmentTimedOut))
    trajectory = _add_answered_call(trajectory, event)
    if not rules.dialogue.has_opening:  # the task has no instance to restore
        trajectory = replace(trajectory, environment=replace(trajectory.environment, calls=()))
    trajectory = replace(
        _set_result(trajectory, event.call, text),
        calls_failed=trajectory.calls_failed + failed,
        tools=tools,
        responses_with_error=trajectory.responses_with_error + (failed and "error" in text.lower()),
    )
    if None in trajectory.results:
        return trajectory, []
    if trajectory.is_done:
        calls = trajectory.calls + len(trajectory.results)
        return stop(rules, replace(trajectory, calls=calls), now, "done")
    return append_results(rules, trajectory, now)


def format_environment_result(outcome: EnvironmentOutcome, limit: int) -> str:
    match outcome:
        case Observation(content=content):
            return truncate_middle(content, limit)
        case EnvironmentRaised(error=error):
            return format_call_not_run(error, limit)
        case EnvironmentTimedOut(limit_s=limit_s):
            return format_call_not_run(f"TimeoutError: no result within {limit_s:g} s", limit)
        case _:
            assert_never(outcome)


def _add_answered_call(trajectory: Trajectory, event: EnvironmentReturned) -> Trajectory:
    request, outcome = trajectory.build_call_request(event.call), event.outcome
    assert isinstance(request, EnvironmentCalled)
    answered = AnsweredCall(request.method, request.arguments, digest_outcome(outcome))
    history = trajectory.environment.add_call(answered, outcome)
    is_done = trajectory.is_done or (isinstance(outcome, Observation) and outcome.stop)
    return replace(trajectory, environment=history, is_done=is_done)
