"""Transitions that end or retry a trajectory, or request and release its resources.

EXECUTOR is a placeholder address; asterism.policies.rollout.rollout replaces it by the assigned executor.
"""

from msgspec.structs import replace

from asterism.bus.messages import (
    Ending,
    LeaseReleased,
    LeaseRequested,
    SessionEnded,
    TrajectoryAborted,
    TrajectoryFailed,
    TrajectoryFinished,
)
from asterism.policies.decider import Send
from asterism.policies.dialogue.release_text import count_release_marks, find_response_answer
from asterism.policies.rollout.trajectory import Rules, Trajectory

MAX_RETRIES = 1  # retries of a turn, a grading or a call after infrastructure failures
EXECUTOR = "executor"

Transition = tuple[Trajectory, list[Send]]


def request_lease(rules: Rules, trajectory: Trajectory) -> Transition:
    record = trajectory.record
    request = LeaseRequested(
        trajectory_id=trajectory.trajectory_id,
        group_id=trajectory.group.group_id,
        turn=trajectory.turn,
        lease=trajectory.lease + 1,
        tokens=record.num_tokens,
        prompt_tokens=len(trajectory.group.prompt_ids) // 4,  # shared by siblings, without the first observation
        max_new_tokens=rules.response_tokens - record.response_tokens,
    )
    return replace(trajectory, holds_lease=True), [Send(rules.arbiter, request)]


def retry(rules: Rules, trajectory: Trajectory, now: float, cause: str, *retry_sends: Send) -> Transition:
    if trajectory.retries < MAX_RETRIES:
        return replace(trajectory, retries=trajectory.retries + 1), list(retry_sends)
    return fail(rules, trajectory, now, cause)


def fail(rules: Rules, trajectory: Trajectory, now: float, cause: str) -> Transition:
    trajectory, sends = _release_resources(rules, trajectory.enter_phase("ended", now))
    failure = TrajectoryFailed(trajectory.trajectory_id, trajectory.group.group_id, cause)
    return trajectory, [*sends, Send(rules.buffer, failure)]


def stop(rules: Rules, trajectory: Trajectory, now: float, ending: Ending) -> Transition:
    """Grade the answer. With reward functions, also grade a trajectory without an answer. Drop unanswered calls."""
    trajectory = replace(trajectory, ending=ending, requested=(), results=())
    has_answer = ending == "answered"
    if rules.graded_text == "response" and rules.kind != "dialogue":
        trajectory, has_answer = _search_response(rules, trajectory)
    if not has_answer and not trajectory.group.row:
        return end(rules, trajectory, now, 0.0, {})
    trajectory, releases = release_lease(rules, trajectory.enter_phase("grading", now))
    return trajectory, [*releases, Send(EXECUTOR, trajectory.build_submission())]


def _search_response(rules: Rules, trajectory: Trajectory) -> tuple[Trajectory, bool]:
    """Search the whole response for an answer. Return the trajectory, and whether it has an answer."""
    answer = find_response_answer(rules.renderer.decode_response(trajectory.record), rules.dialogue)
    if answer is None:
        return trajectory, trajectory.ending == "answered"
    ending = "answered" if trajectory.ending == "no_answer" else trajectory.ending
    return replace(trajectory, answer=answer, ending=ending), True


def end(rules: Rules, trajectory: Trajectory, now: float, reward: float, components: dict[str, float]) -> Transition:
    trajectory, sends = _release_resources(rules, trajectory.enter_phase("ended", now))
    waits, record, release = trajectory.waits, trajectory.record, None
    if rules.counts_release_marks:
        release = count_release_marks(rules.renderer.decode_response(record), rules.dialogue)
    finished = TrajectoryFinished(
        trajectory_id=trajectory.trajectory_id,
        group_id=trajectory.group.group_id,
        reward=reward,
        ending=trajectory.ending,
        record=record,
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
        environment=trajectory.environment,
        answer_spans=trajectory.answer_spans,
        tools=trajectory.tools,
        release=release,
    )
    return trajectory, [*sends, Send(rules.buffer, finished)]


def end_aborted(rules: Rules, trajectory: Trajectory, now: float) -> Transition:
    if trajectory.phase == "grading":
        trajectory = replace(trajectory, has_session=True)  # SessionEnded stops the grading
    trajectory, sends = _release_resources(rules, trajectory.enter_phase("ended", now))
    tid, group_id = trajectory.trajectory_id, trajectory.group.group_id
    aborted = TrajectoryAborted(tid, group_id, trajectory.aborted, trajectory.record.response_tokens)
    return trajectory, [*sends, Send(rules.buffer, aborted)]


def _release_resources(rules: Rules, trajectory: Trajectory) -> Transition:
    trajectory, sends = release_lease(rules, trajectory)
    if trajectory.has_session or None in trajectory.results:
        sends.append(Send(EXECUTOR, SessionEnded(trajectory.trajectory_id)))
    return replace(trajectory, has_session=False), sends


def release_lease(rules: Rules, trajectory: Trajectory) -> Transition:
    """Release the lease first at the engine, then at the arbiter, which would otherwise grant tokens in use."""
    if not trajectory.holds_lease:
        return trajectory, []
    released = LeaseReleased(trajectory.trajectory_id, trajectory.record.num_tokens)
    receivers = [trajectory.engine, rules.arbiter] if trajectory.engine else [rules.arbiter]
    return replace(trajectory, holds_lease=False), [Send(receiver, released) for receiver in receivers]
