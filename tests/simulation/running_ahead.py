"""A run with rollouts ahead of the learner, as a queue of timed messages.

The deciders of head and rollout are real; engines, executors and the learner are simulated.
Each link keeps its order, and a seed determines all delays. The run has no duplicate messages,
so a refused event ends it with an error.
"""

from __future__ import annotations

import heapq
import random
from collections import defaultdict
from itertools import count
from typing import NamedTuple

from msgspec.structs import replace

from actors.runtime.decider_loop import compute_state_fingerprint
from bus.messages import (
    AnswerGraded,
    AnswerSubmitted,
    AnyMessage,
    BatchReady,
    BufferCursor,
    CacheReleased,
    CallFailed,
    CodeFinished,
    CodeOk,
    CodeRequested,
    EngineJoined,
    ExecutorJoined,
    LeaseReleased,
    MetricsRecorded,
    Output,
    RunFinished,
    RunStarted,
    SessionEnded,
    StartGroup,
    StepTrained,
    TrajectoryAborted,
    TrajectoryFailed,
    TrajectoryFinished,
    TurnAborted,
    TurnRequested,
    WeightsLoaded,
    WeightsPublished,
)
from configs.schema import RunConfig
from engine.learner.minibatches import check_versions
from policies.arbiter.arbiter import Arbiter
from policies.decider import Decider, Send
from policies.groups.group_buffer import GroupBuffer
from policies.groups.group_starter import TokenizedProblem
from policies.recipe import Recipe
from policies.rollout.rollout import Rollout
from policies.rollout.token_record import ids_to_bytes
from policies.step_metrics import Recorder
from tests.fakes import ANSWER, CALL, TOKENIZER, generated, rules

SAYINGS = (CALL, *[ANSWER] * 3)
ENGINES = ("generator-0", "generator-1")
EXECUTOR = "executor-0/1"
TOKEN_S = 0.01


class Turn(NamedTuple):
    request: TurnRequested
    began: float
    text: str
    finish: str


class Logged(NamedTuple):
    actor: str
    at: float
    event: AnyMessage
    effects: list[Send]
    state: bytes | None  # fingerprint of the state


def deciders_of(run: RunConfig) -> dict[str, Decider]:
    made = [TokenizedProblem(f"q:{number}", "2", ids_to_bytes([65, 66, number])) for number in range(9)]
    limit = run.dialogue.response_tokens
    return {
        "head/arbiter": Arbiter(
            "kv_lookahead", limit, rollout_address="rollout-0", ends_at_first_groups=run.rl.group_oversampling > 1
        ),
        "head/buffer": GroupBuffer(run, made, made[:4]),
        "head/recipe": Recipe(run.rl.steps, run.evaluation.questions, 1.0, ENGINES, run.rl.max_staleness),
        "head/recorder": Recorder(run.rl.steps),
        "rollout-0": Rollout(rules(response_tokens=limit), TOKENIZER),
    }


