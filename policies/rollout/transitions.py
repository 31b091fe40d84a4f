"""Pure transitions of a trajectory (policies.rollout.trajectory).

A lease covers a turn's expected tokens and one request to an engine. If the lease is used up
before the turn ends, the turn continues under the next lease, on the same or another engine: the
draw of a token depends only on the trajectory's seed and the token's position. Answers under an
earlier lease are refused as stale.

Tokens are appended only here. Text is decoded for parsing, and never encoded again.

An aborted trajectory ends immediately, except while it generates: then it ends with the partial
turn.

EXECUTOR is a placeholder address; policies.rollout.rollout replaces it by the assigned executor.
"""

from typing import assert_never

from msgspec.structs import replace

from bus.messages import (
    AnswerGraded,
    AnswerSubmitted,
    CallFailed,
    CodeFinished,
    CodeOk,
    CodeOutcome,
    CodeOutOfMemory,
    CodeRaised,
    CodeRequested,
    Ending,
    LeaseDeferred,
    LeaseGranted,
    LeasePaused,
    LeaseReleased,
    LeaseRequested,
    SessionEnded,
    SessionRestored,
    StartGroup,
    TrajectoryAborted,
    TrajectoryFailed,
    TrajectoryFinished,
    TurnAborted,
    TurnFailed,
    TurnGenerated,
    TurnRequested,
    build_blank_record,
    bytes_to_ids,
)
from configs.schema import DialogueConfig
from policies.decider import Send
from policies.dialogue.chat_format import TextTokenizer, build_tool_turn_segments, encode_segments
from policies.dialogue.parse_turn import MalformedCall, ToolCall, parse_assistant_turn
from policies.dialogue.tool_results import (
    contains_error,
    format_call_not_run,
    format_malformed_call,
    format_result,
    is_failure,
)
from policies.rollout.trajectory import GRADING_CALL, Rules, Trajectory, TrajectoryEvent

MAX_RETRIES = 1  # after infrastructure failures of a turn, a grading or a call
EXECUTOR = "executor"

Transition = tuple[Trajectory, list[Send]]


def start(rules: Rules, group: StartGroup, trajectory_id: int, now: float) -> Transition:
    record = build_blank_record(group.prompt_ids)
    return _request_lease(rules, Trajectory(trajectory_id=trajectory_id, group=group, record=record, since=now))


def advance(
    rules: Rules, tokenizer: TextTokenizer, trajectory: Trajectory, now: float, event: TrajectoryEvent
) -> Transition:
    """Raises ProtocolError for an event that the trajectory's phase does not accept."""
    match event:
        case LeaseGranted():
            trajectory.expect_grant(event)
            return _start_or_resume_turn(rules, trajectory, now, event)
        case LeaseDeferred():  # only for the log
            return trajectory, []
        case TurnGenerated():
            trajectory.expect_turn(event)
            if trajectory.aborted:
                return _end_aborted(rules, replace(trajectory, record=trajectory.record.append_generated(event)), now)
            return _on_turn_generated(rules, tokenizer, trajectory, now, event)
        case TurnFailed():
            trajectory.expect_turn(event)
            if trajectory.aborted:
                return _end_aborted(rules, trajectory, now)
            return _retry_turn(rules, trajectory, now, event.cause)
        case CodeFinished():
            trajectory.expect_call(event)
            return _on_code_finished(rules, tokenizer, trajectory, now, event)
        case CallFailed() if event.call == GRADING_CALL:
            trajectory.expect_phase("grading", event)
            return _retry(rules, trajectory, now, event.cause, Send(EXECUTOR, trajectory.build_submission()))
        case CallFailed():
            trajectory.expect_call(event)
            return _retry_call(rules, trajectory, now, event)
        case AnswerGraded():
            trajectory.expect_phase("grading", event)
            return _end(rules, trajectory, now, event.reward, event.components)
        case _:
            assert_never(event)


def abort(rules: Rules, trajectory: Trajectory, now: float, cause: str) -> Transition:
    """End the trajectory; while it generates, first stop the engine, which uses its tokens."""
    trajectory = replace(trajectory, aborted=cause)
    if trajectory.phase == "generating":
        return trajectory, [Send(trajectory.engine, TurnAborted(trajectory.trajectory_id, trajectory.lease))]
    return _end_aborted(rules, trajectory, now)


