from pathlib import Path

import pytest

from asterism.bus.messages import WeightsPublished
from asterism.engine.contract import EngineFailure
from asterism.engine.sglang.http_api import ParallelismInfo, RankChecksums
from asterism.engine.sglang.weights.checksums import ChecksumRegistry
from tests.engine.sglang.server.requirements import make_info

WEIGHTS = WeightsPublished(7, "/slot", 12, "0123456789abcdef0123")


def ranks(*overall: str, parts: int = 1) -> list[RankChecksums]:
    return [RankChecksums({}, each, [ParallelismInfo(number % parts, 0)]) for number, each in enumerate(overall)]


def test_a_checksum_that_differs_from_servers_with_equal_weights_is_refused(tmp_path: Path) -> None:
    first, second = (ChecksumRegistry(tmp_path / "new", name) for name in ("sglang-0", "sglang-1"))
    first.verify(WEIGHTS, make_info(), ranks("a"))
    second.verify(WEIGHTS, make_info(), ranks("a"))
    first.verify(WEIGHTS, make_info(), ranks("a"))  # a later incarnation of the server
    with pytest.raises(EngineFailure, match="sglang-0 and sglang-1 loaded the same version 7 but hold different"):
        second.verify(WEIGHTS, make_info(), ranks("b"))


@pytest.mark.parametrize(
    ("weights", "server"),
    [
        (WeightsPublished(8, "/slot", 12, WEIGHTS.digest), make_info()),
        (WeightsPublished(7, "/slot", 12, "f" * 20), make_info()),  # the learner has restarted from other weights
        (WEIGHTS, make_info(device="cuda")),
        (WEIGHTS, make_info(tp_size=2)),
    ],
    ids=["version", "digest", "device", "tp_size"],
)
def test_checksums_of_other_weights_or_layouts_are_not_compared(
    tmp_path: Path, weights: WeightsPublished, server: object
) -> None:
    ChecksumRegistry(tmp_path, "sglang-0").verify(WEIGHTS, make_info(), ranks("a"))
    ChecksumRegistry(tmp_path, "sglang-1").verify(weights, server, ranks("b"))  # pyright: ignore[reportArgumentType]


def test_all_model_replicas_of_a_server_must_have_the_same_checksum(tmp_path: Path) -> None:
    checksums = ChecksumRegistry(tmp_path, "sglang-0")
    checksums.verify(WEIGHTS, make_info(), ranks("a", "b", "a", "b", parts=2))
    with pytest.raises(EngineFailure, match=r"of one server differ after version 7: rank 3 of 4"):
        checksums.verify(WEIGHTS, make_info(), ranks("a", "b", "a", "a", parts=2))


def test_the_folder_contains_one_file_per_version(tmp_path: Path) -> None:
    for name in ("sglang-0", "sglang-1"):
        ChecksumRegistry(tmp_path, name).verify(WEIGHTS, make_info(), ranks("a"))
    assert [path.name for path in tmp_path.iterdir()] == ["7-0123456789abcdef-cpu-1"]
