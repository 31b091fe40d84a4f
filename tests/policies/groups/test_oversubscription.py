"""Steps that start more groups than they need carry or abort surplus groups."""

import pytest
from msgspec.structs import replace

from asterism.bus import messages as msg
from asterism.configs.schema.algorithm import RlConfig
from asterism.policies.groups.buffer_state import STEP_ENDED
from tests.policies.groups.buffers import BufferDriver, get_collected, list_aborts, list_starts, make_finished, make_run


@pytest.fixture
def aborting() -> BufferDriver:
    """Make a driver with a complete first step. Its third group, with trajectories 4 and 5, is aborted."""
    return BufferDriver.start(0, 1, max_staleness=0, group_oversampling=1.5)


def test_a_step_starts_surplus_groups_and_ends_with_its_first_complete_groups() -> None:
    driver = BufferDriver(make_run(max_staleness=0, group_oversampling=1.5))
    assert len(list_starts(driver.request_step(1))) == 3
    driver.end(2, 0)
    effects = driver.end(0, 0)
    assert {row.group_id for row in driver.batches[0].samples} == {0, 2}
    assert list_aborts(effects) == [msg.GroupAborted(1, 2, 2, STEP_ENDED)]
    assert [send.to for send in effects if isinstance(send.message, msg.GroupAborted)] == ["rollout-0"]


def test_the_number_of_groups_is_rounded_up_despite_float_errors() -> None:
    assert RlConfig(prompts=10, group_oversampling=1.1).started_groups == 11
    assert RlConfig(prompts=10, group_oversampling=1.11).started_groups == 12
    assert RlConfig(prompts=512).started_groups == 512


def test_aborted_trajectories_are_neither_answers_nor_failures() -> None:
    driver = BufferDriver.start(0, max_staleness=0, group_oversampling=1.5)
    step = get_collected(driver.end(1, 0))
    totals = step.counts.totals
    assert (totals.trajectories, totals.trajectories_failed, step.failures) == (4, 0, {})
    assert not driver.decide(msg.TrajectoryAborted(4, 2, STEP_ENDED, 7))
    (send,) = driver.decide(msg.TrajectoryAborted(5, 2, STEP_ENDED, 0))
    assert isinstance(send.message, msg.LengthsMeasured)
    assert send.message.aborted == 2


def test_lengths_include_all_started_trajectories_and_the_tokens_of_aborted_ones() -> None:
    driver = BufferDriver.start(max_staleness=0, group_oversampling=1.5)
    driver.end(0, 0, 0)
    driver.end(1, 0)
    # The end was in flight when the abort was sent.
    driver.decide(replace(make_finished(4, 0, 0, 0, group_id=2), ending="length"))
    (send,) = driver.decide(msg.TrajectoryAborted(5, 2, STEP_ENDED, 7))
    measured = send.message
    assert isinstance(measured, msg.LengthsMeasured)
    assert (measured.completed, measured.started) == (msg.LengthCounts(4, 6, 0), msg.LengthCounts(6, 16, 1))
    assert (measured.aborted, measured.finished_late) == (1, 1)


def test_an_aborted_trajectory_ends_once(aborting: BufferDriver) -> None:
    aborting.decide(msg.TrajectoryAborted(4, 2, STEP_ENDED, 7))
    for again in (msg.TrajectoryAborted(4, 2, STEP_ENDED, 7), make_finished(4, 0, group_id=2)):
        with pytest.raises(msg.ProtocolError, match="ended twice"):
            aborting.decide(again)


def test_a_run_finishes_after_its_last_aborted_trajectory(aborting: BufferDriver) -> None:
    assert not aborting.decide(msg.RunFinished(1))
    assert not aborting.decide(msg.TrajectoryAborted(4, 2, STEP_ENDED, 7))
    *_, last = aborting.decide(msg.TrajectoryAborted(5, 2, STEP_ENDED, 0))
    assert (last.to, last.message) == ("launcher", msg.RunFinished(1))


