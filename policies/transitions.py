"""What an event makes of a trajectory: pure transitions of the record in policies.trajectory.

A lease covers a turn's expected tokens, and one request to an engine. Where it ends before the turn does, the turn goes on
under the next one, there or on another engine: a token's draw depends on the trajectory's seed and the token's position
alone. An answer counts if it comes under the lease that the trajectory has; a late or a second one never does.

Only here tokens are appended. Text is decoded to be understood, and never encoded again.

A trajectory that is aborted ends at once, unless it is generating: then it ends with what the engine has of the turn.

What goes to EXECUTOR goes to the executor that the trajectory is placed on, which policies.rollout looks after.
"""

from __future__ import annotations

from typing import assert_never

from msgspec.structs import replace

from bus.messages import (
    AnswerGraded,
    AnswerSubmitted,
    CallFailed,
    CodeFinished,
    CodeRequested,
    LeaseDeferred,
    LeaseGranted,
    LeaseParked,
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
)
from policies.decider import Send
from policies.dialogue import MalformedCall, TextTokenizer, ToolCall, encode_pieces, read_turn, tool_turn_pieces
from policies.notebook import with_cell
from policies.record import blank_record, bytes_to_ids
from policies.tool_text import failed, malformed_text, not_run_text, result_text, says_error
from policies.trajectory import GRADING, Ending, Rules, Trajectory, TrajectoryEvent

MAX_RETRIES = 1  # of a turn or a grading that infrastructure broke, and of each call; then the trajectory is masked
EXECUTOR = "executor"  # stands for the trajectory's own

Step = tuple[Trajectory, list[Send]]


def start(rules: Rules, group: StartGroup, trajectory_id: int, now: float) -> Step:
    record = blank_record(group.prompt_ids)
    return _ask_for_lease(rules, Trajectory(trajectory_id=trajectory_id, group=group, record=record, since=now))


def advance(rules: Rules, tokenizer: TextTokenizer, trajectory: Trajectory, now: float, event: TrajectoryEvent) -> Step:
    """Raises ProtocolError for an event that does not belong into the trajectory's phase."""
    match event:
        case LeaseGranted():
            trajectory.expect_grant(event)
            return _begin_turn(rules, trajectory, now, event)
        case LeaseDeferred():  # it is in the log, for whoever asks why
            return trajectory, []
        case TurnGenerated():
            trajectory.expect_turn(event)
            if trajectory.aborted:
                return _end_aborted(rules, replace(trajectory, record=trajectory.record.with_generated(event)), now)
            return _take_turn(rules, tokenizer, trajectory, now, event)
        case TurnFailed():
            trajectory.expect_turn(event)
            if trajectory.aborted:
                return _end_aborted(rules, trajectory, now)
            return _retry_turn(rules, trajectory, now, event.cause)
        case CodeFinished():
            trajectory.expect_call(event)
            return _take_result(rules, tokenizer, trajectory, now, event)
        case CallFailed() if event.call == GRADING:
            trajectory.expect("grading", event)
            return _retry(rules, trajectory, event.cause, Send(EXECUTOR, trajectory.submission()))
        case CallFailed():
            trajectory.expect_call(event)
            return _retry_call(rules, trajectory, event)
        case AnswerGraded():
            trajectory.expect("grading", event)
            return _end(rules, trajectory, now, "answered", 1.0 if event.correct else 0.0)
        case _:
            assert_never(event)


def abort(rules: Rules, trajectory: Trajectory, now: float, cause: str) -> Step:
    """Nobody waits for it any more. The engine is asked for what it has of a turn, so that the tokens that it works on are
    not leased to somebody else."""
    trajectory = replace(trajectory, aborted=cause)
    if trajectory.phase == "generating":
        return trajectory, [Send(trajectory.engine, TurnAborted(trajectory.trajectory_id, trajectory.lease))]
    return _end_aborted(rules, trajectory, now)


def take_over(rules: Rules, trajectory: Trajectory, now: float) -> Step:
    """One that is to begin a turn goes on where nobody knows it: it has neither lease nor cache nor notebook there yet."""
    nowhere = replace(trajectory, since=now, engine="", engine_life=0, lease=0, leased_tokens=0, executor="")
    return _ask_for_lease(rules, nowhere)


def decline(rules: Rules, trajectory: Trajectory, granted: LeaseGranted) -> Step:
    """Its engine has left meanwhile: ask for the next lease, without having used this one. Raises as `advance` does."""
    trajectory.expect_grant(granted)
    return _ask_for_lease(rules, replace(trajectory, lease=granted.lease))


# ---------------------------------------------------------------- turns


def _ask_for_lease(rules: Rules, trajectory: Trajectory) -> Step:
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


