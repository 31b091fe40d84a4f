"""`answers.jsonl` has one line per answer of the run's evaluations, appended when the answer ends.

A kill can tear the last line; a reader ignores it, and the next launch removes it. An answer can have two lines: one
after its first infrastructure failure, and one with its result, which counts.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import msgspec
from msgspec.structs import replace

from asterism.bus.messages import Ending
from asterism.configs.errors import UnusableInput
from asterism.configs.file_manifest import check_file

Line = TypeVar("Line")
AnswerEnding = Literal[Ending, "failed"]  # failed: an infrastructure failure ended the answer; it has no result


class AnswerTurn(NamedTuple):
    role: Literal["assistant", "environment"]  # environment: results of tools, and the texts around them
    text: str  # text with special tokens
    tokens: int


class AnswerRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    label: str  # label of the evaluation
    version: int  # version of the weights that the evaluation requested
    set: str  # name of the set; empty without [[evaluation.sets]]
    task: str = ""  # name of the task, as in StartGroup
    place: int  # index of the question in its set
    question: str  # name of the question, FILE:ROW
    sample: int  # index of the sample, from 0
    seed: int  # seed of the answer's group of trajectories: identifies the answer in its evaluation
    trajectory: int = -1  # number in the event log, from 0 after each --resume; -1: a log of an earlier Asterism
    gold: str
    ending: AnswerEnding
    cause: str = ""  # cause of the failure
    answer: str | None = ""  # extracted answer; empty: none found; None: the task is an environment or a dialogue
    correct: bool = False  # whether evaluation.success holds
    reward: float = 0.0
    components: dict[str, float] = {}  # components of the reward
    turns: int = 0
    calls: int = 0
    calls_failed: int = 0
    prompt_tokens: int = 0
    response_tokens: int = 0  # generated and tool tokens
    generated_tokens: int = 0
    seconds: float = 0.0  # duration of the trajectory
    digest: str = ""  # blake2b digest of all token ids, 8 bytes
    dialogue: tuple[AnswerTurn, ...] = ()  # the response; only in a run of `asterism eval`

    @property
    def key(self) -> tuple[str, int, int]:
        return self.label, self.version, self.seed

    @property
    def is_failed(self) -> bool:
        return self.ending == "failed"


def read_answers(path: Path) -> list[AnswerRecord]:
    """Read each answer once, sorted, without its dialogue; a later result replaces a failure. Raises UnusableInput."""
    by_key: dict[tuple[str, int, int], AnswerRecord] = {}
    for record in iter_answers(path):
        known = by_key.get(record.key)
        if known is None or known.is_failed:
            by_key[record.key] = replace(record, dialogue=())
    return sort_answers(by_key.values())


def iter_answers(path: Path) -> Iterator[AnswerRecord]:
    """Yield the record of each complete line. Raises UnusableInput for a damaged line."""
    for number, line in enumerate(iter_complete_lines(path), 1):
        yield parse_line(path, number, line, AnswerRecord)


def parse_line(path: Path, number: int, line: bytes, kind: type[Line]) -> Line:
    """Decode one line. Raises UnusableInput if it is damaged."""
    try:
        return msgspec.json.decode(line, type=kind)
    except msgspec.MsgspecError as error:
        raise UnusableInput(f"{path}: line {number}: {error}") from None


def iter_complete_lines(path: Path) -> Iterator[bytes]:
    """Yield the file's lines, except a last line that a kill has torn."""
    if path.exists():
        check_file(path)
        with path.open("rb") as file:
            yield from (line for line in file if line.endswith(b"\n"))


def cut_torn_line(path: Path) -> None:
    """Create the file, or remove a torn last line, so that the next line is appended after a complete one."""
    size = sum(map(len, iter_complete_lines(path)))
    with path.open("ab") as file:
        file.truncate(size)


def sort_answers(records: Iterable[AnswerRecord]) -> list[AnswerRecord]:
    """Sort by evaluation, set, question and sample: the order in which answers end does not matter."""
    return sorted(records, key=lambda each: (each.label, each.version, each.set, each.place, each.sample))
