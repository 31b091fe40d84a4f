"""`answers.jsonl`: one line per ended answer of the run's evaluations, appended when the answer ends.

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
from asterism.configs.integrity.file_manifest import check_file

Line = TypeVar("Line")
AnswerEnding = Literal[Ending, "failed"]  # failed: an infrastructure failure; the answer has no result


class AnswerTurn(NamedTuple):
    role: Literal["assistant", "environment"]  # environment: results of tools, and the texts around them
    text: str  # special tokens included
    tokens: int


class AnswerRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    label: str  # of the evaluation
    version: int  # of the weights, as the evaluation requested them
    set: str  # its name; empty without [[evaluation.sets]]
    task: str = ""  # as in StartGroup
    place: int  # of the question in its set
    question: str  # its name, FILE:ROW
    sample: int  # from 0
    seed: int  # of the answer's group of trajectories: identifies the answer in its evaluation
    trajectory: int = -1  # in the event log, from 0 after each --resume; -1: a log of an earlier Asterism
    gold: str
    ending: AnswerEnding
    cause: str = ""  # of the failure
    answer: str | None = ""  # as extracted; empty: none; None: the task is an environment or a dialogue
    correct: bool = False  # a success: evaluation.success
    reward: float = 0.0
    components: dict[str, float] = {}  # of the reward
    turns: int = 0
    calls: int = 0
    calls_failed: int = 0
    prompt_tokens: int = 0
    response_tokens: int = 0  # generated and tool tokens
    generated_tokens: int = 0
    seconds: float = 0.0  # from the start of the trajectory to its end
    digest: str = ""  # of all token ids, blake2b of 8 bytes
    dialogue: tuple[AnswerTurn, ...] = ()  # the response; only in a run of `asterism eval`

    @property
    def key(self) -> tuple[str, int, int]:
        return self.label, self.version, self.seed

    @property
    def is_failed(self) -> bool:
        return self.ending == "failed"


def read_answers(path: Path) -> list[AnswerRecord]:
    """Each answer once, sorted, without its dialogue; failed only without a later result. Raises UnusableInput."""
    by_key: dict[tuple[str, int, int], AnswerRecord] = {}
    for record in iter_answers(path):
        known = by_key.get(record.key)
        if known is None or known.is_failed:
            by_key[record.key] = replace(record, dialogue=())
    return sort_answers(by_key.values())


def iter_answers(path: Path) -> Iterator[AnswerRecord]:
    """All complete lines. Raises UnusableInput for a damaged line."""
    for number, line in enumerate(iter_complete_lines(path), 1):
        yield parse_line(path, number, line, AnswerRecord)


def parse_line(path: Path, number: int, line: bytes, kind: type[Line]) -> Line:
    """Raises UnusableInput for a damaged line."""
    try:
        return msgspec.json.decode(line, type=kind)
    except msgspec.MsgspecError as error:
        raise UnusableInput(f"{path}: line {number}: {error}") from None


def iter_complete_lines(path: Path) -> Iterator[bytes]:
    """Without a last line that a kill has torn."""
    if path.exists():
        check_file(path)
        with path.open("rb") as file:
            yield from (line for line in file if line.endswith(b"\n"))


def cut_torn_line(path: Path) -> None:
    """Create the file, or remove a last line that a kill has torn, so that the next line is appended after a whole one."""
    size = sum(map(len, iter_complete_lines(path)))
    with path.open("ab") as file:
        file.truncate(size)


def sort_answers(records: Iterable[AnswerRecord]) -> list[AnswerRecord]:
    """By name of the set, place of the question, and sample: independent of the order of ends."""
    return sorted(records, key=lambda each: (each.label, each.version, each.set, each.place, each.sample))