def _begin_turn(rules: Rules, trajectory: Trajectory, now: float, granted: LeaseGranted) -> Step:
    """Or go on with it."""
    trajectory = replace(
        trajectory.entering("generating", now),
        engine=granted.engine,
        engine_life=granted.life,
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
        life=trajectory.engine_life,
    )
    return trajectory, [Send(trajectory.engine, request)]


def _take_turn(rules: Rules, tokenizer: TextTokenizer, trajectory: Trajectory, now: float, turn: TurnGenerated) -> Step:
    start_of_turn = trajectory.turn_start or trajectory.record.num_tokens
    trajectory = replace(trajectory, record=trajectory.record.with_generated(turn), turn_start=start_of_turn)
    if turn.finish != "stop":  # go on with what is there: no token is generated twice
        if trajectory.record.response_tokens >= rules.response_tokens:
            return _end(rules, trajectory, now, "length", 0.0)
        return _ask_for_lease(rules, trajectory.entering("leasing", now))
    said = read_turn(tokenizer.decode(bytes_to_ids(trajectory.record.token_ids[4 * start_of_turn :])), rules.tools)
    trajectory = replace(
        trajectory,
        turn=trajectory.turn + 1,
        turn_start=0,
        requested=said.calls,
        answer=said.answer or "",
        answer_opens=trajectory.answer_opens + said.answer_opens,
        answer_closes=trajectory.answer_closes + said.answer_closes,
    )
    if said.calls:
        return _call_tools(rules, tokenizer, trajectory, now)
    if said.answer is None:
        return _end(rules, trajectory, now, "no_answer", 0.0)
    trajectory, releases = _release(rules, trajectory.entering("grading", now))
    return trajectory, [*releases, Send(EXECUTOR, trajectory.submission())]


def _retry_turn(rules: Rules, trajectory: Trajectory, now: float, cause: str) -> Step:
    """Under a new lease: the engine may be gone, and with it what was leased there."""
    again, failed = _retry(rules, trajectory, cause)
    if failed:
        return again, failed
    return _ask_for_lease(rules, replace(again.entering("leasing", now), retries=again.retries))


# ---------------------------------------------------------------- calls


def _call_tools(rules: Rules, tokenizer: TextTokenizer, trajectory: Trajectory, now: float) -> Step:
    if trajectory.turn >= rules.max_turns:
        return _end(rules, trajectory, now, "turns", 0.0)
    texts = tuple(_text_at_once(rules, place, call) for place, call in enumerate(trajectory.requested))
    refused = [text for text in texts if text is not None]
    trajectory = replace(
        trajectory.entering("calling", now),
        results=texts,
        calls_failed=trajectory.calls_failed + len(refused),
        responses_with_error=trajectory.responses_with_error
        + sum(says_error(None, text, rules.result_format) for text in refused),
    )
    numbers = [trajectory.calls + place for place, text in enumerate(texts) if text is None]
    if not numbers:
        return _answer_calls(rules, tokenizer, trajectory, now)
    requests = [trajectory.code_request(number) for number in numbers]
    has_session = trajectory.has_session or any(request.tool == "jupyter_code" for request in requests)
    parked = Send(rules.arbiter, LeaseParked(trajectory.trajectory_id, trajectory.record.num_tokens))
    return replace(trajectory, has_session=has_session), [*(Send(EXECUTOR, request) for request in requests), parked]


def _text_at_once(rules: Rules, place: int, call: ToolCall | MalformedCall) -> str | None:
    """The result of a call that is not run, or None."""
    if isinstance(call, MalformedCall):
        return malformed_text(call.error, rules.result_characters, rules.result_format)
    if place >= rules.max_calls_per_turn:
        reason = f"not run: at most {rules.max_calls_per_turn} calls a turn"
        return not_run_text(reason, rules.result_characters, rules.result_format)
    return None


def _take_result(
    rules: Rules, tokenizer: TextTokenizer, trajectory: Trajectory, now: float, event: CodeFinished
) -> Step:
    call = trajectory.code_request(event.call)
    text = result_text(event.outcome, rules.result_characters, rules.result_format, call.code)
    trajectory = replace(
        trajectory,
        results=_with_result(trajectory, event.call, text),
        cells=with_cell(trajectory.cells, call, event),
        calls_failed=trajectory.calls_failed + failed(event.outcome),
        responses_with_error=trajectory.responses_with_error + says_error(event.outcome, text, rules.result_format),
    )
    if None in trajectory.results:
        return trajectory, []
    return _answer_calls(rules, tokenizer, trajectory, now)


def _with_result(trajectory: Trajectory, number: int, text: str) -> tuple[str | None, ...]:
    place = number - trajectory.calls
    return (*trajectory.results[:place], text, *trajectory.results[place + 1 :])


def _retry_call(rules: Rules, trajectory: Trajectory, event: CallFailed) -> Step:
    """Ask again, or give the trajectory up: its other calls that are under way are stopped then (SessionEnded)."""
    if event.call in trajectory.retried_calls:
        return _fail(rules, trajectory, event.cause)
    trajectory = replace(trajectory, retried_calls=(*trajectory.retried_calls, event.call))
    return trajectory, [Send(EXECUTOR, trajectory.code_request(event.call))]


