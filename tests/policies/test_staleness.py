"""What is too old is not trained on; steps are collected ahead within the bound; what is left over goes on or is stopped."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from bus.messages import (
    BatchReady,
    BufferCursor,
    GroupAborted,
    LengthsMeasured,
    ProtocolError,
    RunFinished,
    RunStarted,
    StalenessCounts,
    StartGroup,
    StepCollected,
    StepRequested,
    TrajectoryAborted,
    TrajectoryFailed,
    TrajectoryFinished,
)
from configs.schema import Rl, Roc, Run
from policies.collection import STEP_ENDED
from policies.decider import Send
from policies.group_buffer import GroupBuffer, Problem
from policies.record import ids_to_bytes
from policies.staleness import oldest_version, young_enough
from tests.policies.groups import finished

TRAIN = [Problem(f"train:{number}", str(number), bytes(8)) for number in range(99)]
MIXED = (1.0, 0.0)


def run_of(**rl: object) -> Run:
    settings: dict[str, object] = {"steps": 9, "prompts": 2, "rollouts": 2, "refills": 0, "max_staleness": 1}
    return Run(name="test", rl=Rl(**settings | rl), roc=Roc(enabled=False))  # pyright: ignore[reportArgumentType]


def of_versions(trajectory_id: int, *versions: int, reward: float = 1.0, group_id: int = 0) -> TrajectoryFinished:
    """Three prompt tokens, and a generated one of each version."""
    count = 3 + len(versions)
    return replace(
        finished(trajectory_id, reward, group_id=group_id),
        token_ids=bytes(4 * count),
        loss_mask=b"\0\0\0" + b"\1" * len(versions),
        logprobs=bytes(4 * count),
        versions=ids_to_bytes([-1, -1, -1, *versions]),
    )


def starts(effects: list[Send]) -> list[StartGroup]:
    return [send.message for send in effects if isinstance(send.message, StartGroup)]


def stops(effects: list[Send]) -> list[GroupAborted]:
    return [send.message for send in effects if isinstance(send.message, GroupAborted)]


def batches(effects: list[Send]) -> list[BatchReady]:
    return [send.message for send in effects if isinstance(send.message, BatchReady)]


def collected(effects: list[Send]) -> StepCollected:
    return next(send.message for send in effects if isinstance(send.message, StepCollected))


class Play:
    """A group buffer, and the groups that it has started."""

    def __init__(self, run: Run) -> None:
        self.buffer = GroupBuffer(run, TRAIN, TRAIN[:2])
        self.groups: dict[int, StartGroup] = {}

    def ask(self, step: int, version: int = 0) -> list[Send]:
        return self.hear(StepRequested(step, version))

    def hear(self, event: StepRequested | TrajectoryFinished | TrajectoryFailed | TrajectoryAborted) -> list[Send]:
        effects = list(self.buffer.decide(0.0, event))
        self.groups |= {group.group_id: group for group in starts(effects)}
        return effects

    def end(self, group_id: int, *versions: int, rewards: tuple[float, ...] = MIXED) -> list[Send]:
        """All of the group's trajectories, each with tokens of these versions."""
        first = self.groups[group_id].first_trajectory_id
        return [
            effect
            for place, reward in enumerate(rewards)
            for effect in self.hear(of_versions(first + place, *versions, reward=reward, group_id=group_id))
        ]


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


# ---------------------------------------------------------------- oversubscription


def test_a_step_starts_more_groups_than_it_needs_and_ends_with_the_first_complete_ones() -> None:
    play = Play(run_of(max_staleness=0, oversubscribe=1.5))
    assert len(starts(play.ask(1))) == 3
    play.end(2, 0)
    effects = play.end(0, 0)
    assert {row.group_id for row in batches(effects)[0].rows} == {0, 2}
    assert stops(effects) == [GroupAborted(1, 2, 2, STEP_ENDED)]
    assert [send.to for send in effects if isinstance(send.message, GroupAborted)] == ["rollout-0"]


def test_the_number_of_groups_is_rounded_up_and_not_by_a_rounding_error() -> None:
    assert Rl(prompts=10, oversubscribe=1.1).groups == 11
    assert Rl(prompts=10, oversubscribe=1.11).groups == 12
    assert Rl(prompts=512).groups == 512


def test_what_is_stopped_is_neither_an_answer_nor_a_failure() -> None:
    play = Play(run_of(max_staleness=0, oversubscribe=1.5))
    play.ask(1)
    play.end(0, 0)
    step = collected(play.end(1, 0))
    assert (step.counts.trajectories, step.counts.trajectories_failed, step.failures) == (4, 0, {})
    assert not play.hear(TrajectoryAborted(4, 2, STEP_ENDED, 7))
    (send,) = play.hear(TrajectoryAborted(5, 2, STEP_ENDED, 0))
    assert isinstance(send.message, LengthsMeasured)
    assert send.message.aborted == 2


