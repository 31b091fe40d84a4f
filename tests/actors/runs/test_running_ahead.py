"""Rollouts run one version ahead. One run carries surplus groups to the next step; the other run aborts them."""

import json

import numpy as np
import pytest

from asterism.bus.messages import StepRequested, TrajectoryFinished
from asterism.configs.run_folder import RunFolder
from tests.actors.runs.running import from_cold_start_of, metrics, read_conserved_summary, read_messages, whole_run

pytestmark = pytest.mark.slow

SETTINGS = ("rl.rollouts=8", "evaluation.questions=2", "rl.max_staleness=1")
SURPLUS = {
    "carrying": ("rl.prompts=4", "rl.group_oversampling=2.0", "rl.surplus_groups=carry"),
    "aborting": ("rl.prompts=2", "rl.group_oversampling=4.0"),
}


@pytest.fixture(scope="module", params=["carrying", pytest.param("aborting", marks=pytest.mark.nightly)])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, finished: RunFolder) -> RunFolder:
    arguments = (*SETTINGS, *SURPLUS[request.param], *from_cold_start_of(finished))
    return whole_run(tmp_path_factory.mktemp(request.param), *arguments)[0]


def test_every_trajectory_ends_once_and_the_run_replays(folder: RunFolder) -> None:
    summary = read_conserved_summary(folder, "aborted")
    assert summary["trajectories_failed"] == summary["trajectories_abandoned"] == 0
    assert [line["step"] for line in metrics(folder, "step")] == [1, 2, 3]
    assert sorted(line["step"] for line in metrics(folder, "lengths")) == [1, 2, 3]


def test_a_step_is_collected_while_the_previous_step_is_trained(folder: RunFolder) -> None:
    requests = set(read_messages(folder, "head", StepRequested))
    assert requests == {StepRequested(1, 0), StepRequested(2, 0), StepRequested(3, 1)}


def test_training_samples_are_at_most_one_version_stale(folder: RunFolder) -> None:
    """The learner refuses staler samples; the second step's samples precede the first update."""
    steps = metrics(folder, "step")
    assert all(step["staleness_max"] <= 1.0 for step in steps)
    assert steps[0]["staleness_max"] == 0.0
    assert steps[1]["staleness_max"] == 1.0
    assert steps[1]["rows"] > 0


@pytest.mark.parametrize("folder", ["carrying"], indirect=True)
def test_turns_continue_while_new_weights_are_loaded(folder: RunFolder) -> None:
    """The versions of the tokens never decrease within a trajectory."""
    versions_seen = set[int]()
    for trajectory in read_messages(folder, "head", TrajectoryFinished):
        versions = np.frombuffer(trajectory.record.versions, np.int32)
        generated = versions[np.frombuffer(trajectory.record.loss_mask, np.uint8).astype(bool)]
        assert (np.diff(generated) >= 0).all()
        versions_seen |= set(generated.tolist())
    assert versions_seen >= {0, 1, 3}  # the last evaluation uses version 3


@pytest.mark.nightly
@pytest.mark.parametrize("folder", ["aborting"], indirect=True)
def test_aborted_trajectories_are_counted_and_the_length_bias_reported(folder: RunFolder) -> None:
    summary = json.loads(folder.summary.read_text())
    lines = metrics(folder, "lengths")
    assert sum(line["aborted_trajectories"] for line in lines) == summary["trajectories_aborted"]
    for line in lines:
        assert line["taken_trajectories"] <= line["started_trajectories"]
        expected = line["taken_response_tokens"] / line["started_response_tokens"]
        assert line["length_bias"] == pytest.approx(expected)
