"""The rollout decider and its trajectories under any order of events."""

from collections import Counter, defaultdict
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from asterism.bus import messages as msg
from asterism.policies.decider import Send
from asterism.policies.rollout.rollout import Rollout
from tests.fakes import ANSWER, CALL, PROMPT, generated, rules, start_group

SAYINGS = (CALL, ANSWER, "nothing", "<tool_call>{</tool_call>", CALL + CALL, "")


class TrajectoryMachine(RuleBasedStateMachine):
    """A state machine that answers requests in any order while executors and engines join and leave.

    Every trajectory ends once, tokens are append-only, and notebooks are complete on every executor.
    """

    row = b""  # row of the group

    def __init__(self) -> None:
        super().__init__()
        self.rollout = Rollout({"": rules(response_tokens=300, max_turns=3, max_calls_per_turn=2)})
        self.now = 0.0
        self.open: list[Send] = []  # unanswered requests
        self.late: list[Send] = []  # obsolete requests with answers in flight
        self.executors: list[str] = []
        self.num_executors = 0
        self.cells: defaultdict[int, list[int]] = defaultdict(list)  # calls that changed the notebook, by trajectory
        self.notebooks: defaultdict[tuple[str, int], list[int]] = defaultdict(list)  # calls, by executor
        self.sent: dict[int, bytes] = {}  # expected token ids, by trajectory
        self.ended: list[int] = []
        self.leases: dict[int, int] = {}  # number of the last lease request, by trajectory
        self.released: set[int] = set()
        self.scores: dict[int, tuple[float, dict[str, float]]] = {}
        self.grants: dict[int, msg.LeaseGranted] = {}  # last grant, by trajectory
        self.engines = {"generator-0": 1, "generator-1": 1}  # current incarnations, by engine
        self.delivered: list[
            msg.TurnGenerated | msg.TurnFailed | msg.LeaseGranted
        ] = []  # messages that can be delivered again
        self._decide(start_group(3, 0, row=self.row))
        self.an_executor_joins(1)

    def _decide(self, event: msg.AnyMessage) -> None:
        self.now += 1.0
        for effect in self.rollout.decide(self.now, event):
            self._take(effect)
        load = Counter(
            send.to for send in self.open if isinstance(send.message, msg.CodeRequested | msg.AnswerSubmitted)
        )
        assert {name: each.open_calls for name, each in self.rollout.placement.loads.items()} == {
            name: load[name] for name in self.executors
        }

    def _take(self, effect: Send) -> None:
        to, message = effect.to, effect.message
        match message:
            case msg.LeaseRequested(trajectory_id=tid):
                assert message.lease == self.leases.get(tid, 0) + 1
                assert tid not in self.released
                assert message.tokens + message.max_new_tokens == message.prompt_tokens + 300
                self.leases[tid] = message.lease
                self.open.append(effect)
            case msg.TurnRequested(trajectory_id=tid):
                grant = self.grants[tid]
                assert message.token_ids.startswith(self.sent.get(tid, PROMPT))
                assert (to, message.incarnation, message.lease) == (grant.engine, grant.incarnation, grant.lease)
                assert message.incarnation == self.engines[to]
                assert 0 < message.max_new_tokens <= grant.tokens - len(message.token_ids) // 4
                self.sent[tid] = message.token_ids
                self.open.append(effect)
            case msg.CodeRequested() | msg.AnswerSubmitted():
                assert to in self.executors
                if isinstance(message, msg.AnswerSubmitted):
                    self._check_submission(message)
                assert not [send for send in self.open if send.message == message]
                self.open.append(effect)
                if isinstance(message, msg.CodeRequested) and message.tool == "jupyter_code":
                    assert self.notebooks[to, message.trajectory_id] == self.cells[message.trajectory_id]
            case msg.SessionRestored(trajectory_id=tid):
                assert not self.notebooks[to, tid]
                self.notebooks[to, tid] = [cell.call for cell in message.cells]
            case msg.SessionEnded(trajectory_id=tid):
                self._give_up(lambda send: send.to == to and send.message.trajectory_id == tid)  # pyright: ignore
            case msg.LeaseReleased(trajectory_id=tid) if to == "head/arbiter":
                assert tid not in self.released
                self.released.add(tid)
            case msg.TrajectoryFinished() | msg.TrajectoryFailed():
                assert message.trajectory_id not in self.ended
                self.ended.append(message.trajectory_id)
                if isinstance(message, msg.TrajectoryFinished):
                    self._check_record(message)
            case _:
                pass

    def _give_up(self, chosen: Callable[[Send], bool]) -> None:
        self.late += [send for send in self.open if chosen(send)]
        self.open = [send for send in self.open if not chosen(send)]

    def _check_submission(self, submission: msg.AnswerSubmitted) -> None:
        """Check a submission. If the task has a row, its reward function receives all tokens, even without an answer."""
        read = submission.reward_input
        assert (read is not None) == bool(self.row)
        if read is not None:
            assert read.row == self.row
            assert read.token_ids.startswith(self.sent[submission.trajectory_id])
            assert len(read.token_ids) == 4 * len(read.loss_mask)

    def _check_record(self, finished: msg.TrajectoryFinished) -> None:
        count = len(finished.record.loss_mask)
        assert (
            len(finished.record.token_ids)
            == len(finished.record.logprobs)
            == len(finished.record.versions)
            == 4 * count
        )
        assert finished.record.token_ids.startswith(self.sent.get(finished.trajectory_id, PROMPT))
        assert count - finished.record.prompt_tokens <= 300
        mask = np.frombuffer(finished.record.loss_mask, np.uint8).astype(bool)
        versions = np.frombuffer(finished.record.versions, np.int32)
        logprobs = np.frombuffer(finished.record.logprobs, np.float32)
        assert (versions[mask] == 3).all() and (versions[~mask] == -1).all()
        assert (logprobs[mask] == -1).all() and (logprobs[~mask] == 0).all()
        assert not mask[: finished.record.prompt_tokens].any()
        assert finished.calls_failed <= finished.calls + 2  # calls of the last turn can be unanswered
        if self.row:
            assert (finished.reward, finished.components) == self.scores[finished.trajectory_id]
        else:
            assert finished.reward == 0 or finished.ending == "answered"
        waits = finished.lease_wait_s + finished.generation_s + finished.tools_s + finished.grading_s
        assert abs(waits - (self.now - 1.0)) < 1e-6  # the phases cover the total time

    @precondition(lambda self: self.open)
    @rule(
        which=st.integers(0, 100),
        saying=st.sampled_from(SAYINGS),
        luck=st.integers(0, 9),
        cut=st.booleans(),
        new_tokens=st.integers(1, 400),
    )
    def answer(self, which: int, saying: str, luck: int, cut: bool, new_tokens: int) -> None:
        asked = self.open.pop(which % len(self.open))
        to, request = asked.to, asked.message
        tid = request.trajectory_id  # pyright: ignore[reportAttributeAccessIssue]
        match request:
            case msg.LeaseRequested(tokens=tokens, lease=lease):
                engine = f"generator-{luck % 2}"
                life = self.engines[engine] - (luck < 4)  # EngineLeft can still be in flight to the arbiter
                grant = msg.LeaseGranted(tid, engine, tokens + new_tokens, lease, 1.0, "room", max(1, life))
                self.grants[tid] = grant
                self.delivered.append(grant)
                self._decide(grant)
            case msg.TurnRequested(turn=turn, lease=lease) if luck == 0:
                self.delivered.append(msg.TurnFailed(tid, turn, lease, "engine: gone"))
                self._decide(self.delivered[-1])
            case msg.TurnRequested(turn=turn, lease=lease):
                budget = request.max_new_tokens
                finish = "length" if cut or len(saying) >= budget else "stop"
                finish = "abort" if luck == 1 else finish
                text = {"length": saying[:budget].ljust(budget, "."), "abort": saying[: budget - 1], "stop": saying}
                said = generated(tid, turn, text[finish], finish, lease=lease)
                self.sent[tid] += said.token_ids
                self.delivered.append(said)
                self._decide(said)
            case msg.CodeRequested(call=call) if luck == 0:
                self._decide(msg.CallFailed(tid, call, "sandbox: gone", to))
            case msg.CodeRequested(call=call):
                outcome = msg.CodeRaised(msg.Output(), "E", "error") if luck < 4 else msg.CodeOk(msg.Output("2"))
                outcome = msg.CodeTimedOut(msg.Output(), 4.0) if luck == 1 else outcome
                if luck != 1:
                    self.cells[tid].append(call)
                    self.notebooks[to, tid].append(call)
                self._decide(msg.CodeFinished(tid, call, outcome, 0.1, to))
            case msg.AnswerSubmitted() if luck == 0:
                self._decide(msg.CallFailed(tid, -1, "grader: gone", to))
            case _:
                self.scores[tid] = luck / 4 - 1, {"some": luck / 4}
                reward, components = self.scores[tid] if self.row else (float(luck > 4), {})
                self._decide(msg.AnswerGraded(tid, reward, 0.1, to, components))

    @precondition(lambda self: len(self.executors) < 3)
    @rule(slots=st.integers(1, 4))
    def an_executor_joins(self, slots: int) -> None:
        self.num_executors += 1
        self.executors.append(f"executor-0/{self.num_executors}")
        self._decide(msg.ExecutorJoined(self.executors[-1], slots))
        assert not self.rollout.waiting_for_executor

    @precondition(lambda self: self.executors)
    @rule(which=st.integers(0, 2))
    def an_executor_leaves(self, which: int) -> None:
        name = self.executors.pop(which % len(self.executors))
        self._give_up(lambda send: send.to == name)
        self._decide(msg.ExecutorLeft(name, "gone"))
        assert not self.rollout.waiting_for_executor or not self.executors

    @rule(name=st.sampled_from(["generator-0", "generator-1"]))
    def an_engine_leaves_and_rejoins(self, name: str) -> None:
        """The turns on the engine are retried or fail; other trajectories are unaffected."""
        life, before = self.engines[name], dict(self.rollout.trajectories)
        lost = [send.message for send in self.open if send.to == name and isinstance(send.message, msg.TurnRequested)]
        self.engines[name] += 1
        self.open = [send for send in self.open if send.to != name]
        self.delivered += [generated(each.trajectory_id, each.turn, "late", lease=each.lease) for each in lost]
        self._decide(msg.EngineLeft(name, "gone", life))
        changed = {tid for tid, each in before.items() if self.rollout.trajectories.get(tid) != each}
        assert changed == {each.trajectory_id for each in lost}
        with pytest.raises(msg.ProtocolError, match="had already left"):
            self.rollout.decide(self.now, msg.EngineLeft(name, "gone", life))

    @precondition(lambda self: self.late)
    @rule(which=st.integers(0, 100), graded=st.booleans())
    def a_late_answer_is_ignored(self, which: int, graded: bool) -> None:
        asked = self.late.pop(which % len(self.late))
        to, request = asked.to, asked.message
        before = dict(self.rollout.trajectories)
        match request:
            case msg.CodeRequested(trajectory_id=tid, call=call):
                answer = msg.CodeFinished(tid, call, msg.CodeOk(msg.Output("late")), 0.1, to)
            case msg.AnswerSubmitted(trajectory_id=tid):
                answer = msg.AnswerGraded(tid, float(graded), 0.1, to)
            case _:
                raise AssertionError(request)
        assert list(self.rollout.decide(self.now, answer)) == []
        assert self.rollout.trajectories == before

    @precondition(lambda self: self.delivered)
    @rule(which=st.integers(0, 100))
    def duplicates_are_refused(self, which: int) -> None:
        before = dict(self.rollout.trajectories)
        with pytest.raises(msg.ProtocolError):
            self.rollout.decide(self.now, self.delivered[which % len(self.delivered)])
        assert self.rollout.trajectories == before

    @rule(tid=st.integers(0, 4), kind=st.integers(0, 4))
    def an_unexpected_event(self, tid: int, kind: int) -> None:
        """An unexpected event raises an error and changes nothing."""
        waited = {type(send.message) for send in self.open if send.message.trajectory_id == tid}  # pyright: ignore[reportAttributeAccessIssue]
        live = self.rollout.trajectories.get(tid)
        executor = live.executor if live is not None else "executor-0/1"
        forbidden: list[tuple[type, msg.AnyMessage]] = [
            (msg.LeaseRequested, msg.LeaseGranted(tid, "generator-0", 1000, self.leases.get(tid, 0) + 1, 0.0, "room")),
            (msg.TurnRequested, generated(tid, 0, "x")),
            (msg.CodeRequested, msg.CodeFinished(tid, 0, msg.CodeOk(msg.Output()), 0.0, executor)),
            (msg.AnswerSubmitted, msg.AnswerGraded(tid, 1.0, 0.0, executor)),
            (msg.TurnRequested, msg.TurnFailed(tid, 99, 1, "x")),
        ]
        expected_by, event = forbidden[kind]
        is_late = tid in self.ended and expected_by in (msg.CodeRequested, msg.AnswerSubmitted)
        if expected_by in waited or is_late or (live is not None and tid in self.rollout.waiting_for_executor):
            return
        before = dict(self.rollout.trajectories)
        with pytest.raises(msg.ProtocolError):
            self.rollout.decide(self.now, event)
        assert self.rollout.trajectories == before

    def teardown(self) -> None:
        """Answer all requests; then every trajectory has ended once, and no lease is held."""
        if not self.executors:
            self.an_executor_joins(1)
        while self.open:
            self.answer(0, SAYINGS[1], 5, False, 100)
        assert sorted(self.ended) == [0, 1, 2]
        assert not self.rollout.trajectories
        assert not self.rollout.waiting_for_executor
        assert self.released == {0, 1, 2}


