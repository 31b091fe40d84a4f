"""Starts groups: selects the problem, numbers the trajectories, picks a rollout process."""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from asterism.bus.messages import BufferCursor, EvaluationRequested, StartGroup
from asterism.configs.schema.algorithm import Sampling
from asterism.configs.schema.run_config import RunConfig
from asterism.policies.groups.buffer_state import OpenGroup
from asterism.policies.groups.evaluation_questions import EvaluationQuestions, PlannedAnswer
from asterism.policies.groups.problem_order import ProblemOrder
from asterism.policies.seeded_random import TRAIN, mix


class TokenizedProblem(msgspec.Struct, frozen=True, array_like=True):
    name: str
    ground_truth: str
    prompt_ids: bytes
    row: bytes = b""  # as in StartGroup
    task: str = ""
    evaluation_set: str = ""


class ProblemSet(NamedTuple):
    """Problems of all tasks or evaluation sets in order, numbered through all of them."""

    problems: Sequence[TokenizedProblem]
    counts: tuple[int, ...]  # number of problems of each task or evaluation set

    @classmethod
    def of_one_task(cls, problems: Sequence[TokenizedProblem]) -> "ProblemSet":
        return cls(problems, (len(problems),))


class GroupStarter:
    """Starts groups: each method maps a cursor to the next cursor and a new group."""

    def __init__(
        self,
        run: RunConfig,
        train: ProblemSet,
        test: ProblemSet,
        rollout_addresses: tuple[str, ...],
    ) -> None:
        self._seed = run.seed
        self._rollouts = run.rl.rollouts
        self._sampling = run.sampling
        self._train_problems, self._test_problems = train.problems, test.problems
        self.questions = EvaluationQuestions(run, test.counts)
        self._order = ProblemOrder(train.counts, [task.weight for task in run.resolved_tasks], run.seed)
        self._rollout_addresses = rollout_addresses

    def start_training_group(self, cursor: BufferCursor, step: int) -> tuple[BufferCursor, OpenGroup]:
        if cursor.pending:
            position, cursor = cursor.pending[0], replace(cursor, pending=cursor.pending[1:])
        else:
            position, cursor = cursor.position, replace(cursor, position=cursor.position + 1)
        problem = self._train_problems[self._order.select(position)]
        seed = mix(self._seed, TRAIN, position)
        return self._start_group(
            cursor, problem, step, position, size=self._rollouts, sampling=self._sampling, seed=seed
        )

    def start_answer(
        self, cursor: BufferCursor, answer: PlannedAnswer, request: EvaluationRequested
    ) -> tuple[BufferCursor, OpenGroup]:
        """Start a group of one trajectory."""
        problem = self._test_problems[answer.problem]
        return self._start_group(
            cursor, problem, 0, answer.problem, size=1, sampling=request.sampling, seed=answer.seed
        )

    def _start_group(
        self,
        cursor: BufferCursor,
        problem: TokenizedProblem,
        step: int,
        position: int,
        *,
        size: int,
        sampling: Sampling,
        seed: int,
    ) -> tuple[BufferCursor, OpenGroup]:
        start = StartGroup(
            group_id=cursor.next_group_id,
            purpose="train" if step else "evaluate",
            problem=problem.name,
            ground_truth=problem.ground_truth,
            prompt_ids=problem.prompt_ids,
            size=size,
            first_trajectory_id=cursor.next_trajectory_id,
            sampling=sampling,
            seed=seed,
            row=problem.row,
            task=problem.task,
            evaluation_set=problem.evaluation_set,
        )
        next_trajectory_id = cursor.next_trajectory_id + size
        cursor = replace(cursor, next_group_id=cursor.next_group_id + 1, next_trajectory_id=next_trajectory_id)
        rollout_address = self._rollout_addresses[start.group_id % len(self._rollout_addresses)]
        return cursor, OpenGroup(start, step, rollout_address, position)
