from __future__ import annotations

from pathlib import Path

import pytest

from bus.messages import WeightsPublished
from engine.contract import EngineFailure
from engine.sglang.protocol import RankChecksums, RankPlace
from engine.sglang.weights.checksums import Checksums
from tests.engine.sglang.servers import info

WEIGHTS = WeightsPublished(7, "/slot", 12, "0123456789abcdef0123")


def ranks(*overall: str, parts: int = 1) -> list[RankChecksums]:
    return [RankChecksums({}, each, [RankPlace(number % parts, 0)]) for number, each in enumerate(overall)]


def test_servers_that_were_given_the_same_must_hold_the_same(tmp_path: Path) -> None:
    first, second = (Checksums(tmp_path / "new", name) for name in ("sglang-0", "sglang-1"))
    first.compare(WEIGHTS, info(), ranks("a"))
    second.compare(WEIGHTS, info(), ranks("a"))
    first.compare(WEIGHTS, info(), ranks("a"))  # another life of it
    with pytest.raises(EngineFailure, match="sglang-0 and sglang-1 were given the same version 7 and hold different"):
        second.compare(WEIGHTS, info(), ranks("b"))


@pytest.mark.parametrize(
    ("weights", "server"),
    [
        (WeightsPublished(8, "/slot", 12, WEIGHTS.digest), info()),
        (WeightsPublished(7, "/slot", 12, "f" * 20), info()),  # of a learner that has begun again from other weights
        (WEIGHTS, info(device="cuda")),
        (WEIGHTS, info(tp_size=2)),
    ],
    ids=["version", "digest", "device", "tp_size"],
)
def test_nobody_is_compared_with_who_was_given_or_computes_something_else(
    tmp_path: Path, weights: WeightsPublished, server: object
) -> None:
    Checksums(tmp_path, "sglang-0").compare(WEIGHTS, info(), ranks("a"))
    Checksums(tmp_path, "sglang-1").compare(weights, server, ranks("b"))  # pyright: ignore[reportArgumentType]


def test_the_copies_of_the_model_behind_one_server_must_hold_the_same(tmp_path: Path) -> None:
    checksums = Checksums(tmp_path, "sglang-0")
    checksums.compare(WEIGHTS, info(), ranks("a", "b", "a", "b", parts=2))
    with pytest.raises(EngineFailure, match=r"behind one server differ after version 7: rank 3 of 4"):
        checksums.compare(WEIGHTS, info(), ranks("a", "b", "a", "a", parts=2))


def test_what_is_noted_stays_alone_in_the_folder(tmp_path: Path) -> None:
    for name in ("sglang-0", "sglang-1"):
        Checksums(tmp_path, name).compare(WEIGHTS, info(), ranks("a"))
    assert [path.name for path in tmp_path.iterdir()] == ["7-0123456789abcdef-cpu-1"]
