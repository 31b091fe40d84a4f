"""Computes the result of one evaluation on one set of questions, from its answers."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from asterism.analysis.evaluation.answer_records import AnswerRecord
from asterism.analysis.evaluation.answer_statistics import (
    LengthStatistics,
    Vote,
    compute_bootstrap_interval,
    compute_lengths,
    compute_majority,
    compute_mean,
    compute_pass_at_k,
    compute_standard_error,
    list_powers,
)


class EvaluatedQuestion(msgspec.Struct, frozen=True):
    """A question with all its answers, or without answers if its prompt is over the limit."""

    name: str
    answers: tuple[AnswerRecord, ...] = ()
    difficulty: str = ""  # difficulty in the question's row; empty: unknown

    @property
    def results(self) -> list[AnswerRecord]:
        """Answers that no infrastructure failure ended."""
        return [each for each in self.answers if not each.is_failed]

    @property
    def is_over_limit(self) -> bool:
        return not self.answers

    @property
    def has_result(self) -> bool:
        return self.is_over_limit or bool(self.results)

    @property
    def score(self) -> float:
        """Share of correct answers, or 0 for a prompt over the limit, which no answer can solve."""
        return _compute_accuracy(self.results)

    def compute_pass_at_k(self, k: int) -> float | None:
        """Return None with fewer than k results."""
        if self.is_over_limit:
            return 0.0
        results = self.results
        return compute_pass_at_k(len(results), sum(each.correct for each in results), k) if k <= len(results) else None

    def compute_majority(self) -> float:
        return compute_majority([Vote(each.answer or "", each.correct) for each in self.results])


class SetResult(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of a set; docs/evaluation.md defines each. Shares are in [0, 1]; an undefined value is None."""

    samples: int  # requested samples per question
    questions: int  # all questions, including those over the limit or without a result
    questions_over_limit: int  # questions not asked: the prompt exceeds dialogue.prompt_tokens; counted as wrong
    questions_without_result: int  # questions with failed answers only: not in the means
    answers: int  # answers with a result
    correct: int
    truncated: int  # wrong answers at the length limit
    failed: int  # answers that infrastructure failures ended
    failures: dict[str, int]  # number of failures by component
    avg: float | None  # avg@k
    avg_failed_as_wrong: float | None  # avg@k with failed answers counted as wrong: a lower bound
    standard_error: float | None  # standard error of avg, clustered by question
    interval: tuple[float, float] | None  # interval of avg, by bootstrap over questions
    standard_error_runs: float | None  # standard error of avg over runs: sample s of all questions is run s
    reward: float | None  # mean reward over questions
    pass_at_k: dict[int, float]  # pass@k over the questions with at least k results
    majority: float | None  # majority@k; None for an environment or a dialogue
    unanswered_share: float | None  # share of answers without an extracted text; None for an environment or a dialogue
    truncated_share: float | None  # share of answers at the length limit
    endings: dict[str, int]
    response_tokens: LengthStatistics | None
    turns: float | None  # mean number of turns per answer
    calls: float | None
    call_error_share: float | None  # share of calls with an error
    seconds: float  # sum of the answers' durations


def group_questions(
    records: Sequence[AnswerRecord], difficulties: Mapping[str, str] | None = None, over_limit: Sequence[str] = ()
) -> list[EvaluatedQuestion]:
    """Group the sorted records of one set by question. `over_limit`: names of questions with too long prompts."""
    by_name: dict[str, list[AnswerRecord]] = defaultdict(list)
    for record in records:
        by_name[record.question].append(record)
    known = difficulties or {}
    asked = [EvaluatedQuestion(name, tuple(answers), known.get(name, "")) for name, answers in by_name.items()]
    return [*asked, *(EvaluatedQuestion(name, (), known.get(name, "")) for name in over_limit)]


