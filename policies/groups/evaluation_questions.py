"""The plan of an evaluation's answers: the questions of each set, their numbers of samples, and the seeds.

The seed of an answer depends only on the run's seed, the name of the set, the place of the question in the set and the
number of the sample. So an evaluation during training and `asterism eval` draw the same answers from the same weights,
independent of the run's other sets. A run without [[evaluation.sets]] has one set without a name; the numbers of its
questions run through all tasks.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from asterism.bus.messages import EvaluationRequested
from asterism.configs.schema.algorithm import EvaluationSetConfig
from asterism.configs.schema.run_config import RunConfig
from asterism.policies.seeded_random import EVALUATE, mix


class PlannedAnswer(NamedTuple):
    problem: int  # number of the problem through all sets
    evaluation_set: str
    place: int  # place of the problem in its set
    sample: int  # number of the sample, from 0
    seed: int  # seed of the answer's group, different for each answer


class EvaluationQuestions:
    def __init__(self, run: RunConfig, counts: Sequence[int]) -> None:
        """`counts`: number of problems of each set."""
        self._seed = run.seed
        self._sets = run.resolved_evaluation_sets
        self._intervals = run.evaluation.intervals
        self._counts = counts

    def list_answers(self, request: EvaluationRequested, answered: Collection[int] = ()) -> list[PlannedAnswer]:
        """List answers to at most `request.questions` questions of each due set, except the seeds in `answered`."""
        due = self._list_due_sets(request)
        return [each for number in due for each in self._plan(number, request.questions) if each.seed not in answered]

    def list_all(self) -> list[PlannedAnswer]:
        """List the answers of all evaluations of the run."""
        return [each for number in range(len(self._counts)) for each in self._plan(number, self._counts[number])]

    def _list_due_sets(self, request: EvaluationRequested) -> list[int]:
        """List the sets of the evaluation, or all sets at the start and at the end."""
        numbers = range(len(self._counts))
        if not request.label.startswith("step_") or not self._has_own_intervals:
            return list(numbers)
        return [each for each in numbers if self._intervals[each] and request.version % self._intervals[each] == 0]

    @property
    def _has_own_intervals(self) -> bool:
        """True if the sets have different intervals; with equal intervals, each evaluation has all sets."""
        return len(set(self._intervals)) > 1

    def _plan(self, number: int, wanted: int) -> Iterator[PlannedAnswer]:
        each, first = self._sets[number], sum(self._counts[:number])
        for place in range(min(wanted, each.questions, self._counts[number])):
            for sample in range(each.samples):
                seed = self._compute_seed(each, first + place, place, sample)
                yield PlannedAnswer(first + place, each.name, place, sample, seed)

    def _compute_seed(self, each: EvaluationSetConfig, index: int, place: int, sample: int) -> int:
        question = (mix(*each.name.encode()), place) if each.name else (index,)
        return mix(self._seed, EVALUATE, *question, *((sample,) if sample else ()))
