"""The judged groups in the log of a run's head, and how other settings would judge them."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from asterism.analysis.roc_refilter import (
    JudgedGroup,
    compute_difference,
    list_candidates,
    read_judged_groups,
    rebuild_training_rows,
)
from asterism.bus.messages import GroupJudged, TrajectoryFinished
from asterism.configs.errors import UnusableInput
from asterism.configs.load import load_with_overrides, write_resolved
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.algorithm import RlConfig, RocConfig
from asterism.configs.schema.run_config import RunConfig
from asterism.policies.groups.selection import SelectionRules, select_rows
from tests.edited_logs import editing_log
from tests.policies.groups.finished import finished
from tests.recorded import write_world_logs
from tests.simulation.test_faults import live, world_of
from tests.simulation.world import World

RUN = RunConfig(name="test", seed=3, rl=RlConfig(prompts=2, rollouts=8))
# Trajectories 0 to 4 are positive with two calls each: 0 and 1 without a failed call, 2 to 4 with two failed calls.
YOUNG = [
    *(finished(number, 1.0, calls=2, failed=0 if number < 2 else 2) for number in range(5)),
    *(finished(number, 0.0) for number in range(5, 8)),
]


def judged(fresh: list[TrajectoryFinished] = YOUNG, *, accepted: bool = True) -> JudgedGroup:
    rows = select_rows(SelectionRules.from_config(RUN), fresh, 5).rows if accepted else []
    kept, advantages = tuple(row.trajectory_id for row in rows), tuple(row.advantage for row in rows)
    ids, rewards = tuple(each.trajectory_id for each in fresh), tuple(each.reward for each in fresh)
    verdict = "accepted" if accepted else "lost"
    return JudgedGroup(GroupJudged(1, 0, 5, verdict, ids, rewards, kept, advantages), fresh)


def test_the_runs_own_settings_keep_the_same_trajectories() -> None:
    same = compute_difference(list_candidates(judged(), RUN))
    assert (same.run, same.both, same.advantage_change_mean) == (same.other, 4, 0.0)


def test_plain_grpo_keeps_the_whole_group_and_changes_the_advantages() -> None:
    plain = replace(RUN, roc=RocConfig(enabled=False))
    candidates = list_candidates(judged(), plain)
    assert [each.other_advantage is not None for each in candidates] == [True] * 8
    found = compute_difference(candidates)
    assert (found.run.trajectories, found.other.trajectories, found.both) == (4, 8, 4)
    ours = dict(zip(judged().judged.kept, judged().judged.advantages, strict=True))
    theirs = {row.trajectory_id: row.advantage for row in rebuild_training_rows(judged(), plain)}
    expected = [abs(theirs[tid] - ours.get(tid, 0.0)) for tid in range(8)]
    assert found.advantage_change_mean == pytest.approx(sum(expected) / 8)
    of_both = [abs(theirs[tid] - ours[tid]) for tid in ours]
    assert found.advantage_change_both_mean == pytest.approx(sum(of_both) / 4)


def test_roc_lowest_keeps_the_positives_with_the_fewest_failed_calls() -> None:
    lowest = replace(RUN, roc=RocConfig(positives="lowest"))
    found = compute_difference(list_candidates(judged(), lowest))
    assert (found.other.positives, found.other.failed_call_share) == (2, 0.0)


def test_floor_and_keep_apply_from_the_command_line(tmp_path: Path) -> None:
    """Settings are loaded as in `asterism log roc --set`, which accepts only keys of roc."""
    write_resolved(RUN, path := tmp_path / "config.toml")
    shares: list[float] = []
    for floor in (1e-6, 1.0):
        other = load_with_overrides(path, [f"roc.floor={floor}"], ("roc",))
        candidates = [
            list_candidates(judged()._replace(judged=replace(judged().judged, seed=seed)), other) for seed in range(99)
        ]
        kept = [each for group in candidates for each in group if each.other_advantage is not None and each.is_positive]
        shares.append(sum(each.calls_failed for each in kept) / sum(each.calls for each in kept))
    assert shares[0] == 0.0
    assert shares[1] == pytest.approx(0.6, abs=0.1)  # three of the five positives fail
    six = load_with_overrides(path, ["roc.keep=6"], ("roc",))
    assert len(rebuild_training_rows(judged(), six)) == 6


def test_changed_settings_can_accept_a_rejected_group() -> None:
    lost = judged([YOUNG[0], YOUNG[1], YOUNG[7]], accepted=False)
    assert rebuild_training_rows(lost, RUN) == []
    assert len(rebuild_training_rows(lost, replace(RUN, roc=RocConfig(enabled=False)))) == 3


def test_without_kept_trajectories_there_are_no_shares() -> None:
    equal = judged(YOUNG[:5], accepted=False)
    found = compute_difference(list_candidates(equal, RUN))
    assert (found.run.groups, found.other.groups, found.both) == (0, 0, 0)
    assert found.run.failed_call_share is found.run.response_tokens_mean is found.advantage_change_mean is None


# ---------------------------------------------------------------- reading the log

# One seed per kind of step: synchronous, oversampled, and two with stale rollouts (tests.simulation.test_faults.RL).
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 4))]


def check_batches(world: World, folder: RunFolder) -> None:
    """Check that the judged groups in the log yield the batches that the learner received."""
    steps = dict(read_judged_groups(world.run, folder))
    assert list(steps) == [batch.step for batch in world.batches]
    assert sum(len(batch.samples) for batch in world.batches) > 0
    for batch in world.batches:
        rows = [row for group in steps[batch.step] for row in rebuild_training_rows(group, world.run)]
        assert tuple(sorted(rows, key=lambda row: row.trajectory_id)) == batch.samples


@pytest.mark.parametrize("seed", SEEDS)
def test_every_step_keeps_the_batch_that_the_learner_received(seed: int, tmp_path: Path) -> None:
    check_batches(live(seed), write_world_logs(live(seed), tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(
    "keys",
    [
        {"overlong_buffer_tokens": 200, "overlong_penalty": 0.5},
        {"overlong": "drop"},
        {"repeated_ngram_tokens": 3, "repeated_ngram_limit": 2},
    ],
    ids=lambda keys: next(iter(keys)),
)
def test_the_treatment_of_long_responses_is_reproduced(keys: dict[str, object], tmp_path: Path) -> None:
    plain = world_of(0).run
    world = World(replace(plain, rl=replace(plain.rl, **keys)), 1, failure_rate=0.0).play()
    folder = write_world_logs(world, tmp_path)
    check_batches(world, folder)
    with pytest.raises(UnusableInput, match="differs from the recomputed one"):
        list(read_judged_groups(plain, folder))


def test_changed_settings_of_the_run_are_refused(tmp_path: Path) -> None:
    world = live(0)
    folder = write_world_logs(world, tmp_path)
    with pytest.raises(UnusableInput, match=r"group \d+ of step 1 differs from the recomputed one"):
        list(read_judged_groups(replace(world.run, roc=RocConfig(enabled=False)), folder))


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_only_the_step_with_missing_events_is_left_out(share: float, tmp_path: Path) -> None:
    world = live(0)
    folder = write_world_logs(world, tmp_path)
    with editing_log(folder.events / "head.sqlite") as log:
        (second,) = log.execute("SELECT max(seq) FROM events WHERE kind = 'StepRequested'").fetchone()
        log.execute(
            "DELETE FROM events WHERE seq < ? AND kind NOT IN ('RunStarted', 'StepRequested', 'StepCollected')",
            ((1 - share) * second,),
        )
    ((step, groups),) = read_judged_groups(world.run, folder)
    assert step == world.batches[-1].step
    assert sum(len(group.judged.kept) for group in groups) == len(world.batches[-1].samples)


def test_a_run_without_an_event_log_is_refused_with_the_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UnusableInput, match=r"head\.sqlite: there is no event log"):
        list(read_judged_groups(live(0).run, RunFolder(tmp_path)))