def compute_set_result(questions: Sequence[EvaluatedQuestion], samples: int, seed: int = 0) -> SetResult:
    """Compute the result of a set. `seed` is the seed of the bootstrap."""
    answers = [each for question in questions for each in question.answers]
    results = [each for each in answers if not each.is_failed]
    judged = [question for question in questions if question.has_result]
    has_votes = not results or any(each.answer is not None for each in results)
    scores, calls = [each.score for each in judged], sum(each.calls for each in results)
    return SetResult(
        samples=samples,
        questions=len(questions),
        questions_over_limit=sum(each.is_over_limit for each in questions),
        questions_without_result=len(questions) - len(judged),
        answers=len(results),
        correct=sum(each.correct for each in results),
        truncated=sum(each.ending == "length" and not each.correct for each in results),
        failed=len(answers) - len(results),
        failures=_count(each.cause.partition(":")[0] for each in answers if each.is_failed),
        avg=compute_mean(scores),
        avg_failed_as_wrong=compute_mean([_compute_accuracy(each.answers) for each in questions]),
        standard_error=compute_standard_error(scores),
        interval=compute_bootstrap_interval(scores, seed),
        standard_error_runs=compute_standard_error(_list_run_means(judged, samples)),
        reward=compute_mean([compute_mean([answer.reward for answer in each.results]) or 0.0 for each in judged]),
        pass_at_k={k: mean for k in list_powers(samples) if (mean := _compute_mean_pass(judged, k)) is not None},
        majority=compute_mean([each.compute_majority() for each in judged]) if has_votes else None,
        unanswered_share=compute_mean([float(not each.answer) for each in results]) if has_votes else None,
        truncated_share=compute_mean([float(each.ending == "length") for each in results]),
        endings=_count(each.ending for each in results),
        response_tokens=compute_lengths(each.response_tokens for each in results),
        turns=compute_mean([float(each.turns) for each in results]),
        calls=compute_mean([float(each.calls) for each in results]),
        call_error_share=sum(each.calls_failed for each in results) / calls if calls else None,
        seconds=sum(each.seconds for each in results),
    )


def split_by_difficulty(questions: Sequence[EvaluatedQuestion]) -> dict[str, list[EvaluatedQuestion]]:
    """Return the questions by difficulty, as `sort_levels` sorts them; questions of unknown difficulty are left out."""
    levels: dict[str, list[EvaluatedQuestion]] = defaultdict(list)
    for question in questions:
        if question.difficulty:
            levels[question.difficulty].append(question)
    return {level: levels[level] for level in sort_levels(levels)}


def sort_levels(levels: Iterable[str]) -> list[str]:
    """Sort numeric levels by value, and other texts after them."""
    return sorted(levels, key=lambda level: (_to_number(level), level))


def compute_metrics(name: str, result: SetResult) -> dict[str, float]:
    """Return the defined values for metrics.jsonl, by "set NAME: KEY"."""
    k = result.samples
    values: dict[str, Any] = {
        f"avg@{k}": result.avg,
        **{f"pass@{each}": value for each, value in result.pass_at_k.items()},
        f"majority@{k}": result.majority,
        "standard_error": result.standard_error,
        "unanswered_share": result.unanswered_share,
        "truncated_share": result.truncated_share,
        "tool_errors": result.call_error_share,
    }
    return {f"set {name}: {key}": float(value) for key, value in values.items() if value is not None}


def _compute_accuracy(answers: Sequence[AnswerRecord]) -> float:
    return compute_mean([float(each.correct) for each in answers]) or 0.0


def _list_run_means(questions: Sequence[EvaluatedQuestion], samples: int) -> list[float]:
    """Return the mean of each sample over questions with results of all samples. A prompt over the limit counts 0."""
    complete = [[each.correct for each in question.results] for question in questions if not question.is_over_limit]
    complete = [correct for correct in complete if len(correct) == samples]
    num_over_limit = sum(question.is_over_limit for question in questions)
    total = len(complete) + num_over_limit
    return [sum(correct[sample] for correct in complete) / total for sample in range(samples)] if complete else []


def _compute_mean_pass(questions: Sequence[EvaluatedQuestion], k: int) -> float | None:
    found = [each.compute_pass_at_k(k) for each in questions]
    return compute_mean([value for value in found if value is not None])


def _count(names: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(names).items()))


def _to_number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("inf")
