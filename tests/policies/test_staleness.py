"""What is too old is not trained on; steps are collected ahead within the bound."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus.messages import (
    BatchReady,
    BufferCursor,
    LengthsMeasured,
    ProtocolError,
    RunStarted,
    StalenessCounts,
    TrajectoryAborted,
    TrajectoryFailed,
)
from policies.collection import STEP_ENDED
from policies.decider import Send
from policies.staleness import oldest_version, young_enough
from tests.policies.buffers import MIXED, Play, batches, collected, of_versions, run_of, starts

# ---------------------------------------------------------------- too old


def test_a_step_may_train_on_the_policy_that_it_updates_and_on_so_many_before() -> None:
    assert oldest_version(step=5, max_staleness=0) == 4
    assert oldest_version(step=5, max_staleness=2) == 2


def test_old_tokens_are_masked_and_the_rest_of_their_trajectory_counts() -> None:
    young = young_enough(of_versions(0, 2, 3, 3), 3, "mask")
    assert young is not None
    assert young.loss_mask == b"\0\0\0\0\1\1"
    assert young.versions == of_versions(0, 2, 3, 3).versions


@pytest.mark.parametrize("rule", ["mask", "drop"])
def test_a_trajectory_that_is_young_enough_stays_as_it_is(rule: str) -> None:
    trajectory = of_versions(0, 3, 4)
    assert young_enough(trajectory, 3, rule) is trajectory  # pyright: ignore[reportArgumentType]


def test_a_trajectory_with_one_old_token_is_dropped_where_that_is_the_rule() -> None:
    assert young_enough(of_versions(0, 2, 3, 3, 3), 3, "drop") is None


def test_a_trajectory_with_old_tokens_alone_is_dropped_by_either_rule() -> None:
    assert young_enough(of_versions(0, 1, 2), 3, "mask") is None


@given(st.lists(st.integers(0, 6), min_size=1), st.integers(0, 6), st.sampled_from(["mask", "drop"]))
def test_what_is_left_has_no_old_token_and_lacks_no_young_one(versions: list[int], oldest: int, rule: str) -> None:
    young = young_enough(of_versions(0, *versions), oldest, rule)  # pyright: ignore[reportArgumentType]
    expected = [version >= oldest for version in versions]
    if young is None:
        assert not any(expected) or (rule == "drop" and not all(expected))
    else:
        assert list(young.loss_mask[3:]) == expected


# ---------------------------------------------------------------- running ahead


def test_steps_are_collected_at_once_as_far_as_the_bound_allows() -> None:
    play = Play(run_of(max_staleness=2))
    assert [len(starts(play.ask(step))) for step in (1, 2, 3)] == [2, 2, 2]
    with pytest.raises(ProtocolError, match="before the last one was answered"):
        play.ask(4)


def test_no_step_is_left_out() -> None:
    play = Play(run_of())
    play.ask(1)
    with pytest.raises(ProtocolError, match="step 3 does not follow step 1"):
        play.ask(3)


def test_batches_go_out_in_the_order_of_their_steps_whoever_is_complete_first() -> None:
    play = Play(run_of())
    play.ask(1)
    play.ask(2)
    assert not batches([*play.end(2, 0), *play.end(3, 0)])
    play.end(0, 0)
    effects = play.end(1, 0)
    assert [(batch.step, sorted({row.group_id for row in batch.rows})) for batch in batches(effects)] == [
        (1, [0, 1]),
        (2, [2, 3]),
    ]


def test_the_steps_line_says_how_far_behind_its_tokens_were() -> None:
    play = Play(run_of())
    play.ask(1)
    play.ask(2)
    play.end(0, 0)
    assert collected(play.end(1, 0)).staleness == StalenessCounts(tokens=4)
    play.end(2, 0, 1)
    assert collected(play.end(3, 1)).staleness == StalenessCounts(tokens=6, versions_behind=2, most_behind=1)


def test_the_synchronous_algorithm_counts_no_staleness() -> None:
    play = Play(run_of(max_staleness=0))
    play.ask(1)
    play.end(0, 0)
    assert collected(play.end(1, 0)).staleness is None


def test_a_run_that_goes_on_begins_with_the_groups_that_were_under_way() -> None:
    play = Play(run_of())
    play.ask(1)
    play.ask(2)
    play.end(0, 0)
    cursor = collected(play.end(1, 0)).cursor
    assert cursor == BufferCursor(position=4, next_group_id=4, next_trajectory_id=8, pending=(2, 3))
    resumed = Play(run_of())
    resumed.buffer.decide(0.0, RunStarted(1, cursor))
    again = starts([*resumed.ask(2, 1), *resumed.ask(3, 1)])
    assert [group.problem for group in again[:2]] == [play.groups[2].problem, play.groups[3].problem]
    assert [group.seed for group in again[:2]] == [play.groups[2].seed, play.groups[3].seed]
    assert [group.group_id for group in again] == [4, 5, 6, 7]
    assert resumed.buffer.state.cursor == BufferCursor(position=6, next_group_id=8, next_trajectory_id=16)


# ---------------------------------------------------------------- any order


SETTINGS = st.fixed_dictionaries(
    {
        "max_staleness": st.integers(1, 3),
        "too_old": st.sampled_from(["mask", "drop"]),
        "oversubscribe": st.sampled_from([1.0, 1.5, 2.0]),
        "leftovers": st.sampled_from(["carry", "abort"]),
        "refills": st.integers(0, 2),
        "prompts": st.integers(1, 3),
        "steps": st.integers(1, 6),
    }
)


@given(SETTINGS, st.data())
def test_in_any_order_steps_come_in_theirs_and_no_row_is_older_than_the_bound(
    settings: dict[str, int], data: st.DataObject
) -> None:
    """Trajectories end whenever they like, with tokens of any version since their group was started."""
    run = run_of(**settings)
    play, live, born = Play(run), dict[int, int](), dict[int, int]()
    seen: list[BatchReady] = []
    measured: set[int] = set()
    version, asked = 0, 0

    def note(effects: list[Send]) -> None:
        for group in starts(effects):
            ids = range(group.first_trajectory_id, group.first_trajectory_id + group.size)
            live.update(dict.fromkeys(ids, group.group_id))
            born.update(dict.fromkeys(ids, version))
        seen.extend(batches(effects))
        measured.update(send.message.step for send in effects if isinstance(send.message, LengthsMeasured))
        assert len(live) <= 2 * (run.rl.live_groups + stopping())

    def stopping() -> int:
        return len(play.buffer.state.stopping)

    while version < run.rl.steps:
        while asked < min(version + 1 + run.rl.max_staleness, run.rl.steps):
            asked += 1
            note(play.ask(asked, version))
        if len(seen) > version and (not live or data.draw(st.booleans())):
            version += 1  # the learner is through with a batch
            continue
        tid = data.draw(st.sampled_from(sorted(live)))
        group_id = live.pop(tid)
        kinds = ["finished", "failed", *(["aborted"] if group_id in play.buffer.state.stopping else [])]
        match data.draw(st.sampled_from(kinds)):
            case "finished":
                since = st.integers(born[tid], version)
                tokens = data.draw(st.lists(since, min_size=1, max_size=3).map(sorted))
                event = of_versions(tid, *tokens, reward=data.draw(st.sampled_from(MIXED)), group_id=group_id)
            case "failed":
                event = TrajectoryFailed(tid, group_id, "x")
            case _:
                event = TrajectoryAborted(tid, group_id, STEP_ENDED, 1)
        note(play.hear(event))
    for tid, group_id in list(live.items()):
        note(play.hear(TrajectoryAborted(tid, group_id, STEP_ENDED, 1)))
    assert [batch.step for batch in seen] == list(range(1, run.rl.steps + 1))
    for batch in seen:
        assert len({row.group_id for row in batch.rows}) <= run.rl.prompts
        assert [row.trajectory_id for row in batch.rows] == sorted(row.trajectory_id for row in batch.rows)
        for row in batch.rows:
            versions = [int.from_bytes(row.versions[4 * at : 4 * at + 4], "little") for at in range(len(row.loss_mask))]
            counted = [each for each, flag in zip(versions, row.loss_mask, strict=True) if flag]
            assert counted and batch.step - 1 - run.rl.max_staleness <= min(counted) <= max(counted) <= batch.step - 1
    state = play.buffer.state
    assert not (state.steps or state.stopping or state.lengths)
    assert measured == (set(range(1, run.rl.steps + 1)) if run.rl.oversubscribe > 1 else set())
