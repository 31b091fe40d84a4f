"""Resample-on-Correct with the rules of the report (arXiv 2508.20722, section 4) and of the release."""

from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asterism.bus.messages import ReleaseCounts
from asterism.configs.schema.algorithm import RocConfig
from asterism.configs.schema.success import parse_success
from asterism.policies.groups.roc import (
    compute_class_counts,
    compute_error_penalty,
    compute_format_penalty,
    compute_penalty,
    resample,
)
from tests.policies.groups.finished import finished

REPORT = RocConfig()
RELEASE = RocConfig(penalty="release", positives="lowest", negatives="first", min_positives=2, min_negatives=2)


def test_the_error_penalty_is_the_share_of_failed_calls() -> None:
    assert compute_error_penalty(finished(0, 1.0, calls=4, failed=1), "report") == 0.25


def test_a_trajectory_without_calls_has_half_the_error_penalty() -> None:
    assert compute_error_penalty(finished(0, 1.0, calls=0), "report") == 0.5
    assert compute_error_penalty(finished(0, 1.0, calls=0), "release") == 0.5


def test_the_release_counts_results_that_contain_error_and_not_failed_calls() -> None:
    says_relative_error = finished(0, 1.0, calls=2, failed=0, responses_with_error=1)
    timed_out_in_silence = finished(0, 1.0, calls=2, failed=1, responses_with_error=0)
    assert compute_error_penalty(says_relative_error, "release") == 0.5
    assert compute_error_penalty(says_relative_error, "report") == 0.0
    assert compute_error_penalty(timed_out_in_silence, "release") == 0.0
    assert compute_error_penalty(timed_out_in_silence, "report") == 0.5


@pytest.mark.parametrize(
    ("opens", "closes", "turns", "report", "release"),
    [
        (1, 1, 2, 0.0, 0.0),
        (1, 1, 1, 0.0, 1.0),  # in the release, an answer without tools gets the full penalty
        (0, 0, 2, 1.0, 1.0),
        (2, 1, 2, 1.0, 1.0),
        (2, 2, 4, 0.25, 1 / 3),
        (9, 9, 2, 1.0, 1.0),
    ],
)
def test_answer_tags_set_the_format_penalty(opens: int, closes: int, turns: int, report: float, release: float) -> None:
    trajectory = finished(0, 1.0, opens=opens, answer_closes=closes, turns=turns)
    assert compute_format_penalty(trajectory, "report") == report
    assert compute_format_penalty(trajectory, "release") == pytest.approx(release)


def test_reversed_and_nested_answer_tags_are_a_violation_in_the_report_as_well() -> None:
    for spans in (0, 1):
        trajectory = finished(0, 1.0, opens=2, answer_spans=spans, turns=4)
        assert compute_format_penalty(trajectory, "report") == compute_format_penalty(trajectory, "release") == 1.0


def test_the_report_counts_only_tags_of_the_assistant_and_the_release_all_tags() -> None:
    counts = ReleaseCounts(4, 1, answer_opens=3, answer_closes=3, answer_spans=3, turns=8)
    trajectory = finished(0, 1.0, calls=1, failed=1, turns=2, release=counts)
    found = [
        (compute_error_penalty(trajectory, k), compute_format_penalty(trajectory, k)) for k in ("report", "release")
    ]
    assert found == [(1.0, 0.0), (0.25, 0.25)]


@pytest.mark.parametrize(("error", "form", "total"), [(1, 1, 1.5), (1, 0, 0.5), (0, 1, 1.0), (0, 0, 0.0)])
def test_each_penalty_can_be_switched_off(error: int, form: int, total: float) -> None:
    trajectory = finished(0, 1.0, calls=4, failed=2, opens=0)
    for penalty in ("report", "release"):
        roc = RocConfig(penalty=penalty, error_penalty=bool(error), format_penalty=bool(form))
        assert compute_penalty(trajectory, roc) == total


@pytest.mark.slow
def test_a_larger_floor_keeps_more_dirty_positives() -> None:
    dirty = [finished(tid, 1.0, calls=2, failed=1) for tid in range(8)]
    group = [*dirty, *(finished(tid, float(tid < 16)) for tid in range(8, 32))]

    def count_dirty(floor: float) -> float:
        roc = RocConfig(floor=floor)
        kept = [resample(group, 16, roc, seed) for seed in range(500)]
        return sum(one.trajectory_id < 8 for each in kept for one in each) / len(kept)

    # Mean number of kept dirty positives by floor, from the table in docs/release.md.
    expected = {0.001: 0.05, 0.01: 0.38, 0.05: 1.28, 0.1: 1.94, 0.2: 2.75, 0.5: 4.01}
    assert {floor: count_dirty(floor) for floor in expected} == pytest.approx(expected, abs=0.2)
    assert RocConfig().floor == 0.1