def adopt(rules: Rules, trajectory: Trajectory, now: float) -> Transition:
    """Continue at the start of a turn in another process: no lease, cache or notebook."""
    detached = replace(trajectory, since=now, engine="", engine_incarnation=0, lease=0, leased_tokens=0, executor="")
    return _request_lease(rules, detached)


def decline_lease(rules: Rules, trajectory: Trajectory, granted: LeaseGranted) -> Transition:
    """The engine of the lease has left: request the next lease. Raises like `advance`."""
    trajectory.expect_grant(granted)
    return _request_lease(rules, replace(trajectory, lease=granted.lease))


# ---------------------------------------------------------------- turns


def _request_lease(rules: Rules, trajectory: Trajectory) -> Transition:
    record = trajectory.record
    request = LeaseRequested(
        trajectory_id=trajectory.trajectory_id,
        group_id=trajectory.group.group_id,
        turn=trajectory.turn,
        lease=trajectory.lease + 1,
        tokens=record.num_tokens,
        prompt_tokens=record.prompt_tokens,
        max_new_tokens=rules.response_tokens - record.response_tokens,
    )
    return trajectory, [Send(rules.arbiter, request)]


def _start_or_resume_turn(rules: Rules, trajectory: Trajectory, now: float, granted: LeaseGranted) -> Transition:
    trajectory = replace(
        trajectory.enter_phase("generating", now),
        engine=granted.engine,
        engine_incarnation=granted.incarnation,
        migrations=trajectory.migrations + (trajectory.engine not in ("", granted.engine)),
        lease=granted.lease,
        leased_tokens=granted.tokens,
        retries=trajectory.retries,
    )
    record = trajectory.record
    request = TurnRequested(
        trajectory_id=trajectory.trajectory_id,
        turn=trajectory.turn,
        lease=trajectory.lease,
        token_ids=record.token_ids,
        max_new_tokens=min(
            rules.response_tokens - record.response_tokens, trajectory.leased_tokens - record.num_tokens
        ),
        temperature=trajectory.group.temperature,
        top_p=rules.top_p,
        top_k=rules.top_k,
        stop_token_ids=rules.stop_token_ids,
        seed=trajectory.seed,
        incarnation=trajectory.engine_incarnation,
    )
    return trajectory, [Send(trajectory.engine, request)]


def _on_turn_generated(
    rules: Rules, tokenizer: TextTokenizer, trajectory: Trajectory, now: float, turn: TurnGenerated
) -> Transition:
    start_of_turn = trajectory.turn_start or trajectory.record.num_tokens
    trajectory = replace(trajectory, record=trajectory.record.append_generated(turn), turn_start=start_of_turn)
    if turn.finish != "stop":  # the turn continues, and no token is generated twice
        if trajectory.record.response_tokens >= rules.response_tokens:
            return _stop(rules, trajectory, now, "length")
        return _request_lease(rules, trajectory.enter_phase("leasing", now))
    text = tokenizer.decode(bytes_to_ids(trajectory.record.token_ids[4 * start_of_turn :]))
    parsed = parse_assistant_turn(text, rules.dialogue)
    trajectory = replace(
        trajectory,
        turn=trajectory.turn + 1,
        turn_start=0,
        requested=parsed.calls,
        answer=parsed.answer or "",
        answer_opens=trajectory.answer_opens + parsed.answer_opens,
        answer_closes=trajectory.answer_closes + parsed.answer_closes,
    )
    if parsed.calls:
        return _call_tools(rules, tokenizer, trajectory, now)
    return _stop(rules, trajectory, now, "no_answer" if parsed.answer is None else "answered")


def _retry_turn(rules: Rules, trajectory: Trajectory, now: float, cause: str) -> Transition:
    """Retry under a new lease: the engine may have left, and the lease with it."""
    retried, failed = _retry(rules, trajectory, now, cause)
    if failed:
        return retried, failed
    return _request_lease(rules, replace(retried.enter_phase("leasing", now), retries=retried.retries))