def test_a_run_without_aborted_trajectories_finishes_immediately() -> None:
    (send,) = BufferDriver(make_run()).decide(msg.RunFinished(1))
    assert (send.to, send.message) == ("launcher", msg.RunFinished(1))


def test_an_abort_of_an_open_trajectory_is_refused() -> None:
    with pytest.raises(msg.ProtocolError, match="was aborted without a request"):
        BufferDriver.start().decide(msg.TrajectoryAborted(0, 0, STEP_ENDED, 7))


def test_a_carried_group_replaces_a_new_group_of_the_next_step() -> None:
    driver = BufferDriver(make_run(group_oversampling=1.5, surplus_groups="carry"))
    assert len(list_starts(driver.request_step(1))) == 3
    assert len(list_starts(driver.request_step(2))) == 2  # both steps share the spare group
    driver.end(0, 0)
    assert not list_aborts(driver.end(1, 0))
    assert len(list_starts(driver.request_step(3, 1))) == 2
    driver.end(2, 0)
    num_before = len(driver.batches)
    driver.end(4, 0)
    (batch,) = driver.batches[num_before:]
    assert {row.group_id for row in batch.samples} == {2, 4}


def test_stale_carried_groups_are_masked_or_dropped() -> None:
    for rule, rows, staleness in (
        ("mask", 2, msg.StalenessCounts(tokens=4, versions_behind=2, max_versions_behind=1, tokens_masked=2)),
        ("drop", 0, msg.StalenessCounts(trajectories_dropped=2)),
    ):
        # Group 1, started for step 1, is carried to step 3.
        settings = {"group_oversampling": 2, "surplus_groups": "carry", "stale_tokens": rule}
        driver = BufferDriver.start(0, 2, steps=2, prompts=1, **settings)
        driver.request_step(3, 1)
        num_before = len(driver.batches)
        effects = driver.end(1, 0, 1, 2)
        if rule == "drop":
            assert len(driver.batches) == num_before  # the group is lost, so the step needs another group
            assert driver.buffer.state.steps[3].counts.totals.groups_lost == 1
            assert driver.buffer.state.steps[3].staleness == staleness
        else:
            assert len(driver.batches[num_before].samples) == rows
            assert get_collected(effects).staleness == staleness


def test_a_resumed_run_restarts_carried_groups() -> None:
    driver = BufferDriver.start(steps=2, prompts=1, group_oversampling=2, surplus_groups="carry")
    assert get_collected(driver.end(0, 0)).cursor.pending == (1, 2)


def test_used_spare_groups_are_replenished_and_counted_once() -> None:
    driver = BufferDriver(make_run(max_staleness=2, prompts=1, group_oversampling=2, surplus_groups="carry"))
    assert [len(list_starts(driver.request_step(step))) for step in (1, 2, 3)] == [2, 1, 1]
    driver.end(0, 0, rewards=(1.0, 1.0))
    driver.end(1, 0, rewards=(0.0, 0.0))  # group 1 is rejected, too, so step 1 has no surplus group
    assert len(list_starts(driver.request_step(4, 1))) == 2
    driver.end(4, 1)  # step 4 waits for step 2, and group 5 is carried to step 5
    driver.end(2, 0)
    assert len(list_starts(driver.request_step(5, 2))) == 1


def test_the_last_step_carries_no_groups() -> None:
    driver = BufferDriver(make_run(steps=1, group_oversampling=1.5, surplus_groups="carry"))
    driver.request_step(1)
    driver.end(0, 0)
    assert list_aborts(driver.end(1, 0)) == [msg.GroupAborted(2, 4, 2, STEP_ENDED)]


def test_a_carried_group_that_has_ended_is_judged_when_the_next_step_is_requested() -> None:
    driver = BufferDriver.start(0, prompts=1, group_oversampling=3, surplus_groups="carry")
    assert not driver.end(1, 0)
    num_before = len(driver.batches)
    driver.request_step(2)
    assert {row.group_id for row in driver.batches[num_before].samples} == {1}
