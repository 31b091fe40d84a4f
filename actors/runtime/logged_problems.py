"""A replay reads the problems of a run's logged groups from the event log instead of the data files.

The seed of a logged StartGroup identifies the position in the sequence of problems, and so the
problem's index. If a process sent a group and the rollout process did not log it, only the data files have its
problem.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, overload

import msgspec

from asterism.bus.event_log.reader import read_messages
from asterism.bus.messages import StartGroup
from asterism.configs.atomic_write import write_atomically
from asterism.configs.file_manifest import check_file
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.run_config import RunConfig
from asterism.policies.groups.evaluation_questions import EvaluationQuestions
from asterism.policies.groups.group_starter import TokenizedProblem
from asterism.policies.groups.problem_order import ProblemOrder
from asterism.policies.seeded_random import TRAIN, mix

_POLL_INTERVAL_S = 0.1
Purpose = Literal["train", "evaluate"]


class ProblemCounts(msgspec.Struct, frozen=True):
    """Numbers of the problems with prompts within the limit."""

    train: tuple[int, ...]  # numbers by task
    test: tuple[int, ...]


def write_problem_counts(folder: RunFolder, counts: ProblemCounts) -> None:
    """Write the counts. Raises OSError."""
    write_atomically(folder.problem_counts, msgspec.json.encode(counts))


def read_problem_counts(folder: RunFolder) -> ProblemCounts | None:
    """Read the counts, or return None if the head has never loaded the problems."""
    path = folder.problem_counts
    check_file(path)
    return msgspec.json.decode(path.read_bytes(), type=ProblemCounts) if path.exists() else None


class LoggedProblems(Sequence[TokenizedProblem]):
    """Problems by index, read from the log of a rollout process when they are first needed."""

    def __init__(
        self,
        log: Path,
        run: RunConfig,
        purpose: Purpose,
        counts: tuple[int, ...],
        load_all: Callable[[], Sequence[TokenizedProblem]],
        may_grow: Callable[[], bool],
    ) -> None:
        """`counts`: by task. `load_all` reads the data files. While the log `may_grow`, a lookup waits."""
        self._log, self._purpose, self._count, self._seed = log, purpose, sum(counts), run.seed
        self._order = ProblemOrder(counts, [task.weight for task in run.resolved_tasks], run.seed)
        self._load_all, self._may_grow = load_all, may_grow
        self._all: Sequence[TokenizedProblem] | None = None
        self._by_index: dict[int, TokenizedProblem] = {}
        self._by_seed: dict[int, TokenizedProblem] = {}  # problems after a position that is not logged yet
        self._next_seq, self._next_position = 0, 0
        questions = EvaluationQuestions(run, counts).list_all() if purpose == "evaluate" else []
        self._questions = {answer.seed: answer.problem for answer in questions}

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> TokenizedProblem: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[TokenizedProblem]: ...
    def __getitem__(self, index: int | slice) -> TokenizedProblem | Sequence[TokenizedProblem]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(self._count))]
        if self._all is None and index not in self._by_index and not self._wait_for(index):
            self._all = self._load_all()
        return self._by_index[index] if self._all is None else self._all[index]

    def _wait_for(self, index: int) -> bool:
        """Return whether the log has the problem; wait while the log may grow."""
        self._read_log()
        while index not in self._by_index and self._may_grow():
            time.sleep(_POLL_INTERVAL_S)
            self._read_log()
        return index in self._by_index

    def _read_log(self) -> None:
        for event, start in read_messages(self._log, StartGroup, since_seq=self._next_seq):
            self._next_seq = event.seq + 1
            problem = TokenizedProblem(
                start.problem, start.ground_truth, start.prompt_ids, start.row, start.task, start.evaluation_set
            )
            if start.seed in self._questions:
                self._by_index[self._questions[start.seed]] = problem
            elif start.purpose == self._purpose:
                self._by_seed[start.seed] = problem
        while (problem := self._by_seed.pop(mix(self._seed, TRAIN, self._next_position), None)) is not None:
            self._by_index[self._order.select(self._next_position)] = problem
            self._next_position += 1
