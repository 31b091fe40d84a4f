"""A run with [[stages]] survives a kill, ends a stage early by a rule, and trains on unsolved problems."""

import json
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from asterism.bus.messages import StartGroup, TrajectoryFinished
from asterism.configs.run_folder import RunFolder, StagesFolder
from asterism.engine.hf.weight_files import list_weight_files
from asterism.engine.learner.checkpoints.checkpoint_folders import get_tensors_folder, list_saved_steps
from asterism.engine.learner.checkpoints.training_state import read_whole_weights
from tests.actors.cli.invoking import read_output
from tests.actors.runs.running import ASTERISM, ROOT, SMALL, metrics, read_messages, start_command, wait_until

STAGES = {
    "short": """
name = "short"
dialogue.response_tokens = 96
log.curves = false
""",
    "early": """
name = "early"
log.curves = false
rl.steps = 9
early_stopping = { window_steps = 1, min_reward_gain = 9.0 }  # holds after step 2
dialogue.response_tokens = 128
""",
    "unsolved": """
name = "unsolved"
problems = "unsolved"
rl.steps = 2
""",
}
EARLY_END = 3  # a stage ends one step after its rule holds
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def start(folder: Path, model: Path, *options: str) -> "subprocess.Popen[str]":
    settings = (
        *SMALL,
        f"model.checkpoint={model}",
        "sft.batch_size=8",
        "rl.rollouts=2",
        "rl.prompts=24",
        "roc.enabled=false",
        "sft.steps=2",
        "sampling.temperature=0.3",
        f'runs_folder="{folder}"',
    )
    own = ("rl.steps", "log.curves")  # keys that the stages set
    overrides = [flag for setting in settings if not setting.startswith(own) for flag in ("--set", setting)]
    return start_command([*ASTERISM, "run", str(folder / "stages.toml"), *overrides, *options])


@pytest.fixture(scope="module")
def model(finished: RunFolder) -> Path:
    return finished.get_checkpoint_path(0)


@pytest.fixture(scope="module", params=[("early", "unsolved"), pytest.param(tuple(STAGES), marks=pytest.mark.nightly)])
def staged(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[StagesFolder]:
    """Return a run that was killed in its second stage and then resumed, from a model with a cold start."""
    folder = tmp_path_factory.mktemp("stages")
    text = (ROOT / "configs" / "tiny.toml").read_text().replace("steps = 60\n", "steps = 2\n")
    (folder / "stages.toml").write_text(text + "".join(f"\n[[stages]]{STAGES[name]}" for name in request.param))
    stages = StagesFolder(folder / "demo")
    second = stages.get_stage(2, request.param[1])
    with start(folder, model) as process:
        wait_until(lambda: bool(metrics(second, "step")), process, patience_s=600)
        process.kill()
    with start(folder, model, "--resume") as process:
        output, _ = process.communicate(timeout=400)
        assert process.returncode == 0, output
    yield stages


with_all_stages = pytest.mark.parametrize("staged", [tuple(STAGES)], indirect=True)


def list_groups(folder: RunFolder) -> list[StartGroup]:
    """Return the groups for training, in order of their starts."""
    return [group for group in read_messages(folder, "rollout-0", StartGroup) if group.purpose == "train"]


def read_weights(folder: RunFolder, step: int) -> dict[str, torch.Tensor]:
    names = ("model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight", "model.norm.weight")
    saved = get_tensors_folder(folder.get_checkpoint_path(step))
    shapes = {name: each.shape for name, each in _read_export(folder, step).items() if name in names}
    return read_whole_weights(saved, shapes)


def _read_export(folder: RunFolder, step: int) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    (path,) = list_weight_files(folder.get_checkpoint_path(step))
    return load_file(path)


def test_each_stage_begins_with_the_last_weights_of_the_previous_stage(staged: StagesFolder) -> None:
    stages = staged.list_begun()
    for before, after in pairwise(stages):
        end, begin = read_weights(before, list_saved_steps(before.checkpoints)[-1]), read_weights(after, 0)
        assert len(end) == 3
        assert all(torch.equal(end[name], begin[name]) for name in end)
    assert [bool(metrics(folder, "sft")) for folder in stages] == [True, *[False] * (len(stages) - 1)]


def test_a_rule_ends_a_stage_and_its_last_step_is_saved(staged: StagesFolder) -> None:
    folder = staged.list_begun()[-2]
    assert [line["step"] for line in metrics(folder, "step")] == list(range(1, EARLY_END + 1))
    assert list_saved_steps(folder.checkpoints)[-1] == EARLY_END
    assert _read_export(folder, EARLY_END)
    summary = json.loads(folder.summary.read_text())
    assert summary["replay_identical"] is True
    assert summary["pass1_end"] is not None  # the stage evaluates the model at its end


def test_the_last_stage_has_the_problems_that_the_event_log_shows_as_unsolved(staged: StagesFolder) -> None:
    """The run itself counts solved problems from its structured logs."""
    *_, before, last = staged.list_begun()
    rewards: defaultdict[int, dict[int, float]] = defaultdict(dict)
    for end in read_messages(before, "head", TrajectoryFinished):
        rewards[end.group_id][end.trajectory_id] = end.reward
    last_groups = {group.problem: group for group in sorted(list_groups(before), key=lambda group: group.group_id)}
    solved = {
        problem
        for problem, group in last_groups.items()
        if len(rewards[group.group_id]) == group.size and min(rewards[group.group_id].values()) > 0
    }
    rows = (staged.list_begun()[0].data / "train.jsonl").read_text().splitlines()
    expected = [row for number, row in enumerate(rows, 1) if f"train.jsonl:{number}" not in solved]
    written = (staged.path / "unsolved_unsolved.jsonl").read_text().splitlines()
    assert [json.loads(row) for row in written] == [json.loads(row) for row in expected]
    assert 0 < len(written) < len(rows)
    names = {group.problem for group in list_groups(last)}
    assert names
    assert all(name.startswith("unsolved_unsolved.jsonl:") for name in names)


@pytest.mark.nightly
@with_all_stages
def test_the_second_stage_continues_the_order_of_problems(staged: StagesFolder) -> None:
    first, second = ([group.problem for group in list_groups(folder)] for folder in staged.list_begun()[:2])
    assert not set(first) & set(second[:16])  # the first stage has 48 of the 64 problems


def test_the_report_shows_all_stages(staged: StagesFolder) -> None:
    staged.curves.unlink()
    assert read_output("report", staged.path).count("correct answers, sampled") == len(staged.list_begun())
    assert staged.curves.read_bytes().startswith(b"\x89PNG")


@pytest.mark.nightly
@with_all_stages
def test_a_stage_is_repeated_from_the_results_of_the_previous_stage(staged: StagesFolder, model: Path) -> None:
    first, second, third = staged.list_begun()
    kept = [(folder.metrics.read_text(), read_weights(folder, 2)) for folder in (first, second)]
    launched = third.launch_counter.stat().st_mtime_ns
    with start(staged.path.parent, model, "--from-stage", "unsolved", "--overwrite") as process:
        output, _ = process.communicate(timeout=400)
        assert process.returncode == 0, output
    assert third.launch_counter.stat().st_mtime_ns > launched
    assert [line["step"] for line in metrics(third, "step")] == [1, 2]
    end, begin = read_weights(second, EARLY_END), read_weights(third, 0)
    assert all(torch.equal(end[name], begin[name]) for name in end)
    for folder, (text, weights) in zip((first, second), kept, strict=True):
        assert folder.metrics.read_text() == text
        assert all(torch.equal(weights[name], each) for name, each in read_weights(folder, 2).items())
