"""`asterism analyze entropy` reads a finished run."""

import json
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from asterism.actors.cli.entropy_command import choose_trajectories, get_tags
from asterism.bus.messages import TokenRecord
from asterism.configs.errors import UnusableInput
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.run_config import RunConfig
from tests.actors.cli.invoking import read_output

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
STEPS = 3


def compute_entropies(checkpoint: Path, record: TokenRecord) -> torch.Tensor:
    """Return the entropies in nats of the generated tokens, computed by transformers."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    ids = torch.from_numpy(np.frombuffer(record.token_ids, np.int32).astype(np.int64))
    is_generated = torch.from_numpy(np.frombuffer(record.loss_mask, np.uint8).astype(bool))
    with torch.no_grad():
        logits = model(ids[None]).logits[0, :-1]
    return torch.distributions.Categorical(logits=logits).entropy()[is_generated[1:]]


def test_reported_entropies_equal_those_of_transformers(finished: RunFolder, tmp_path: Path) -> None:
    result = tmp_path / "entropy.json"
    read_output("analyze", "entropy", f"{finished.path}:{STEPS}", "--trajectories", 8, "--json", result)
    statistics = json.loads(result.read_text())
    assert statistics["dialogues"] == 8
    assert {"reasoning", "call"} <= set(statistics["kinds"])
    trajectories = choose_trajectories(finished, STEPS, 8, seed=0)
    entropies = [compute_entropies(finished.get_checkpoint_path(STEPS), each.record) for each in trajectories]
    assert statistics["tokens"] == sum(map(len, entropies))
    assert statistics["mean_nats"] == pytest.approx(float(torch.cat(entropies).mean()), rel=1e-3)
    assert (finished.path / f"entropy_{STEPS:06d}.html").read_text().count("<h2>Trajectory") == 8
    assert (finished.path / f"entropy_{STEPS:06d}.png").exists()


def test_answer_tags_of_all_tasks_are_used() -> None:
    other = {"answer_open": "<x>", "answer_close": "</x>"}
    tasks = [{"name": "a", "data": "a.jsonl"}, {"name": "b", "data": "b.jsonl", "dialogue": other}]
    run = msgspec.convert({"name": "r", "tasks": tasks}, RunConfig)
    assert get_tags(run).answers == (("<answer>", "</answer>"), ("<x>", "</x>"))


def test_only_trajectories_of_the_step_are_chosen(finished: RunFolder) -> None:
    chosen = choose_trajectories(finished, 1, 5, seed=3)
    assert len(chosen) == 5
    versions = [np.frombuffer(each.record.versions, np.int32) for each in chosen]
    assert {version for each in versions for version in each.tolist()} == {-1, 1}
    assert chosen == choose_trajectories(finished, 1, 5, seed=3)
    with pytest.raises(UnusableInput, match=r"no trajectory of step 9 is logged; logged steps: 0, 1, 2, 3"):
        choose_trajectories(finished, 9, 5, seed=0)
