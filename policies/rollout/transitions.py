"""Pure transitions of a trajectory (asterism.policies.rollout.trajectory).

A lease covers a turn's expected tokens and one request to an engine. If the turn needs more tokens
than the lease, it continues under the next lease, on the same or on another engine: the draw of a
token depends only on the trajectory's seed and the token's position. Answers under an earlier lease
are refused as stale.

Only transitions append tokens. They decode text for parsing, and never encode the decoded text.

An aborted trajectory ends immediately. While it generates, it ends with the partial turn.
"""

from typing import assert_never

from msgspec.structs import replace

from asterism.bus.messages import (
    AnswerGraded,
    CallFailed,
    CodeFinished,
    EnvironmentReturned,
    ExecutorLeft,
    LeaseDeferred,
    LeaseGranted,
    StartGroup,
    TokenRecord,
    TurnAborted,
    TurnFailed,
    TurnGenerated,
    TurnRequested,
    build_blank_record,
)
from asterism.policies.decider import Send
from asterism.policies.dialogue.parse_turn import AssistantTurn, MalformedCall, ToolCall
from asterism.policies.rollout.call_transitions import (
    call_tools,
    lose_executor,
    on_code_finished,
    on_environment_returned,
    on_opened,
    open_environment,
    retry_call,
    select_calls,
)
from asterism.policies.rollout.endings import EXECUTOR, Transition, end, end_aborted, request_lease, retry, stop
from asterism.policies.rollout.trajectory import GRADING_CALL, STEP, Rules, Trajectory, TrajectoryEvent


def start(rules: Rules, group: StartGroup, trajectory_id: int, now: float) -> Transition:
    record = build_blank_record(group.prompt_ids)
    trajectory = Trajectory(trajectory_id=trajectory_id, group=group, record=record, since=now)
    return open_environment(trajectory) if rules.dialogue.has_opening else request_lease(rules, trajectory)


def advance(rules: Rules, trajectory: Trajectory, now: float, event: TrajectoryEvent | ExecutorLeft) -> Transition:
    """Apply an event to the trajectory. Raises ProtocolError if the trajectory's phase does not accept the event."""
    match event:
        case LeaseGranted():
            trajectory.expect_grant(event)
            return _start_or_resume_turn(rules, trajectory, now, event)
        case LeaseDeferred():  # an event for the log only
            return trajectory, []
        case TurnGenerated():
            trajectory.expect_turn(event)
            if trajectory.aborted:
                return end_aborted(rules, replace(trajectory, record=trajectory.record.append_generated(event)), now)
            return _on_turn_generated(rules, trajectory, now, event)
        case TurnFailed():
            trajectory.expect_turn(event)
            if trajectory.aborted:
                return end_aborted(rules, trajectory, now)
            return _retry_turn(rules, trajectory, now, event.cause)
        case CodeFinished():
            trajectory.expect_call(event)
            return on_code_finished(rules, trajectory, now, event)
        case EnvironmentReturned():
            trajectory.expect_call(event)
            if trajectory.is_opening:
                return on_opened(rules, trajectory, now, event)
            return on_environment_returned(rules, trajectory, now, event)
        case CallFailed() if event.call == GRADING_CALL:
            trajectory.expect_phase("grading", event)
            return retry(rules, trajectory, now, event.cause, Send(EXECUTOR, trajectory.build_submission()))
        case CallFailed():
            trajectory.expect_call(event)
            return retry_call(rules, trajectory, now, event)
        case AnswerGraded():
            trajectory.expect_phase("grading", event)
            return end(rules, trajectory, now, event.reward, event.components)
        case ExecutorLeft():
            return lose_executor(rules, trajectory, now, f"executor left: {event.cause}")
        case _:
            assert_never(event)


def abort(rules: Rules, trajectory: Trajectory, now: float, cause: str) -> Transition:
    """End the trajectory. While it generates, first stop the engine, which still uses the leased tokens."""
    trajectory = replace(trajectory, aborted=cause)
    if trajectory.phase == "generating":
        return trajectory, [Send(trajectory.engine, TurnAborted(trajectory.trajectory_id, trajectory.lease))]
    return end_aborted(rules, trajectory, now)


def adopt(rules: Rules, trajectory: Trajectory, now: float) -> Transition:
    """Continue in another process at the start of a turn, without lease, cache and notebook."""
    detached = replace(trajectory, since=now, engine="", engine_incarnation=0, lease=0, leased_tokens=0, executor="")
    return request_lease(rules, detached)


def decline_lease(rules: Rules, trajectory: Trajectory, granted: LeaseGranted) -> Transition:
    """Request the next lease, because the engine of the granted lease has left. Raises ProtocolError."""
    trajectory.expect_grant(granted)
    return request_lease(rules, replace(trajectory, lease=granted.lease))


# ---------------------------------------------------------------- turns


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
        sampling=trajectory.group.sampling,
        stop_token_ids=rules.stop_token_ids,
        seed=trajectory.seed,
        incarnation=trajectory.engine_incarnation,
    )
    return trajectory, [Send(trajectory.engine, request)]


def _on_turn_generated(rules: Rules, trajectory: Trajectory, now: float, turn: TurnGenerated) -> Transition:
    start_of_turn = trajectory.turn_start or trajectory.record.num_tokens
    trajectory = replace(trajectory, record=trajectory.record.append_generated(turn), turn_start=start_of_turn)
    if turn.finish != "stop":  # the turn continues under the next lease after its last generated token
        if trajectory.record.response_tokens >= rules.response_tokens:
            return stop(rules, trajectory, now, "length")
        return request_lease(rules, trajectory.enter_phase("leasing", now))
    parsed = rules.renderer.parse_turn(trajectory.record.token_ids, start_of_turn)
    trajectory = replace(
        trajectory,
        turn=trajectory.turn + 1,
        turn_start=0,
        requested=_choose_calls(rules, trajectory.record, start_of_turn, parsed),
        answer=parsed.answer or "",
        answer_opens=trajectory.answer_opens + parsed.answer_opens,
        answer_closes=trajectory.answer_closes + parsed.answer_closes,
        answer_spans=trajectory.answer_spans + parsed.answer_spans,
    )
    # A complete answer in the last turn is graded, although the turn's calls can no longer run.
    is_final = rules.kind != "dialogue" and trajectory.turn >= rules.max_turns and parsed.has_complete_answer
    if trajectory.requested and not is_final:
        return call_tools(rules, trajectory, now)
    return stop(rules, trajectory, now, "no_answer" if parsed.answer is None else "answered")


def _choose_calls(
    rules: Rules, record: TokenRecord, turn_start: int, parsed: AssistantTurn
) -> tuple[ToolCall | MalformedCall, ...]:
    """Return the turn's tool calls. In a dialogue task, the call is the turn's text."""
    if rules.kind != "dialogue":
        return select_calls(rules, parsed.calls)
    content = rules.renderer.decode_content(record.token_ids, turn_start)
    return (ToolCall(STEP, {"role": "assistant", "content": content}),)


def _retry_turn(rules: Rules, trajectory: Trajectory, now: float, cause: str) -> Transition:
    """Retry the turn under a new lease: the engine of the old lease may have left."""
    retried, failed = retry(rules, trajectory, now, cause)
    if failed:
        return retried, failed
    return request_lease(rules, replace(retried.enter_phase("leasing", now), retries=retried.retries))
