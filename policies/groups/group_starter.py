"""Starts groups: selects the problem, numbers the trajectories, picks a rollout process."""

from collections.abc import Sequence
from functools import lru_cache

import msgspec
from msgspec.structs import replace

from bus.messages import BufferCursor, StartGroup
from configs.schema import RunConfig
from policies.groups.buffer_state import OpenGroup
from policies.seeded_random import EVALUATE, ORDER, TRAIN, mix, shuffle_range


class TokenizedProblem(msgspec.Struct, frozen=True, array_like=True):
    name: str
    ground_truth: str
    prompt_ids: bytes
    row: bytes = b""  # see StartGroup


@lru_cache(maxsize=4)
def _shuffle_epoch(num_problems: int, seed: int, epoch: int) -> list[int]:
    return shuffle_range(num_problems, seed, ORDER, epoch)


def select_problem(position: int, num_problems: int, seed: int) -> int:
    """Index of the problem at `position` of an endless sequence of shuffled epochs."""
    return _shuffle_epoch(num_problems, seed, position // num_problems)[position % num_problems]


class GroupStarter:
    """Every method maps a cursor to the next cursor and a new group."""

    def __init__(
        self,
        run: RunConfig,
        train_problems: Sequence[TokenizedProblem],
        test_problems: Sequence[TokenizedProblem],
        rollout_addresses: tuple[str, ...],
    ) -> None:
        self._seed = run.seed
        self._rollouts = run.rl.rollouts
        self._temperature = run.sampling.temperature
        self._train_problems = train_problems
        self._test_problems = test_problems
        self._rollout_addresses = rollout_addresses

    def start_training_group(self, cursor: BufferCursor, step: int) -> tuple[BufferCursor, OpenGroup]:
        if cursor.pending:
            position, cursor = cursor.pending[0], replace(cursor, pending=cursor.pending[1:])
        else:
            position, cursor = cursor.position, replace(cursor, position=cursor.position + 1)
        problem = self._train_problems[select_problem(position, len(self._train_problems), self._seed)]
        seed = mix(self._seed, TRAIN, position)
        return self._start_group(
            cursor, problem, step, position, size=self._rollouts, temperature=self._temperature, seed=seed
        )

    def count_questions(self, wanted: int) -> int:
        return min(wanted, len(self._test_problems))

    def start_question(self, cursor: BufferCursor, index: int, temperature: float) -> tuple[BufferCursor, OpenGroup]:
        """A group of one trajectory for the evaluation's question `index`."""
        problem, seed = self._test_problems[index], mix(self._seed, EVALUATE, index)
        return self._start_group(cursor, problem, 0, index, size=1, temperature=temperature, seed=seed)

    def _start_group(
        self,
        cursor: BufferCursor,
        problem: TokenizedProblem,
        step: int,
        position: int,
        *,
        size: int,
        temperature: float,
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
            temperature=temperature,
            seed=seed,
            row=problem.row,
        )
        next_trajectory_id = cursor.next_trajectory_id + size
        cursor = replace(cursor, next_group_id=cursor.next_group_id + 1, next_trajectory_id=next_trajectory_id)
        rollout_address = self._rollout_addresses[start.group_id % len(self._rollout_addresses)]
        return cursor, OpenGroup(start, step, rollout_address, position)
