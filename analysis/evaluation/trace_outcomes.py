"""Reads each question's outcome from the traces of an evaluation: solved rollouts, failures, rewards.

A trace counts as solved if `evaluation.success` held in the run that wrote it (`metrics.correct`).
"""

import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from asterism.analysis.evaluation.answer_records import iter_complete_lines, parse_line
from asterism.configs.errors import UnusableInput

OUTCOME_NAMES = ("solved", "rollouts", "rate", "failed", "reward", "best", "worst", "spread", "tokens", "truncated")
_AT_LIMIT = "max_total_tokens"  # stop_condition of a response that the length limit ends


class QuestionKey(NamedTuple):
    """Identity of a question in any file: its text and gold answer."""

    question: str
    gold: str


class QuestionOutcome:
    """Sums over the rollouts of one question."""

    def __init__(self) -> None:
        self.rollouts = 0  # rollouts with a result
        self.solved = 0
        self.failed = 0  # rollouts that an infrastructure failure ended: without a result
        self.truncated = 0  # rollouts that the length limit ended
        self._rewards, self._tokens = 0.0, 0.0
        self._best, self._worst = -math.inf, math.inf

    def compute_values(self) -> dict[str, float]:
        """Return the values by OUTCOME_NAMES. At least one rollout must have a result."""
        return {
            "solved": self.solved,
            "rollouts": self.rollouts,
            "rate": self.solved / self.rollouts,
            "failed": self.failed,
            "reward": self._rewards / self.rollouts,
            "best": self._best,
            "worst": self._worst,
            "spread": self._best - self._worst,
            "tokens": self._tokens / self.rollouts,
            "truncated": self.truncated / self.rollouts,
        }

    def add(self, trace: "_Trace") -> None:
        if not trace.ok or trace.rewards.reward is None:
            self.failed += 1
            return
        reward = trace.rewards.reward.score
        self.rollouts += 1
        self.solved += (trace.metrics.correct or 0.0) > 0
        self.truncated += trace.stop_condition == _AT_LIMIT
        self._rewards += reward
        self._tokens += trace.metrics.response_tokens or 0.0
        self._best, self._worst = max(self._best, reward), min(self._worst, reward)


class TraceOutcomes:
    """Outcomes by name of the question (FILE:ROW), and by its text and gold answer."""

    def __init__(self) -> None:
        self.num_traces = 0
        self._by_name: dict[str, dict[QuestionKey, QuestionOutcome]] = {}
        self._by_key: dict[QuestionKey, QuestionOutcome] = {}

    def add(self, trace: "_Trace") -> None:
        data = trace.task.data
        key = QuestionKey(data.prompt, data.answer)
        self.num_traces += 1
        self._by_name.setdefault(data.name, {}).setdefault(key, QuestionOutcome()).add(trace)
        if data.prompt:
            self._by_key.setdefault(key, QuestionOutcome()).add(trace)

    def find(self, name: str, key: QuestionKey) -> QuestionOutcome | None:
        """Return the outcome of the row with this name and question, or else of all rows with this question."""
        return self._by_name.get(name, {}).get(key) or self._by_key.get(key)


def read_outcomes(paths: Iterable[Path], task: str | None = None) -> TraceOutcomes:
    """Read all traces, or those of `task`. Raises UnusableInput for a file without traces and for a damaged line."""
    outcomes = TraceOutcomes()
    tasks: set[str] = set()
    for path in paths:
        for trace in _iter_traces(path):
            tasks.add(trace.info.task)
            if task is None or trace.info.task == task:
                outcomes.add(trace)
    if not outcomes.num_traces:
        known = ", ".join(sorted(filter(None, tasks))) or "no name of a task"
        raise UnusableInput(f"--task {task}: no trace of this task; the traces have {known}")
    return outcomes


def _iter_traces(path: Path) -> Iterator["_Trace"]:
    file = path / "traces.jsonl" if path.is_dir() else path
    if not file.is_file():
        raise UnusableInput(f"--by {path}: no traces here; `asterism eval` writes traces.jsonl into its folder")
    is_empty = True
    for number, line in enumerate(iter_complete_lines(file), 1):
        is_empty = False
        yield parse_line(file, number, line, _Trace)
    if is_empty:
        raise UnusableInput(f"--by {file}: no traces; the evaluation has no answers, or is not finished")


# ---------------------------------------------------------------- fields of a trace that this file reads


class _TaskData(msgspec.Struct):
    name: str
    prompt: str = ""
    answer: str = ""


class _Task(msgspec.Struct):
    data: _TaskData


class _Reward(msgspec.Struct):
    score: float


class _Rewards(msgspec.Struct):
    reward: _Reward | None


class _Metrics(msgspec.Struct):
    correct: float | None
    response_tokens: float | None = None


class _Info(msgspec.Struct):
    task: str = ""  # name of the task, as in [[tasks]]


class _Trace(msgspec.Struct):
    task: _Task
    rewards: _Rewards
    metrics: _Metrics
    ok: bool
    stop_condition: str = ""
    info: _Info = msgspec.field(default_factory=_Info)
