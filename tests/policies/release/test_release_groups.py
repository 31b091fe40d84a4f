"""Trajectories that the preset "rstar2_release" and the release keep, for every golden group."""

from collections.abc import Sequence

import pytest

from asterism.bus.messages import TrajectoryFinished
from asterism.configs.schema.algorithm import RlConfig, RocConfig
from asterism.configs.schema.run_config import RunConfig
from asterism.configs.schema.success import SuccessRule
from asterism.policies.groups.advantages import compute_advantages
from asterism.policies.groups.group_filters import has_unequal_rewards
from asterism.policies.groups.roc import compute_error_penalty, compute_format_penalty
from asterism.policies.groups.selection import SelectionRules, select_rows
from tests.policies.release.golden import Case, Group, build_roc, build_trajectory, list_documented_rows, read_groups

ROWS = read_groups()
GROUPS = [row for row in ROWS if not row.uids]
BATCHES = [row for row in ROWS if row.uids]


def build_group(row: Group, members: Sequence[int]) -> list[TrajectoryFinished]:
    return [build_trajectory(each, row.rewards[each], row.p_err[each], row.p_format[each]) for each in members]


def refuses(rollouts: int, roc: RocConfig) -> bool:
    try:
        RunConfig(name="release", rl=RlConfig(prompts=1, rollouts=rollouts), roc=roc)
    except ValueError:
        return True
    return False


def select(group: list[TrajectoryFinished], case: Case) -> tuple[int, ...] | None:
    """Return the kept trajectories, or None for a lost group."""
    if not case.samples or case.count < 0:
        roc, keep_count = RocConfig(enabled=False), 2
    else:
        roc, keep_count = build_roc(case), case.count
    rules = SelectionRules(RlConfig(), roc, SuccessRule(), keep_count, {"": 1}, lambda _: True, compute_advantages)
    selection = select_rows(rules, group, 1)
    return None if selection.verdict == "lost" else tuple(row.trajectory_id for row in selection.rows)


def agrees(row: Group, case: Case) -> bool:
    """Return whether `select` keeps the release's rows. A configuration that crashes the release must be refused."""
    if case.result == "AssertionError" and case.min_positives + case.min_negatives > case.count:
        return refuses(len(row.rewards), build_roc(case)) if case.count >= 0 else refuses_negative_counts()
    return case.result != "AssertionError" and select(build_group(row, range(len(row.rewards))), case) == case.kept


def refuses_negative_counts() -> bool:
    from asterism.configs.load import load_run
    from asterism.configs.loading.config_layers import ConfigError

    with pytest.raises(ConfigError, match=r"roc\.keep"):
        load_run(None, ("name=a", "roc.keep=-1"))
    return True


def test_the_golden_table_has_all_groups_and_the_penalties_of_its_rows() -> None:
    assert (len(GROUPS), len(BATCHES)) == (63, 10)
    for row in ROWS:
        for each in build_group(row, range(len(row.rewards))):
            found = compute_error_penalty(each, "release"), compute_format_penalty(each, "release")
            assert found == (row.p_err[each.trajectory_id], row.p_format[each.trajectory_id]), row.id


@pytest.mark.slow
def test_exactly_the_documented_groups_differ_from_those_of_the_release() -> None:
    different = {row.id for row in GROUPS if not all(agrees(row, case) for case in row.cases)}
    different |= {row.id for row in GROUPS if has_unequal_rewards(row.rewards) == row.dropped}
    different |= {row.id for row in BATCHES if not agrees_with_batch(row)}
    assert different == list_documented_rows("Groups that differ")


def agrees_with_batch(row: Group) -> bool:
    """Return whether the selection of each group of a batch keeps the release's rows."""
    flags = row.augmentation["down_sampling_config"]
    penalties = (flags["roc_error_ratio"], flags["roc_answer_format"])
    minimums = (flags["min_zero_reward_trace_num"], flags["min_non_zero_reward_trace_num"])
    case = Case(*penalties, *minimums, flags["down_sample_to_n"], True, row.kept, row.result)
    if case.min_positives + case.min_negatives > case.count > 0:
        return row.result == "AssertionError" and refuses(len(row.rewards), build_roc(case))
    kept: list[int] = []
    for uid in set(row.uids):
        group = build_group(row, [place for place, each in enumerate(row.uids) if each == uid])
        if not flags["reject_equal_reward"] or has_unequal_rewards([each.reward for each in group]):
            kept += select(group, case) or ()
    return sorted(kept) == sorted(row.kept or ())


def test_a_group_keeps_the_configured_number() -> None:
    rl = RlConfig(prompts=1, rollouts=8)
    for roc, count in ((RocConfig(), 4), (RocConfig(keep=6), 6), (RocConfig(enabled=False, keep=6), 2)):
        assert SelectionRules.from_config(RunConfig(name="a", rl=rl, roc=roc)).keep_count == count