def displace(rules: Rules, trajectory: Trajectory, cause: str) -> Step:
    """Its executor has left. What was under way there is asked for once more, as after any failure, or all is lost.

    The requests are those of `requests_of`, for the executor where it is placed next.
    """
    trajectory = replace(trajectory, executor="")
    if trajectory.phase == "grading":
        return _retry(rules, trajectory, cause)
    open_calls = trajectory.open_calls
    if not set(open_calls).isdisjoint(trajectory.retried_calls):
        return _fail(rules, trajectory, cause)
    return replace(trajectory, retried_calls=(*trajectory.retried_calls, *open_calls)), []


def requests_of(trajectory: Trajectory) -> list[SessionRestored | CodeRequested | AnswerSubmitted]:
    """What an executor where it is newly placed must hear of it: its notebook so far, and what it waits for."""
    if trajectory.phase == "grading":
        return [trajectory.submission()]
    calls = [trajectory.code_request(number) for number in trajectory.open_calls]
    notebook = [SessionRestored(trajectory.trajectory_id, trajectory.cells)] if calls and trajectory.cells else []
    return [*notebook, *calls]


def _answer_calls(rules: Rules, tokenizer: TextTokenizer, trajectory: Trajectory, now: float) -> Step:
    """All results are there: give them to the model, unless they leave it no token to answer with."""
    texts = [text for text in trajectory.results if text is not None]
    given = encode_pieces(tokenizer, tool_turn_pieces(texts))
    trajectory = replace(
        trajectory, calls=trajectory.calls + len(trajectory.results), requested=(), results=(), answer=""
    )
    if trajectory.record.response_tokens + len(given) >= rules.response_tokens:
        return _end(rules, trajectory, now, "length", 0.0)
    return _ask_for_lease(
        rules, replace(trajectory.entering("leasing", now), record=trajectory.record.with_given(given))
    )


# ---------------------------------------------------------------- endings


def _retry(rules: Rules, trajectory: Trajectory, cause: str, *again: Send) -> Step:
    if trajectory.retries < MAX_RETRIES:
        return replace(trajectory, retries=trajectory.retries + 1), list(again)
    return _fail(rules, trajectory, cause)


def _fail(rules: Rules, trajectory: Trajectory, cause: str) -> Step:
    trajectory, sends = _leave(rules, trajectory)
    failure = TrajectoryFailed(trajectory.trajectory_id, trajectory.group.group_id, cause)
    return replace(trajectory, phase="ended"), [*sends, Send(rules.buffer, failure)]


def _end(rules: Rules, trajectory: Trajectory, now: float, ending: Ending, reward: float) -> Step:
    if trajectory.requested:  # calls that will not be answered count neither as made nor as failed
        trajectory = replace(trajectory, requested=(), results=())
    trajectory, sends = _leave(rules, trajectory.entering("ended", now))
    record, waits = trajectory.record, trajectory.waits
    finished = TrajectoryFinished(
        trajectory_id=trajectory.trajectory_id,
        group_id=trajectory.group.group_id,
        reward=reward,
        ending=ending,
        prompt_tokens=record.prompt_tokens,
        token_ids=record.token_ids,
        loss_mask=record.loss_mask,
        logprobs=record.logprobs,
        versions=record.versions,
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
    )
    return trajectory, [*sends, Send(rules.buffer, finished)]


def _end_aborted(rules: Rules, trajectory: Trajectory, now: float) -> Step:
    if trajectory.phase == "grading":
        trajectory = replace(trajectory, has_session=True)  # its end stops the grading
    trajectory, sends = _leave(rules, trajectory.entering("ended", now))
    tid, group_id = trajectory.trajectory_id, trajectory.group.group_id
    aborted = TrajectoryAborted(tid, group_id, trajectory.aborted, trajectory.record.response_tokens)
    return trajectory, [*sends, Send(rules.buffer, aborted)]


def _leave(rules: Rules, trajectory: Trajectory) -> Step:
    trajectory, sends = _release(rules, trajectory)
    if trajectory.has_session or None in trajectory.results:
        sends.append(Send(EXECUTOR, SessionEnded(trajectory.trajectory_id)))
    return replace(trajectory, has_session=False), sends


def _release(rules: Rules, trajectory: Trajectory) -> Step:
    """Give the KV tokens back: first the engine's, so that the arbiter never grants what is still in use."""
    if not trajectory.holds_lease:
        return trajectory, []
    released = LeaseReleased(trajectory.trajectory_id, trajectory.record.num_tokens)
    receivers = [trajectory.engine, rules.arbiter] if trajectory.engine else [rules.arbiter]
    return replace(trajectory, holds_lease=False), [Send(receiver, released) for receiver in receivers]
