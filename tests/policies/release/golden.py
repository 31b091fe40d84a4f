"""The golden rows of rStar2-Agent's public release, and the rows that docs/release.md lists as different.

The release (microsoft/rStar, commit ecbfb943, with its pinned submodules) computed the values for synthetic texts.
"""

import re
from fractions import Fraction
from pathlib import Path
from typing import Any

import msgspec

from asterism.bus.messages import ReleaseCounts, TrajectoryFinished
from asterism.configs.schema.algorithm import RocConfig
from tests.policies.groups.finished import finished

FOLDER = Path(__file__).parent
PAGE = Path(__file__).parents[3] / "docs" / "release.md"
_ROW_ID = re.compile(r"`((?:[a-z_]+|reward|group|batch)-\d+)`")


class Dialogue(msgspec.Struct, frozen=True):
    id: str
    ground_truth: str
    response_text: str  # text after the prompt
    turns: tuple[tuple[int, int], ...]  # start and end of each generated turn in response_text
    max_turns: int
    max_calls: int  # maximum number of calls per turn
    parsed: tuple[int, ...]  # number of parsed calls of each turn
    malformed: tuple[int, ...]
    executed_calls: int
    tool_responses: int
    responses_with_error: int
    answer_spans: int
    format_turns: int
    p_err: float
    p_format: float
    reward: float


class Case(msgspec.Struct, frozen=True, array_like=True):
    """Flags of the release, and the rows that the release keeps with these flags."""

    error_ratio: bool
    answer_format: bool
    min_negatives: int
    min_positives: int
    count: int
    samples: bool
    kept: tuple[int, ...] | None
    result: str  # ok, none (for an empty batch) or AssertionError


class Group(msgspec.Struct, frozen=True):
    id: str
    rewards: tuple[float, ...]
    p_err: tuple[float, ...]
    p_format: tuple[float, ...]
    dropped: bool = False  # whether the group is dropped for equal rewards
    cases: tuple[Case, ...] = ()
    uids: tuple[str, ...] = ()  # group id of each row of a batch
    augmentation: dict[str, Any] = {}  # the flags of a batch are in the table down_sampling_config
    kept: tuple[int, ...] | None = None
    result: str = ""


def read_dialogues() -> list[Dialogue]:
    lines = (FOLDER / "golden_dialogues.jsonl").read_bytes().splitlines()
    return [msgspec.json.decode(line, type=Dialogue) for line in lines]


def read_groups() -> list[Group]:
    lines = (FOLDER / "golden_groups.jsonl").read_bytes().splitlines()
    return [msgspec.json.decode(line, type=Group) for line in lines]


def list_documented_rows(heading: str) -> set[str]:
    """List the ids below a heading of docs/release.md."""
    (section,) = (part for part in PAGE.read_text().split("\n## ") if part.startswith(f"{heading}\n"))
    return set(_ROW_ID.findall(section))


def build_trajectory(number: int, reward: float, p_err: float, p_format: float) -> TrajectoryFinished:
    """Build a trajectory whose penalties are `p_err` and `p_format` in the release's formula."""
    error, superfluous = (Fraction(share).limit_denominator(100) for share in (p_err, p_format))
    opens = 0 if p_format == 1 else superfluous.numerator + 1
    counts = ReleaseCounts(error.denominator, error.numerator, opens, opens, opens, superfluous.denominator)
    return finished(number, reward, release=counts)


def build_roc(case: Case) -> RocConfig:
    """Build the configuration of a case. A minimum of -1 becomes 0."""
    return RocConfig(
        keep=case.count,
        penalty="release",
        positives="lowest",
        negatives="first",
        error_penalty=case.error_ratio,
        format_penalty=case.answer_format,
        min_positives=max(case.min_positives, 0),
        min_negatives=max(case.min_negatives, 0),
    )