def test_lengths_are_those_of_all_that_was_started_what_was_stopped_by_its_tokens_so_far() -> None:
    play = Play(run_of(max_staleness=0, oversubscribe=1.5))
    play.ask(1)
    play.end(0, 0, 0)
    play.end(1, 0)
    play.hear(replace(of_versions(4, 0, 0, 0, group_id=2), ending="length"))  # it crossed the word that it is to stop
    (send,) = play.hear(TrajectoryAborted(5, 2, STEP_ENDED, 7))
    measured = send.message
    assert isinstance(measured, LengthsMeasured)
    assert (measured.taken.trajectories, measured.taken.response_tokens, measured.taken.overlong) == (4, 6, 0)
    assert (measured.started.trajectories, measured.started.response_tokens, measured.started.overlong) == (6, 16, 1)
    assert (measured.aborted, measured.late) == (1, 1)


def test_a_trajectory_that_was_stopped_ends_once() -> None:
    play = Play(run_of(max_staleness=0, oversubscribe=1.5))
    play.ask(1)
    play.end(0, 0)
    play.end(1, 0)
    play.hear(TrajectoryAborted(4, 2, STEP_ENDED, 7))
    for again in (TrajectoryAborted(4, 2, STEP_ENDED, 7), of_versions(4, 0, group_id=2)):
        with pytest.raises(ProtocolError, match="ended twice"):
            play.hear(again)


def test_a_run_is_over_when_the_last_trajectory_that_is_stopped_has_ended() -> None:
    play = Play(run_of(max_staleness=0, oversubscribe=1.5))
    play.ask(1)
    play.end(0, 0)
    play.end(1, 0)
    assert not play.hear(RunFinished(1))
    assert not play.hear(TrajectoryAborted(4, 2, STEP_ENDED, 7))
    *_, last = play.hear(TrajectoryAborted(5, 2, STEP_ENDED, 0))
    assert (last.to, last.message) == ("launcher", RunFinished(1))


def test_a_run_that_stops_nobody_is_over_at_once() -> None:
    (send,) = Play(run_of()).hear(RunFinished(1))
    assert (send.to, send.message) == ("launcher", RunFinished(1))


def test_nobody_stops_a_trajectory_that_is_waited_for() -> None:
    play = Play(run_of())
    play.ask(1)
    with pytest.raises(ProtocolError, match="nobody asked for it"):
        play.hear(TrajectoryAborted(0, 0, STEP_ENDED, 7))


def test_a_group_that_is_left_over_counts_for_the_next_step_which_starts_one_less() -> None:
    play = Play(run_of(oversubscribe=1.5, leftovers="carry"))
    assert len(starts(play.ask(1))) == 3
    assert len(starts(play.ask(2))) == 2  # the spare one is for both
    play.end(0, 0)
    assert not stops(play.end(1, 0))
    assert len(starts(play.ask(3, 1))) == 2
    play.end(2, 0)
    (batch,) = batches(play.end(4, 0))
    assert {row.group_id for row in batch.rows} == {2, 4}


def test_a_group_that_was_carried_is_masked_or_dropped_when_it_is_too_old() -> None:
    for rule, rows, staleness in (
        ("mask", 2, StalenessCounts(tokens=4, versions_behind=2, most_behind=1, tokens_masked=2)),
        ("drop", 0, StalenessCounts(trajectories_dropped=2)),
    ):
        play = Play(run_of(prompts=1, oversubscribe=2, leftovers="carry", too_old=rule))
        play.ask(1)
        play.ask(2)
        play.end(0, 0)
        play.end(2, 0)  # group 1, begun for step 1, is carried to the third
        play.ask(3, 1)
        effects = play.end(1, 0, 1, 2)
        if rule == "drop":
            assert not batches(effects)  # lost with its group: the step waits for its own
            assert play.buffer.state.steps[3].counts.groups_lost == 1
            assert play.buffer.state.steps[3].staleness == staleness
        else:
            assert len(batches(effects)[0].rows) == rows
            assert collected(effects).staleness == staleness


def test_a_run_that_goes_on_begins_what_was_carried_anew() -> None:
    play = Play(run_of(prompts=1, oversubscribe=2, leftovers="carry"))
    play.ask(1)
    play.ask(2)
    assert collected(play.end(0, 0)).cursor.pending == (1, 2)


def test_the_spare_groups_are_made_up_for_when_they_are_used_up_and_counted_once() -> None:
    play = Play(run_of(max_staleness=2, prompts=1, oversubscribe=2, leftovers="carry"))
    assert [len(starts(play.ask(step))) for step in (1, 2, 3)] == [2, 1, 1]
    play.end(0, 0, rewards=(1.0, 1.0))
    play.end(1, 0, rewards=(0.0, 0.0))  # rejected like the other: the first step leaves nothing
    assert len(starts(play.ask(4, 1))) == 2
    play.end(4, 1)  # the fourth step waits for the second, and has left group 5 to the fifth
    play.end(2, 0)
    assert len(starts(play.ask(5, 2))) == 1


def test_nothing_is_left_over_for_a_step_that_never_comes() -> None:
    play = Play(run_of(steps=1, oversubscribe=1.5, leftovers="carry"))
    play.ask(1)
    play.end(0, 0)
    assert stops(play.end(1, 0)) == [GroupAborted(2, 4, 2, STEP_ENDED)]


def test_what_was_left_over_and_ended_before_its_step_was_asked_for_is_judged_then() -> None:
    play = Play(run_of(prompts=1, oversubscribe=3, leftovers="carry"))
    play.ask(1)
    play.end(0, 0)
    assert not play.end(1, 0)
    effects = play.ask(2)
    assert {row.group_id for row in batches(effects)[0].rows} == {1}


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
