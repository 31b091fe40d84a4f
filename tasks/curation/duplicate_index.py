"""Finds repeated and nearly equal questions among millions, with some 150 bytes per question.

Two questions are nearly equal if at least `threshold` of their adjacent word pairs agree (Jaccard index), they contain
the same numbers, and their answers are equal: a template with other numbers is another question. MinHash signatures, in
bands, find the candidates (Broder 1997; Leskovec, Rajaraman and Ullman, Mining of Massive Datasets, section 3.4.1). The
caller compares the texts of the candidates. A pair at the default threshold 0.6 is a candidate with probability 0.995.
"""

import importlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from asterism.tasks.curation.question_text import QuestionText

_BANDS, _BAND_ROWS = 12, 2
_SEED = 20_251_126  # seed of the permutations
_MIX = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: Fibonacci hashing

Keys = NDArray[np.uint64]


class Repeat(NamedTuple):
    row: int
    of: int  # an earlier row


class QuestionFeatures(NamedTuple):
    """The features of N questions for comparisons."""

    digests: Keys  # [4, N]: digests of words, answer, numbers and plain text
    bands: Keys  # [N, bands]: bands of the MinHash signature


def compute_features(questions: Sequence[QuestionText], answers: Sequence[str]) -> QuestionFeatures:
    minhash: Any = importlib.import_module("rensa").RMinHash
    shingles = [list(question.shingles) for question in questions]
    signatures = np.array(minhash.digests_from_token_sets(shingles, _BANDS * _BAND_ROWS, _SEED), dtype=np.uint64)
    signatures = signatures.reshape(len(questions), _BANDS, _BAND_ROWS)
    words = (" ".join(question.words) for question in questions)
    numbers = (" ".join(question.numbers) for question in questions)
    plain = (question.plain for question in questions)
    compared = (words, answers, numbers, plain)
    digests = np.array([[_digest(text) for text in texts] for texts in compared], dtype=np.uint64)
    return QuestionFeatures(digests, signatures[:, :, 0] << np.uint64(32) | signatures[:, :, 1])


def _digest(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass"))


class DuplicateIndex:
    """An index of questions. The rows have numbers in the order of `add`."""

    def __init__(self) -> None:
        self._digests: list[Keys] = [np.empty((4, 0), np.uint64)]
        self._bands: list[Keys] = [np.empty((0, _BANDS), np.uint64)]

    def add(self, features: QuestionFeatures) -> None:
        self._digests.append(features.digests)
        self._bands.append(features.bands)

    def find_repeats(self, excluded: NDArray[np.bool_], num_tests: int) -> tuple[list[Repeat], list[Repeat]]:
        """Return the rows that repeat question and answer of an earlier row, and the rows that repeat a question with
        another answer, both without `excluded` rows.

        With different answers, only equal plain texts are the same question, because 5! and 5 have equal words. Repeats
        of the first `num_tests` rows are an exception: equal words suffice.
        """
        rows = np.flatnonzero(~excluded)
        words, answer, _, plain = np.concatenate(self._digests, axis=1)[:, rows]
        places = np.arange(len(rows))
        first, same = _find_first(words), _find_first(_combine(words, answer))
        first = np.where(rows[first] < num_tests, first, _find_first(plain))

        def list_repeats(found: NDArray[np.bool_], earlier: NDArray[np.int64]) -> list[Repeat]:
            return [Repeat(int(rows[place]), int(rows[earlier[place]])) for place in np.flatnonzero(found)]

        return list_repeats(same != places, same), list_repeats((first != places) & (same == places), first)

    def find_candidates(self, excluded: NDArray[np.bool_], num_tests: int) -> set[Repeat]:
        """Return the pairs that can be nearly equal, without `excluded` rows. The first `num_tests` rows are test
        questions. The answers of a pair with a test question can differ. No pair consists of two test questions."""
        _, answer, numbers, _ = np.concatenate(self._digests, axis=1)
        bands = np.concatenate(self._bands)
        rows = np.flatnonzero(~excluded)
        among_rows = rows[rows >= num_tests]
        candidates: set[Repeat] = set()
        for band in range(_BANDS):
            keys = _combine(bands[:, band], numbers)
            if num_tests:
                candidates |= {pair for pair in _pair_equal(keys, rows) if pair.of < num_tests <= pair.row}
            candidates |= set(_pair_equal(_combine(keys, answer), among_rows))
        return candidates


def _combine(one: Keys, other: Keys) -> Keys:
    return (one ^ (other * _MIX)) * _MIX  # modulo 2^64


def _find_first(keys: Keys) -> NDArray[np.int64]:
    """Return, for each row, the first row with the same key."""
    _, first, inverse = np.unique(keys, return_index=True, return_inverse=True)
    return first[inverse].astype(np.int64)


def _pair_equal(keys: Keys, rows: NDArray[np.int64]) -> Iterator[Repeat]:
    """Pair each row only with the first and the previous row of the same key: all pairs would be too many."""
    order = rows[np.argsort(keys[rows], kind="stable")]
    if len(order) < 2:
        return
    begins = np.concatenate(([True], keys[order[1:]] != keys[order[:-1]]))
    starts = np.maximum.accumulate(np.where(begins, np.arange(len(order)), 0))
    for place in np.flatnonzero(~begins):
        yield Repeat(int(order[place]), int(order[starts[place]]))
        if starts[place] != place - 1:
            yield Repeat(int(order[place]), int(order[place - 1]))


class ContainedQuestions:
    """Finds the questions of test sets in longer or changed texts, by half of their eight-word sequences and their
    numbers.

    Shorter questions are too general for this search; DuplicateIndex finds them as whole questions.
    """

    _NGRAM_WORDS, _MIN_SHARE = 8, 0.5

    def __init__(self) -> None:
        self._questions_by_ngram: dict[tuple[str, ...], list[int]] = {}
        self._numbers: list[Counter[str]] = []
        self._num_ngrams: list[int] = []

    def add(self, question: QuestionText) -> None:
        ngrams = question.list_ngrams(self._NGRAM_WORDS)
        for ngram in ngrams:
            self._questions_by_ngram.setdefault(ngram, []).append(len(self._numbers))
        self._numbers.append(Counter(question.numbers))
        self._num_ngrams.append(len(ngrams))

    def find(self, text: QuestionText) -> tuple[int, float] | None:
        """Return a contained question, as its number in the order of `add` and the share of its sequences, or None."""
        if not self._questions_by_ngram:
            return None
        ngrams = text.list_ngrams(self._NGRAM_WORDS) & self._questions_by_ngram.keys()
        counts = Counter(number for ngram in ngrams for number in self._questions_by_ngram[ngram])
        for number, count in counts.most_common():
            share = count / self._num_ngrams[number]
            if share >= self._MIN_SHARE and self._numbers[number] <= Counter(text.numbers):
                return number, share
        return None