# ---------------------------------------------------------------- calls


def _call_tools(rules: Rules, tokenizer: TextTokenizer, trajectory: Trajectory, now: float) -> Transition:
    if trajectory.turn >= rules.max_turns:
        return _stop(rules, trajectory, now, "turns")
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
        return _append_results(rules, tokenizer, trajectory, now)
    requests = [trajectory.build_code_request(number) for number in numbers]
    has_session = trajectory.has_session or any(request.tool == "jupyter_code" for request in requests)
    paused = Send(rules.arbiter, LeasePaused(trajectory.trajectory_id, trajectory.record.num_tokens))
    return replace(trajectory, has_session=has_session), [*(Send(EXECUTOR, request) for request in requests), paused]


def format_refusal(rules: Rules | DialogueConfig, place: int, call: ToolCall | MalformedCall) -> str | None:
    """The result of a call that cannot run; None if it can."""
    if isinstance(call, MalformedCall):
        return format_malformed_call(call.error, rules.result_characters, rules.result_format)
    if place >= rules.max_calls_per_turn:
        reason = f"not run: at most {rules.max_calls_per_turn} calls a turn"
        return format_call_not_run(reason, rules.result_characters, rules.result_format)
    return None


def _on_code_finished(
    rules: Rules, tokenizer: TextTokenizer, trajectory: Trajectory, now: float, event: CodeFinished
) -> Transition:
    call = trajectory.build_code_request(event.call)
    text = format_result(event.outcome, rules.result_characters, rules.result_format, call.code)
    place = event.call - trajectory.calls
    changes_notebook = call.tool == "jupyter_code" and keeps_effects(event.outcome)
    trajectory = replace(
        trajectory,
        results=(*trajectory.results[:place], text, *trajectory.results[place + 1 :]),
        cells=(*trajectory.cells, call) if changes_notebook else trajectory.cells,
        calls_failed=trajectory.calls_failed + is_failure(event.outcome),
        responses_with_error=trajectory.responses_with_error + contains_error(event.outcome, text, rules.result_format),
    )
    if None in trajectory.results:
        return trajectory, []
    return _append_results(rules, tokenizer, trajectory, now)


def keeps_effects(outcome: CodeOutcome) -> bool:
    """After a cell that times out, crashes or is refused, the notebook restores its state."""
    return isinstance(outcome, CodeOk | CodeRaised | CodeOutOfMemory)


def _retry_call(rules: Rules, trajectory: Trajectory, now: float, event: CallFailed) -> Transition:
    """Retry the call, or fail the trajectory; SessionEnded then stops its other open calls."""
    if event.call in trajectory.retried_calls:
        return _fail(rules, trajectory, now, event.cause)
    trajectory = replace(trajectory, retried_calls=(*trajectory.retried_calls, event.call))
    return trajectory, [Send(EXECUTOR, trajectory.build_code_request(event.call))]


def lose_executor(rules: Rules, trajectory: Trajectory, now: float, cause: str) -> Transition:
    """Open calls are retried once, like after any failure, or the trajectory fails."""
    trajectory = replace(trajectory, executor="")
    if trajectory.phase == "grading":
        return _retry(rules, trajectory, now, cause)
    open_calls = trajectory.open_calls
    if not set(open_calls).isdisjoint(trajectory.retried_calls):
        return _fail(rules, trajectory, now, cause)
    return replace(trajectory, retried_calls=(*trajectory.retried_calls, *open_calls)), []


def build_pending_requests(trajectory: Trajectory) -> list[SessionRestored | CodeRequested | AnswerSubmitted]:
    """The requests for a newly assigned executor: the notebook's cells, then the open calls."""
    if trajectory.phase == "grading":
        return [trajectory.build_submission()]
    calls = [trajectory.build_code_request(number) for number in trajectory.open_calls]
    notebook = [SessionRestored(trajectory.trajectory_id, trajectory.cells)] if calls and trajectory.cells else []
    return [*notebook, *calls]


