"""Statistics of k answers per question: avg@k, pass@k, majority@k, standard errors and bootstrap intervals.

    avg@k       mean over questions of the share of correct answers
    pass@k      probability that at least one of k answers is correct, unbiased from n >= k answers
    majority@k  probability that the most frequent answer is correct

Answers that an infrastructure failure ended have no result: they do not count and reduce n.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from fractions import Fraction
from math import comb, sqrt
from typing import NamedTuple

import msgspec
import numpy as np

BOOTSTRAP_DRAWS = 2000
INTERVAL = 0.95
_SPACES = re.compile(r"\s+|\\[,;:! ]|\\left|\\right|\$")
_FRACTIONS = re.compile(r"\\[dt]frac")


def compute_pass_at_k(num_answers: int, num_correct: int, k: int) -> float:
    """Compute 1 - C(n - c, k) / C(n, k), for k <= n (Chen et al., arXiv 2107.03374, eq. 1)."""
    if not 0 < k <= num_answers:
        raise ValueError(f"pass@{k} needs at least {k} answers, not {num_answers}")
    return float(1 - Fraction(comb(num_answers - num_correct, k), comb(num_answers, k)))


class Vote(NamedTuple):
    answer: str  # empty: no vote
    correct: bool


def compute_majority(votes: Sequence[Vote]) -> float:
    """Return the share of correct answers among the most frequent ones, or 0 if no answer was extracted.

    Correct answers are one class: the verifier has found each equal to the gold answer. Other answers are equal if their
    normalized texts are. A tie counts with the share of correct classes in it, which is the expectation of a random choice.
    """
    counts: dict[str | None, int] = defaultdict(int)  # None: correct
    for vote in votes:
        if vote.answer:
            counts[None if vote.correct else normalize_answer(vote.answer)] += 1
    highest = max(counts.values(), default=0)
    tied = [each for each, count in counts.items() if count == highest]
    return (None in tied) / len(tied) if tied else 0.0


def normalize_answer(text: str) -> str:
    """Remove spaces, dollar signs, bracket sizes and a final period; unify fractions; write 1,234 as 1234."""
    text = _FRACTIONS.sub(r"\\frac", _SPACES.sub("", text)).rstrip(".")
    return text.replace(",", "") if re.fullmatch(r"[-+]?\d{1,3}(,\d{3})+(\.\d+)?", text) else text


def list_powers(samples: int) -> list[int]:
    """Return 1, 2, 4, ... up to the number of samples, which is always the last element."""
    powers = [1 << exponent for exponent in range(samples.bit_length())]
    return [*powers, *([samples] if samples != powers[-1] else [])]


def compute_mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def compute_standard_error(values: Sequence[float]) -> float | None:
    """Return the standard error of the mean, from the sample variance, or None for fewer than two values.

    Applied to means of questions, the error is clustered by question: answers to one question are not independent.
    """
    if len(values) < 2:
        return None
    mean = sum(values) / len(values)
    return sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1) / len(values))


def compute_bootstrap_interval(values: Sequence[float], seed: int) -> tuple[float, float] | None:
    """Return the percentile interval of the mean with the coverage INTERVAL, from BOOTSTRAP_DRAWS resamples."""
    if not values:
        return None
    random, sample = np.random.default_rng(seed), np.asarray(values, np.float64)
    means = [sample[random.integers(0, len(sample), len(sample))].mean() for _ in range(BOOTSTRAP_DRAWS)]
    low, high = np.quantile(means, [(1 - INTERVAL) / 2, (1 + INTERVAL) / 2])
    return float(low), float(high)


class LengthStatistics(msgspec.Struct, frozen=True):
    """Statistics of lengths in tokens."""

    mean: float
    median: float
    p90: float
    max: float


def compute_lengths(lengths: Iterable[int]) -> LengthStatistics | None:
    values = np.asarray(list(lengths), np.float64)
    if not values.size:
        return None
    return LengthStatistics(float(values.mean()), *(float(each) for each in np.quantile(values, [0.5, 0.9, 1.0])))