class RunningAhead:
    def __init__(
        self, run: RunConfig, seed: int, *, trouble: float = 0.0, training_s: float = 2.0, step: int = 0
    ) -> None:
        """`trouble` is the failure probability of calls; `step` is the last finished step."""
        self.run, self.trouble, self.training_s = run, trouble, training_s
        self.random = random.Random(seed)
        self.deciders = deciders_of(run)
        self.log: list[Logged] = []
        self.batches: list[BatchReady] = []
        self.lines: list[MetricsRecorded] = []
        self.ends: defaultdict[int, list[AnyMessage]] = defaultdict(list)  # by trajectory
        self.started: list[StartGroup] = []
        self.finished: RunFinished | None = None
        self.turns: dict[int, Turn] = {}
        self.sessions: set[int] = set()
        self._numbers = count()
        self._queue: list[tuple[float, int, str, str, AnyMessage]] = []
        self._arrival: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._versions: dict[str, list[tuple[float, int]]] = {engine: [] for engine in ENGINES}
        self._learner_free = 0.0
        self._first = step

    def live(self, cursor: BufferCursor | None = None) -> RunningAhead:
        for actor in self.deciders:
            self._decide(0.0, actor, RunStarted(self._first, cursor or BufferCursor()))
        self._send("", "rollout-0", ExecutorJoined(EXECUTOR, 4), 0.0)
        for engine in ENGINES:
            self._send(engine, "head/arbiter", EngineJoined(engine, 2048, 16, self._first), 0.0)
        self._send("learner", "head/recipe", WeightsPublished(self._first, "", 4, ""), 0.0)
        while self._queue:
            now, _, sender, to, message = heapq.heappop(self._queue)
            if to in self.deciders:
                self._decide(now, to, message)
            else:
                self._serve(now, sender, to, message)
        assert self.finished is not None, "everybody waits for somebody"
        return self

    def _send(self, sender: str, to: str, message: AnyMessage, now: float, after: float = 0.0) -> None:
        at = max(self._arrival[sender, to], now + after + self.random.expovariate(100))
        self._arrival[sender, to] = at
        heapq.heappush(self._queue, (at, next(self._numbers), sender, to, message))

    def _decide(self, now: float, actor: str, event: AnyMessage) -> None:
        effects = list(self.deciders[actor].decide(now, event))
        state = compute_state_fingerprint(self.deciders[actor].get_state_after(event))
        self.log.append(Logged(actor, now, event, effects, state))
        if actor == "head/buffer" and isinstance(event, TrajectoryFinished | TrajectoryFailed | TrajectoryAborted):
            self.ends[event.trajectory_id].append(event)
        for send in effects:
            self._send(actor, send.to, send.message, now)
            if isinstance(send.message, StartGroup):
                self.started.append(send.message)

    # ------------------------------------- engines, executors and learner

    def _serve(self, now: float, sender: str, to: str, message: AnyMessage) -> None:
        match message:
            case MetricsRecorded():
                self.lines.append(message)
            case RunFinished():
                self.finished = message
            case BatchReady():
                self._train(now, message)
            case WeightsPublished(version=version):
                self._send(to, "head/recipe", WeightsLoaded(to, version, 0.1), now, self.random.expovariate(5))
                self._versions[to].append((self._arrival[to, "head/recipe"], version))
            case TurnRequested():
                self._begin_turn(now, to, sender, message)
            case Turn():  # end of the turn
                if self.turns.get(message.request.trajectory_id) is message:
                    self._end_turn(now, to, sender, message, message.finish)
            case TurnAborted(trajectory_id=tid):
                if tid in self.turns:
                    self._end_turn(now, to, sender, self.turns[tid], "abort")
            case LeaseReleased(trajectory_id=tid) | CacheReleased(trajectory_id=tid):
                assert tid not in self.turns, "the engine is to forget what it works on"
            case CodeRequested(trajectory_id=tid, call=call):
                self.sessions.add(tid)
                failed = self.random.random() < self.trouble
                answer = (
                    CallFailed(tid, call, "sandbox: gone", to)
                    if failed
                    else CodeFinished(tid, call, CodeOk(Output("2")), 0.1, to)
                )
                self._send(to, sender, answer, now, self.random.choice([0.01, 0.3, 4.0]))
            case AnswerSubmitted(trajectory_id=tid):
                graded = AnswerGraded(tid, self.random.random() < 0.5, 0.1, to)
                self._send(to, sender, graded, now, self.random.choice([0.01, 0.3]))
            case SessionEnded(trajectory_id=tid):
                self.sessions.discard(tid)
            case _:
                pass

    def _train(self, now: float, batch: BatchReady) -> None:
        check_versions(batch.samples, batch.step, self.run.rl.max_staleness)
        self.batches.append(batch)
        self._learner_free = max(self._learner_free, now) + self.training_s
        after = self._learner_free - now
        self._send("learner", "head/recipe", StepTrained(batch.step, {"loss": 0.0}), now, after)
        self._send("learner", "head/recipe", WeightsPublished(batch.step, "", 4, ""), now, after)

    def _begin_turn(self, now: float, engine: str, sender: str, request: TurnRequested) -> None:
        tid = request.trajectory_id
        assert tid not in self.turns
        length = int(self.random.lognormvariate(3.5, 1.2))
        text = "." * length + self.random.choice(SAYINGS)
        finish = "stop" if len(text) < request.max_new_tokens else "length"
        text = text if finish == "stop" else text[: request.max_new_tokens]
        turn = self.turns[tid] = Turn(request, now, text, finish)
        self._send(sender, engine, turn, now, TOKEN_S * len(text))  # pyright: ignore[reportArgumentType] - to itself

    def _end_turn(self, now: float, engine: str, sender: str, turn: Turn, finish: str) -> None:
        """Give each token the weight version of the engine at its time."""
        request = turn.request
        del self.turns[request.trajectory_id]
        text = turn.text[: int((now - turn.began) / TOKEN_S)] if finish == "abort" else turn.text
        answer = generated(request.trajectory_id, request.turn, text, finish, lease=request.lease)
        times = [turn.began + TOKEN_S * place for place in range(len(answer.token_ids) // 4)]
        versions = [max((v for at, v in self._versions[engine] if at <= time), default=self._first) for time in times]
        self._send(engine, sender, replace(answer, versions=ids_to_bytes(versions)), now)
