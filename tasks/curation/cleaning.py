"""Removes the rows that training cannot use, and names the reason for each row: `asterism data clean`.

The program reads the file up to three times: to decide, to compare the texts of similar questions (if any), and to
write. So memory holds some 150 bytes per row and no texts.
"""

import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from asterism.configs.atomic_write import replacing_file
from asterism.configs.errors import UnusableInput
from asterism.engine.data.data_files import BadRows, DatasetError, DatasetRow, read_rows
from asterism.engine.data.datasets import QUESTION_COLUMNS, DatasetProblem, parse_problem
from asterism.tasks.curation.answer_check import AnswerKind, is_answer_of_kind
from asterism.tasks.curation.duplicate_index import (
    ContainedQuestions,
    DuplicateIndex,
    QuestionFeatures,
    compute_features,
)
from asterism.tasks.curation.question_text import QuestionText, compute_similarity, parse_question

Reason = Literal["unusable", "answer", "unverifiable", "duplicate", "conflicting", "near_duplicate", "overlap"]

OUTPUT_COLUMNS = ("question", "answer", "source")
_NOT_INDEXED = -1
_CHUNK_ROWS = 4096
_MAX_WORKERS = 8


class CleanOptions(NamedTuple):
    answers: AnswerKind = "integer"
    similarity: float = 0.6  # least Jaccard index of near-duplicates
    tests: tuple[Path, ...] = ()  # evaluation sets that training may not contain
    max_bad_rows: int = 100
    kept_columns: tuple[str, ...] = ()


class RemovedRow(msgspec.Struct, frozen=True, omit_defaults=True):
    row: str  # FILE:ROW
    reason: Reason
    of: str = ""  # FILE:ROW of the question that the row repeats
    similarity: float = 0.0
    detail: str = ""
    question: str = ""


class CleanReport(msgspec.Struct):
    num_rows: int = 0
    num_kept: int = 0
    num_unwrapped: int = 0  # kept rows without the instruction of a published data set
    num_removed: dict[Reason, int] = {}


class _Decision(NamedTuple):
    reason: Reason
    of: int = _NOT_INDEXED  # number of the repeated question in the index
    similarity: float = 0.0


FindUnreadable = Callable[[Collection[str]], Collection[str]]  # returns the answers that the verifier cannot parse


def clean_questions(
    source: Path, output: Path, removed: Path, options: CleanOptions, find_unreadable: FindUnreadable
) -> CleanReport:
    """Write kept rows to `output`, and a RemovedRow for each other row to `removed`.

    Raises DatasetError for an unusable file, and UnusableInput for more than `max_bad_rows` unusable rows, or for a
    column in `kept_columns` that no row has.
    """
    scan = _Scan(source, options)
    scan.read_tests()
    scan.read_source()
    scan.remove_unreadable(find_unreadable)
    scan.remove_repeats()
    scan.remove_similar()
    return scan.write(output, removed)


# ---------------------------------------------------------------- in worker processes

_contained = ContainedQuestions()


class _Chunk(NamedTuple):
    features: QuestionFeatures
    overlaps: list[tuple[int, int, float]]  # place in the chunk, number of the test question, similarity


def _start_worker(contained: ContainedQuestions) -> None:
    global _contained
    _contained = contained


def _analyze(questions: Sequence[str], answers: Sequence[str]) -> _Chunk:
    texts = [parse_question(question) for question in questions]
    found = ((place, _contained.find(text)) for place, text in enumerate(texts))
    overlaps = [(place, *overlap) for place, overlap in found if overlap is not None]
    return _Chunk(compute_features(texts, answers), overlaps)


# ---------------------------------------------------------------- in the main process