@pytest.mark.parametrize(
    ("positives", "negatives", "roc", "kept"),
    [
        *((8, 8, REPORT, (4, 4)), (12, 4, REPORT, (6, 2)), (4, 12, REPORT, (2, 6)), (14, 2, REPORT, (7, 1))),
        *((15, 1, REPORT, (7, 1)), (1, 15, REPORT, (1, 7)), (15, 1, RELEASE, (7, 1)), (14, 2, RELEASE, (6, 2))),
        (2, 14, RELEASE, (2, 6)),
        (8, 8, RocConfig(min_positives=1, min_negatives=5), (3, 5)),
        (8, 8, RocConfig(min_positives=6, min_negatives=2), (6, 2)),
        (8, 1, RocConfig(min_negatives=4), (7, 1)),
        (1, 8, RocConfig(min_positives=0), (1, 7)),
        (1, 31, RocConfig(min_positives=0), (0, 8)),
    ],
)
def test_half_of_each_class_is_kept(positives: int, negatives: int, roc: RocConfig, kept: tuple[int, int]) -> None:
    assert compute_class_counts(positives, negatives, 8, roc) == kept


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=32),
    st.integers(1, 16),
    st.sampled_from([REPORT, RELEASE]),
    st.integers(0, 2**60),
)
def test_the_requested_number_is_kept_from_both_classes(
    outcomes: list[tuple[bool, int, int]], keep: int, roc: RocConfig, seed: int
) -> None:
    group = [
        finished(tid, float(right), calls=calls, failed=min(wrong, calls))
        for tid, (right, calls, wrong) in enumerate(outcomes)
    ]
    kept = resample(group, keep, roc, seed)
    assert len(kept) == min(keep, len(group))
    assert [one.trajectory_id for one in kept] == sorted({one.trajectory_id for one in kept})
    assert kept == resample(group, keep, roc, seed)
    if keep >= 4 and len(group) > keep:
        rewards = {one.reward for one in group}
        assert {one.reward for one in kept} == rewards


def test_clean_positives_are_preferred_in_proportion_to_their_inverse_penalty() -> None:
    clean, dirty = finished(0, 1.0, calls=4, failed=1), finished(1, 1.0, calls=4, failed=3)
    assert compute_penalty(dirty, REPORT) == 3 * compute_penalty(clean, REPORT)
    group = [clean, dirty, *(finished(tid, 0.0) for tid in range(2, 4))]
    drawn = Counter(resample(group, 2, REPORT, seed)[0].trajectory_id for seed in range(4000))
    assert drawn[0] / drawn[1] == pytest.approx(3.0, rel=0.15)


def test_positives_are_the_trajectories_with_rewards_above_the_threshold() -> None:
    roc = RocConfig(penalty="release", positives="lowest", negatives="first", positive_above=0.5)
    group = [finished(tid, reward, calls=4, failed=tid) for tid, reward in enumerate([0.5, 0.2, 0.6, 1.0, -1.0, 0.1])]
    assert [one.trajectory_id for one in resample(group, 2, roc, seed=1)] == [0, 2]
    default = msgspec.structs.replace(roc, positive_above=0.0)
    assert [one.trajectory_id for one in resample(group, 2, default, seed=1)] == [0, 4]


def test_the_success_rule_selects_positives_independently_of_the_reward() -> None:
    roc = RocConfig(penalty="release", positives="lowest", negatives="first")
    group = [finished(tid, 0.1, calls=4, failed=tid, components={"correct": float(tid == 3)}) for tid in range(6)]
    success = parse_success("correct")
    assert [one.trajectory_id for one in resample(group, 2, roc, seed=1, success=success)] == [0, 3]
    assert [one.trajectory_id for one in resample(group, 2, roc, seed=1)] == [0, 1]


def test_negatives_are_drawn_uniformly_whatever_their_penalty() -> None:
    group = [finished(0, 1.0), *(finished(tid, 0.0, calls=4, failed=tid) for tid in range(1, 5))]
    drawn = Counter(
        one.trajectory_id for seed in range(4000) for one in resample(group, 2, REPORT, seed) if not one.reward
    )
    assert all(count / 4000 == pytest.approx(0.25, abs=0.03) for count in drawn.values())


def test_the_release_keeps_positives_of_lowest_penalty_and_the_first_negatives() -> None:
    positives = [finished(tid, 1.0, calls=4, failed=failed) for tid, failed in enumerate([3, 0, 1, 0])]
    negatives = [finished(tid, 0.0) for tid in range(4, 8)]
    kept = resample([*positives, *negatives], 4, RELEASE, seed=1)
    assert [one.trajectory_id for one in kept] == [1, 3, 4, 5]