def _append_results(rules: Rules, tokenizer: TextTokenizer, trajectory: Trajectory, now: float) -> Transition:
    """Append the results, and end the trajectory if no token is left for an answer."""
    texts = [text for text in trajectory.results if text is not None]
    observation = encode_segments(tokenizer, build_tool_turn_segments(texts, rules.dialogue))
    trajectory = replace(
        trajectory, calls=trajectory.calls + len(trajectory.results), requested=(), results=(), answer=""
    )
    if trajectory.record.response_tokens + len(observation) >= rules.response_tokens:
        return _stop(rules, trajectory, now, "length")
    return _request_lease(
        rules, replace(trajectory.enter_phase("leasing", now), record=trajectory.record.append_observation(observation))
    )


# ---------------------------------------------------------------- endings


def _retry(rules: Rules, trajectory: Trajectory, now: float, cause: str, *retry_sends: Send) -> Transition:
    if trajectory.retries < MAX_RETRIES:
        return replace(trajectory, retries=trajectory.retries + 1), list(retry_sends)
    return _fail(rules, trajectory, now, cause)


def _fail(rules: Rules, trajectory: Trajectory, now: float, cause: str) -> Transition:
    trajectory, sends = _release_resources(rules, trajectory.enter_phase("ended", now))
    failure = TrajectoryFailed(trajectory.trajectory_id, trajectory.group.group_id, cause)
    return trajectory, [*sends, Send(rules.buffer, failure)]


def _stop(rules: Rules, trajectory: Trajectory, now: float, ending: Ending) -> Transition:
    """Grade the answer; with reward functions, also a trajectory without one. Unanswered calls do not count."""
    trajectory = replace(trajectory, ending=ending, requested=(), results=())
    if ending != "answered" and not trajectory.group.row:
        return _end(rules, trajectory, now, 0.0, {})
    trajectory, releases = _release_lease(rules, trajectory.enter_phase("grading", now))
    return trajectory, [*releases, Send(EXECUTOR, trajectory.build_submission())]


def _end(rules: Rules, trajectory: Trajectory, now: float, reward: float, components: dict[str, float]) -> Transition:
    trajectory, sends = _release_resources(rules, trajectory.enter_phase("ended", now))
    waits = trajectory.waits
    finished = TrajectoryFinished(
        trajectory_id=trajectory.trajectory_id,
        group_id=trajectory.group.group_id,
        reward=reward,
        ending=trajectory.ending,
        record=trajectory.record,
        turns=trajectory.turn,
        calls=trajectory.calls,
        calls_failed=trajectory.calls_failed,
        responses_with_error=trajectory.responses_with_error,
        answer_opens=trajectory.answer_opens,
        answer_closes=trajectory.answer_closes,
        lease_wait_s=waits.leasing,
        generation_s=waits.generating,
        tools_s=waits.calling,
        grading_s=waits.grading,
        components=components,
    )
    return trajectory, [*sends, Send(rules.buffer, finished)]


def _end_aborted(rules: Rules, trajectory: Trajectory, now: float) -> Transition:
    if trajectory.phase == "grading":
        trajectory = replace(trajectory, has_session=True)  # SessionEnded stops the grading
    trajectory, sends = _release_resources(rules, trajectory.enter_phase("ended", now))
    tid, group_id = trajectory.trajectory_id, trajectory.group.group_id
    aborted = TrajectoryAborted(tid, group_id, trajectory.aborted, trajectory.record.response_tokens)
    return trajectory, [*sends, Send(rules.buffer, aborted)]


def _release_resources(rules: Rules, trajectory: Trajectory) -> Transition:
    trajectory, sends = _release_lease(rules, trajectory)
    if trajectory.has_session or None in trajectory.results:
        sends.append(Send(EXECUTOR, SessionEnded(trajectory.trajectory_id)))
    return replace(trajectory, has_session=False), sends


def _release_lease(rules: Rules, trajectory: Trajectory) -> Transition:
    """Release at the engine first, so that the arbiter never grants tokens in use."""
    if not trajectory.holds_lease:
        return trajectory, []
    released = LeaseReleased(trajectory.trajectory_id, trajectory.record.num_tokens)
    receivers = [trajectory.engine, rules.arbiter] if trajectory.engine else [rules.arbiter]
    return replace(trajectory, holds_lease=False), [Send(receiver, released) for receiver in receivers]
