"""Tests of the tensors in the learner's collectives, on one and on two gloo ranks."""

import json
from pathlib import Path

import pytest

from tests.engine.learner.rank_processes import run_ranks

pytestmark = pytest.mark.slow


def run_guarded(ranks: int, out: Path, *defect: str) -> list[dict[str, object]]:
    run_ranks(ranks, "guarded_collectives", ranks, str(out), *defect)
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_reduced_tensor_derives_from_the_parameters_and_has_elements(ranks: int, tmp_path: Path) -> None:
    reports = run_guarded(ranks, tmp_path)
    assert [report["violations"] for report in reports] == [[]] * ranks
    assert all(report["sent"] for report in reports)


def test_an_empty_tensor_without_origin_is_found(tmp_path: Path) -> None:
    (report,) = run_guarded(1, tmp_path, "maxima")
    assert report["violations"] == ["all_reduce of (0,)"]
