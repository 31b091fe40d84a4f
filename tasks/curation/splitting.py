"""Divides a data file into training and test questions: `asterism data split`."""

import heapq
from pathlib import Path

import msgspec
import xxhash

from asterism.configs.atomic_write import replacing_file
from asterism.configs.errors import UnusableInput
from asterism.engine.data.data_files import DatasetRow, read_rows
from asterism.engine.data.datasets import parse_problem
from asterism.tasks.curation.question_text import parse_question


class SplitReport(msgspec.Struct):
    num_train: int
    num_test: int
    num_questions: int  # distinct questions


def split_questions(source: Path, train: Path, test: Path, num_test: int, seed: int) -> SplitReport:
    """Write `num_test` distinct questions to `test`, with all their copies, and the other rows to `train`, unchanged.

    The choice depends on `seed` and the words of the questions, and not on the order of the rows.
    Raises UnusableInput if too few distinct questions remain for training, and DatasetError for an unusable row.
    """
    ranks = {_rank_question(row, seed) for row in read_rows(source)}
    if num_test >= len(ranks):
        raise UnusableInput(f"--test {num_test}: {source} has only {len(ranks):,} distinct questions")
    chosen = set(heapq.nsmallest(num_test, ranks))
    report = SplitReport(0, 0, len(ranks))
    encoder = msgspec.json.Encoder(enc_hook=str)
    with replacing_file(train) as train_file, replacing_file(test) as test_file:
        for row in read_rows(source):
            is_test = _rank_question(row, seed) in chosen
            (test_file if is_test else train_file).write(encoder.encode(row.fields) + b"\n")
            report.num_test += is_test
            report.num_train += not is_test
    return report


def _rank_question(row: DatasetRow, seed: int) -> int:
    words = parse_question(parse_problem(row).question).words
    return xxhash.xxh3_64_intdigest(" ".join(words).encode("utf-8", "surrogatepass"), seed)