class ScoredTrajectoryMachine(TrajectoryMachine):
    row = b"{}"


TestScoredTrajectoryMachine = pytest.mark.slow(ScoredTrajectoryMachine.TestCase)
TestScoredTrajectoryMachine.settings = settings(stateful_step_count=40)
TestTrajectoryMachine = pytest.mark.slow(TrajectoryMachine.TestCase)
TestTrajectoryMachine.settings = settings(stateful_step_count=40)


def test_a_group_cannot_be_started_twice_nor_after_it_has_ended() -> None:
    rollout = Rollout({"": rules()})
    rollout.decide(0.0, start_group(2, 0))
    with pytest.raises(msg.ProtocolError, match="already started"):
        rollout.decide(0.0, start_group(2, 0))
    rollout.decide(0.0, msg.GroupAborted(0, 0, 2, "not needed"))
    assert not rollout.trajectories
    with pytest.raises(msg.ProtocolError, match="already started"):
        rollout.decide(0.0, start_group(2, 0))
    assert not rollout.trajectories
    rollout.decide(0.0, start_group(2, 2, group_id=1))
    assert set(rollout.trajectories) == {2, 3}


def test_a_turn_fails_if_its_second_engine_also_leaves() -> None:
    rollout = Rollout({"": rules()})
    rollout.decide(0.0, start_group(1, 0))
    for lease, name in enumerate(("generator-0", "generator-1"), 1):
        rollout.decide(0.0, msg.LeaseGranted(0, name, 1000, lease, 0.0, "room"))
        effects = rollout.decide(1.0, msg.EngineLeft(name, f"{name} was killed"))
    assert effects[-1].message == msg.TrajectoryFailed(0, 0, "engine left: generator-1 was killed")
    assert not rollout.trajectories


@given(st.integers(0, 2**62), st.integers(0, 2**40))
def test_siblings_have_distinct_seeds_that_do_not_depend_on_ids(seed: int, first: int) -> None:
    def seeds(first_id: int) -> list[int]:
        rollout = Rollout({"": rules()})
        start = start_group(4, first_id, seed=seed)
        rollout.decide(0.0, start)
        return [trajectory.seed for trajectory in rollout.trajectories.values()]

    assert seeds(first) == seeds(first + 1000)
    assert len(set(seeds(first))) == 4
    assert all(0 <= value < 2**63 for value in seeds(first))
