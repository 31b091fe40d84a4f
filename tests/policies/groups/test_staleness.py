"""The staleness bound of training tokens and of concurrent steps."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from asterism.bus import messages as msg
from asterism.policies.decider import Send
from asterism.policies.groups.buffer_state import STEP_ENDED
from asterism.policies.groups.staleness import apply_staleness_bound, check_versions, compute_oldest_version
from tests.policies.groups.buffers import MIXED, BufferDriver, get_collected, list_starts, make_finished, make_run


def test_the_oldest_version_is_max_staleness_before_the_updated_version() -> None:
    assert compute_oldest_version(step=5, max_staleness=0) == 4
    assert compute_oldest_version(step=5, max_staleness=2) == 2


@given(st.lists(st.integers(0, 6), min_size=1), st.integers(0, 6), st.sampled_from(["mask", "drop"]))
def test_only_fresh_tokens_count_and_wholly_stale_trajectories_are_dropped(
    versions: list[int], oldest: int, rule: str
) -> None:
    """The rule "drop" also drops a trajectory with one stale token."""
    finished = make_finished(0, *versions)
    young = apply_staleness_bound(finished, oldest, rule)  # pyright: ignore[reportArgumentType]
    fresh = [version >= oldest for version in versions]
    assert (young is None) == (not any(fresh) or (rule == "drop" and not all(fresh)))
    if young is not None:
        assert list(young.record.loss_mask) == [False] * 3 + fresh
        assert young.record.versions == finished.record.versions


def make_sample(trajectory_id: int, *versions: int) -> msg.TrainingSample:
    return msg.TrainingSample(trajectory_id, 0, 1.0, make_finished(trajectory_id, *versions).record)


@pytest.mark.parametrize(
    ("version", "max_staleness", "allowed"),
    [(2, 1, "versions 3 to 4"), (3, 1, ""), (4, 1, ""), (5, 1, "versions 3 to 4"), (3, 0, "version 4"), (4, 0, "")],
)
def test_a_row_of_a_version_out_of_the_allowed_range_is_refused(version: int, max_staleness: int, allowed: str) -> None:
    samples = [make_sample(0, 4), make_sample(7, 4, version, version)]
    if not allowed:
        check_versions(samples, 5, max_staleness)
        return
    cause = f"of version {version} to train on: step 5 takes {allowed} (rl.max_staleness = {max_staleness})"
    with pytest.raises(msg.ProtocolError, match=re.escape(f"trajectory 7 has 2 tokens {cause}")):
        check_versions(samples, 5, max_staleness)


def test_a_row_with_stale_tokens_outside_the_loss_is_accepted() -> None:
    old = make_sample(0, 2)
    check_versions([replace(old, record=replace(old.record, loss_mask=bytes(4)))], step=5, max_staleness=0)


def test_concurrent_steps_are_limited_by_the_bound() -> None:
    driver = BufferDriver(make_run(max_staleness=2))
    assert [len(list_starts(driver.request_step(step))) for step in (1, 2, 3)] == [2, 2, 2]
    with pytest.raises(msg.ProtocolError, match="still being collected"):
        driver.request_step(4)


def test_no_step_is_skipped() -> None:
    with pytest.raises(msg.ProtocolError, match="step 3 does not follow step 1"):
        BufferDriver.start().request_step(3)


def test_batches_are_sent_in_step_order() -> None:
    driver = BufferDriver.start(2, 3, steps=2)
    assert not driver.batches
    driver.end(0, 0)
    driver.end(1, 0)
    assert [(batch.step, sorted({row.group_id for row in batch.samples})) for batch in driver.batches] == [
        (1, [0, 1]),
        (2, [2, 3]),
    ]


def test_the_step_reports_the_staleness_of_its_tokens() -> None:
    driver = BufferDriver.start(0, steps=2)
    assert get_collected(driver.end(1, 0)).staleness == msg.StalenessCounts(tokens=4)
    driver.end(2, 0, 1)
    assert get_collected(driver.end(3, 1)).staleness == msg.StalenessCounts(
        tokens=6, versions_behind=2, max_versions_behind=1
    )


def test_the_synchronous_algorithm_counts_no_staleness() -> None:
    assert get_collected(BufferDriver.start(0, max_staleness=0).end(1, 0)).staleness is None


def test_a_resumed_run_starts_with_the_groups_in_flight() -> None:
    driver = BufferDriver.start(0, steps=2)
    cursor = get_collected(driver.end(1, 0)).cursor
    assert cursor == msg.BufferCursor(position=4, next_group_id=4, next_trajectory_id=8, pending=(2, 3))
    resumed = BufferDriver(make_run())
    resumed.buffer.decide(0.0, msg.RunStarted(1, cursor))
    again = list_starts([*resumed.request_step(2, 1), *resumed.request_step(3, 1)])
    assert [group.problem for group in again[:2]] == [driver.groups[2].problem, driver.groups[3].problem]
    assert [group.seed for group in again[:2]] == [driver.groups[2].seed, driver.groups[3].seed]
    assert [group.group_id for group in again] == [4, 5, 6, 7]
    assert resumed.buffer.state.cursor == msg.BufferCursor(position=6, next_group_id=8, next_trajectory_id=16)


SETTINGS = st.fixed_dictionaries(
    {
        "max_staleness": st.integers(1, 3),
        "stale_tokens": st.sampled_from(["mask", "drop"]),
        "group_oversampling": st.sampled_from([1.0, 1.5, 2.0]),
        "surplus_groups": st.sampled_from(["carry", "abort"]),
        "max_refill_groups": st.integers(0, 2),
        "prompts": st.integers(1, 3),
        "steps": st.integers(1, 6),
    }
)


@pytest.mark.slow
@given(SETTINGS, st.data())
def test_steps_are_in_order_and_within_the_bound(settings: dict[str, int], data: st.DataObject) -> None:
    """Trajectories end in any order, with tokens of any version since their group started."""
    run = make_run(**settings)
    driver, live, born = BufferDriver(run), dict[int, int](), dict[int, int]()
    measured: set[int] = set()
    version, asked = 0, 0

    def note(effects: list[Send]) -> None:
        for group in list_starts(effects):
            ids = range(group.first_trajectory_id, group.first_trajectory_id + group.size)
            live.update(dict.fromkeys(ids, group.group_id))
            born.update(dict.fromkeys(ids, version))
        measured.update(send.message.step for send in effects if isinstance(send.message, msg.LengthsMeasured))
        assert len(live) <= 2 * (run.rl.max_groups_in_flight + stopping())

    def stopping() -> int:
        return len(driver.buffer.state.aborting)

    while version < run.rl.steps:
        while asked < min(version + 1 + run.rl.max_staleness, run.rl.steps):
            asked += 1
            note(driver.request_step(asked, version))
        if len(driver.batches) > version and (not live or data.draw(st.booleans())):
            version += 1  # the learner has trained on a batch
            continue
        tid = data.draw(st.sampled_from(sorted(live)))
        group_id = live.pop(tid)
        kinds = ["finished", "failed", *(["aborted"] if group_id in driver.buffer.state.aborting else [])]
        match data.draw(st.sampled_from(kinds)):
            case "finished":
                since = st.integers(born[tid], version)
                tokens = data.draw(st.lists(since, min_size=1, max_size=3).map(sorted))
                event = make_finished(tid, *tokens, reward=data.draw(st.sampled_from(MIXED)), group_id=group_id)
            case "failed":
                event = msg.TrajectoryFailed(tid, group_id, "x")
            case _:
                event = msg.TrajectoryAborted(tid, group_id, STEP_ENDED, 1)
        effects = driver.decide(event)
        if any(isinstance(send.message, msg.RunFailed) for send in effects):
            return  # every trajectory of a step failed
        note(effects)
    for tid, group_id in list(live.items()):
        note(driver.decide(msg.TrajectoryAborted(tid, group_id, STEP_ENDED, 1)))
    assert [batch.step for batch in driver.batches] == list(range(1, run.rl.steps + 1))
    for batch in driver.batches:
        assert len({row.group_id for row in batch.samples}) <= run.rl.prompts
        assert [row.trajectory_id for row in batch.samples] == sorted(row.trajectory_id for row in batch.samples)
        for row in batch.samples:
            versions = [
                int.from_bytes(row.record.versions[4 * at : 4 * at + 4], "little")
                for at in range(len(row.record.loss_mask))
            ]
            counted = [each for each, flag in zip(versions, row.record.loss_mask, strict=True) if flag]
            assert counted and batch.step - 1 - run.rl.max_staleness <= min(counted) <= max(counted) <= batch.step - 1
    state = driver.buffer.state
    assert not (state.steps or state.aborting or state.lengths)
    assert measured == (set(range(1, run.rl.steps + 1)) if run.rl.group_oversampling > 1 else set())
