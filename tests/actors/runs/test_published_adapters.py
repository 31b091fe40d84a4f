"""A run that publishes adapters equals a run that publishes merged weights, also after its processes were killed."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from asterism.configs.run_folder import RunFolder
from tests.actors.runs.running import (
    Start,
    from_cold_start_of,
    list_process_ids,
    metrics,
    read_conserved_summary,
    read_log_entries,
)
from tests.processes import processes_that_name

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(600)]
STEPS = 4
SETTINGS = (
    *(
        "learner.lora.rank=2",
        "learner.optimizer.lr=1e-3",
        "determinism=strict",
        f"rl.steps={STEPS}",
        "engine.num_engines=2",
    ),
    *("rl.prompts=4", "rl.rollouts=8", "evaluation.questions=2"),
)


def read_adapters(folder: RunFolder) -> dict[str, np.ndarray]:
    return load_file(folder.get_checkpoint_path(STEPS) / "adapter" / "adapter_model.safetensors")


def test_killed_engines_and_learners_get_the_base_and_the_newest_adapters(
    tmp_path: Path, start: Start, finished: RunFolder
) -> None:
    """Strict determinism and bit-identical engine weights make both runs train on the same tokens."""
    settings = (*from_cold_start_of(finished), *SETTINGS)
    undisturbed = start(tmp_path / "merged", *settings)
    undisturbed.succeed()
    run = start(tmp_path / "adapters", *settings, "learner.lora.publish=adapters")
    for step, name in ((1, "generator-0"), (2, "learner")):
        run.wait_for("step", step)
        run.signal(name)
    run.succeed()
    merged, folder = undisturbed.folder, run.folder
    assert [len(list_process_ids(folder, name)) for name in ("generator-0", "generator-1", "learner")] == [2, 1, 2]
    assert read_conserved_summary(folder)["trajectories_abandoned"] == 0
    found, expected = read_adapters(folder), read_adapters(merged)
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], each) for name, each in expected.items())
    assert any(each.any() for name, each in found.items() if "lora_B" in name)
    whole, small = ([step["publish_bytes"] for step in metrics(each, "step")] for each in (merged, folder))
    assert len(small) == STEPS
    assert len(set(whole)) == 1
    assert min(small) < 0.05 * whole[0]
    assert read_log_entries(folder, "weights.refused", "generator-1") == []
    assert not processes_that_name(str(folder.path))