class _Scan:
    """One cleaning. Rows of the source have ordinals from 0; indexed questions have numbers, test questions first."""

    def __init__(self, source: Path, options: CleanOptions) -> None:
        self._source = source
        self._options = options
        self._columns = (*QUESTION_COLUMNS, *options.kept_columns)
        self._absent_columns = set(options.kept_columns)  # columns that no row so far has
        self._index = DuplicateIndex()
        self._contained = ContainedQuestions()
        self._test_names: list[str] = []
        self._test_texts: list[QuestionText] = []
        self._ordinals: list[int] = []  # ordinals of the indexed rows
        self._num_analyzed = 0  # indexed rows with computed features
        self._decisions: dict[int, _Decision] = {}  # by ordinal
        self._unchecked_answers: dict[
            str, list[int]
        ] = {}  # ordinals of rows by answer; only answers that are no numbers

    def read_tests(self) -> None:
        problems = [parse_problem(row) for path in self._options.tests for row in read_rows(path, QUESTION_COLUMNS)]
        self._test_names = [problem.name for problem in problems]
        self._test_texts = [parse_question(problem.question) for problem in problems]
        for text in self._test_texts:
            self._contained.add(text)
        if problems:
            self._index.add(compute_features(self._test_texts, [problem.ground_truth for problem in problems]))

    def read_source(self) -> None:
        """Read the source, and analyze the texts in one worker process for each core."""
        num_workers = min(len(os.sched_getaffinity(0)), _MAX_WORKERS)
        context = multiprocessing.get_context("spawn")  # a fork would copy the locks of polars' threads
        with ProcessPoolExecutor(num_workers, context, _start_worker, (self._contained,)) as workers:
            waiting: deque[Future[_Chunk]] = deque()
            for problems in _iter_chunks(self._iterate_eligible()):
                if len(waiting) == 2 * num_workers:
                    self._add_chunk(waiting.popleft().result())
                questions, answers = zip(*((each.question, each.ground_truth) for each in problems), strict=True)
                waiting.append(workers.submit(_analyze, questions, answers))
            for each in waiting:
                self._add_chunk(each.result())
        if self._absent_columns:
            raise UnusableInput(f"--keep {min(self._absent_columns)}: no row has this column")

    def _iterate_eligible(self) -> Iterator[DatasetProblem]:
        """Yield problems with an answer of the wanted kind."""
        for ordinal, problem in self._iterate_problems(BadRows(self._options.max_bad_rows, "--max-bad-rows")):
            if not is_answer_of_kind(problem.ground_truth, self._options.answers):
                self._decisions[ordinal] = _Decision("answer")
                continue
            self._absent_columns -= problem.fields.keys()
            if not is_answer_of_kind(problem.ground_truth, "number"):
                self._unchecked_answers.setdefault(problem.ground_truth, []).append(ordinal)
            self._ordinals.append(ordinal)
            yield problem

    def _add_chunk(self, chunk: _Chunk) -> None:
        for place, of, similarity in chunk.overlaps:
            self._decisions[self._ordinals[self._num_analyzed + place]] = _Decision("overlap", of, similarity)
        self._num_analyzed += len(chunk.features.bands)
        self._index.add(chunk.features)

    def remove_unreadable(self, find_unreadable: FindUnreadable) -> None:
        for answer in find_unreadable(self._unchecked_answers.keys()) if self._unchecked_answers else ():
            for ordinal in self._unchecked_answers[answer]:
                self._decisions.setdefault(ordinal, _Decision("unverifiable"))

    def remove_repeats(self) -> None:
        """Remove repeats of test questions and of rows that no earlier check removed."""
        same, conflicting = self._index.find_repeats(self._list_decided(), len(self._test_names))
        reasons: tuple[Reason, Reason] = ("duplicate", "conflicting")
        for reason, repeats in zip(reasons, (same, conflicting), strict=True):
            for row, of in repeats:
                if row >= len(self._test_names):
                    is_test = of < len(self._test_names)
                    self._decide(row, _Decision("overlap" if is_test else reason, of, 1.0))

    def remove_similar(self) -> None:
        """Remove the later row of a similar pair if the earlier row stays."""
        num_tests = len(self._test_names)
        candidates = self._index.find_candidates(self._list_decided(), num_tests)
        texts = self._read_texts({row for pair in candidates for row in pair})
        for row, of in sorted(candidates):
            is_removed = of >= num_tests and self._ordinals[of - num_tests] in self._decisions
            similarity = compute_similarity(texts[row], texts[of])
            if not is_removed and similarity >= self._options.similarity:
                self._decide(row, _Decision("overlap" if of < num_tests else "near_duplicate", of, similarity))

    def write(self, output: Path, removed: Path) -> CleanReport:
        report = CleanReport()
        bad_rows = BadRows(self._options.max_bad_rows, "--max-bad-rows")
        referenced = {decision.of for decision in self._decisions.values()}
        names = dict(enumerate(self._test_names))
        numbers = {ordinal: number for number, ordinal in self._iterate_indexed(referenced)}
        encoder = msgspec.json.Encoder(enc_hook=str)
        with replacing_file(output) as kept_file, replacing_file(removed) as removed_file:
            for ordinal, problem in self._iterate_problems(bad_rows):
                report.num_rows += 1
                if (number := numbers.get(ordinal)) is not None:
                    names[number] = problem.name
                if (decision := self._decisions.get(ordinal)) is None:
                    report.num_unwrapped += problem.was_wrapped
                    kept_file.write(encoder.encode(self._make_row(problem)) + b"\n")
                    report.num_kept += 1
                    continue
                detail = problem.ground_truth if decision.reason in ("answer", "unverifiable") else ""
                of = names.get(decision.of, "")
                row = RemovedRow(
                    problem.name, decision.reason, of, round(decision.similarity, 3), detail, problem.question
                )
                removed_file.write(encoder.encode(row) + b"\n")
                report.num_removed[decision.reason] = report.num_removed.get(decision.reason, 0) + 1
            for error in bad_rows.errors:
                removed_file.write(encoder.encode(RemovedRow("", "unusable", detail=str(error))) + b"\n")
        if bad_rows.errors:
            report.num_rows += len(bad_rows.errors)
            report.num_removed["unusable"] = len(bad_rows.errors)
        return report

    def _list_decided(self) -> NDArray[np.bool_]:
        """Return whether each indexed question is removed, by number in the index."""
        decided = np.zeros(len(self._test_names) + len(self._ordinals), dtype=np.bool_)
        decided[len(self._test_names) :] = [ordinal in self._decisions for ordinal in self._ordinals]
        return decided

    def _decide(self, row: int, decision: _Decision) -> None:
        """Store the decision, unless the row already has one."""
        self._decisions.setdefault(self._ordinals[row - len(self._test_names)], decision)

    def _iterate_indexed(self, numbers: Collection[int]) -> Iterator[tuple[int, int]]:
        """Yield (number in the index, ordinal) of rows of the source."""
        for number in numbers:
            if number >= len(self._test_names):
                yield number, self._ordinals[number - len(self._test_names)]

    def _read_texts(self, numbers: Collection[int]) -> dict[int, QuestionText]:
        texts = {number: self._test_texts[number] for number in numbers if number < len(self._test_names)}
        wanted = {ordinal: number for number, ordinal in self._iterate_indexed(numbers)}
        if wanted:
            for ordinal, row in self._iterate_rows(BadRows(self._options.max_bad_rows, "--max-bad-rows")):
                if (number := wanted.get(ordinal)) is not None:
                    texts[number] = parse_question(parse_problem(row).question)
        return texts

    def _iterate_problems(self, bad_rows: BadRows) -> Iterator[tuple[int, DatasetProblem]]:
        for ordinal, row in self._iterate_rows(bad_rows):
            try:
                problem = parse_problem(row)
            except DatasetError as error:
                bad_rows.add(error)
            else:
                yield ordinal, problem

    def _iterate_rows(self, bad_rows: BadRows) -> Iterator[tuple[int, DatasetRow]]:
        return enumerate(read_rows(self._source, self._columns, bad_rows))

    def _make_row(self, problem: DatasetProblem) -> dict[str, object]:
        row: dict[str, object] = dict(
            zip(OUTPUT_COLUMNS, (problem.question, problem.ground_truth, problem.name), strict=True)
        )
        return row | {name: problem.fields[name] for name in self._options.kept_columns if name in problem.fields}


def _iter_chunks(problems: Iterator[DatasetProblem]) -> Iterator[list[DatasetProblem]]:
    while chunk := list(islice(problems, _CHUNK_ROWS)):
        yield chunk
