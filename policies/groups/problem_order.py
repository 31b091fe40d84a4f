"""The order of a run's training problems: tasks by weight, and each task's problems in shuffled epochs."""

from array import array
from collections.abc import Sequence
from functools import lru_cache

from asterism.policies.seeded_random import ORDER, mix, shuffle_range


@lru_cache(maxsize=16)
def _shuffle_epoch(num_problems: int, seed: int, epoch: int) -> list[int]:
    """Return the order of a task's problems in one epoch."""
    return shuffle_range(num_problems, seed, ORDER, epoch)


class ProblemOrder:
    """Maps positions of an endless sequence to problem numbers, which run through all tasks.

    The next task is the task furthest behind its share (smooth weighted round robin), so that the shares of tasks in
    each prefix of the sequence follow the weights.
    """

    def __init__(self, counts: Sequence[int], weights: Sequence[float], seed: int) -> None:
        """`counts` and `weights` contain the number of problems and the weight of each task."""
        self._counts, self._weights = tuple(counts), tuple(weights)
        self._offsets = [sum(self._counts[:task]) for task in range(len(self._counts))]
        self._seeds = [mix(seed, ORDER, task) if task else seed for task in range(len(self._counts))]
        self._tasks, self._places = array("H"), array("L")  # by position, up to the largest one needed
        self._taken = [0] * len(self._counts)  # positions of each task so far

    def select(self, position: int) -> int:
        """Return the number of the problem at `position`."""
        while position >= len(self._tasks):
            self._append_position()
        task = self._tasks[position]
        epoch, place = divmod(self._places[position], self._counts[task])
        return self._offsets[task] + _shuffle_epoch(self._counts[task], self._seeds[task], epoch)[place]

    def _append_position(self) -> None:
        """Extend the sequence by the next task, at the next place in the sequence of that task."""
        share = (len(self._tasks) + 1) / sum(self._weights)
        task = max(range(len(self._counts)), key=lambda each: share * self._weights[each] - self._taken[each])
        self._tasks.append(task)
        self._places.append(self._taken[task])
        self._taken[task] += 1
