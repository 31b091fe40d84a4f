"""Measures runs with `asterism run`: RL steps from one cold start on the CPU and on the device, and a large model.

A model with random weights, or after a short cold start, solves nothing, and equal rewards have no gradient. Therefore
these runs accept every group and alternate the advantages, whatever the rewards are.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.process_group import ROOT, build_command, build_environment
from benchmarks.gpu.result_file import Figures, measure_parts

if TYPE_CHECKING:
    import torch

_COMPARED = ("loss", "grad_norm", "reward")
_SECONDS = ("step_s", "train_s", "rollout_s", "weights_s")
_TRAINED = {
    "rl.group_filter": f"{__name__}:accept_group",
    "rl.advantage_estimator": f"{__name__}:alternate_advantages",
    "roc.enabled": "false",
    "evaluation.questions": 0,
    "log.verify": "false",
}
DEMO: Mapping[str, Any] = {
    **_TRAINED,
    **{"prepare.parameters.num_sft_dialogues": 1280, "sft.steps": 20, "rl.steps": 5},
}
# Width and heads of Qwen3-1.7B, 8 of its 28 layers, with the vocabulary of the demo: 0.4B parameters.
LARGE: Mapping[str, Any] = {
    **_TRAINED,
    "prepare.parameters": "{hidden_size = 2048, intermediate_size = 6144, num_layers = 8, num_heads = 16, "
    "num_kv_heads = 8, head_dim = 128, num_sft_dialogues = 64}",
    **{"sft.steps": 0, "rl.steps": 3, "engine.dtype": "bfloat16", "learner.dtype": "bfloat16"},
    **{
        "learner.optimizer.lr": 1e-6,
        "learner.memory.micro_batch_tokens": 16_384,
        "learner.checkpoints.every": 100,
        "learner.checkpoints.export_every": 100,
    },
}
QUICK: Mapping[str, Any] = {
    **_TRAINED,
    "prepare.parameters": "{num_train_questions = 64, num_test_questions = 16, num_sft_dialogues = 64}",
    **{"sft.steps": 2, "sft.batch_size": 16, "rl.steps": 2, "rl.prompts": 2, "rl.rollouts": 4},
}


def accept_group(rewards: Sequence[float]) -> bool:
    """Accept every group that is not empty; used as rl.group_filter."""
    return len(rewards) > 0


def alternate_advantages(rewards: Sequence[float]) -> list[float]:
    """Return 1, -1, 1, -1 and so on; used as rl.advantage_estimator."""
    return [(-1.0) ** number for number in range(len(rewards))]


def compare_demo(device: torch.device, settings: Mapping[str, Any]) -> Figures:
    """Compare RL steps with the learner on the CPU and on the device, both after one cold start on the device.

    The seeds are equal, so the first steps differ by rounding only. Later steps differ more: a rounded probability
    changes a sampled token.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        settings = {**settings, **make_cold_start(folder / "start", device.type, settings)}
        learners = {"device": device.type, "cpu": "cpu"}
        return measure_parts(
            {name: partial(_run_from_cold_start, folder, name, learner, settings) for name, learner in learners.items()}
        )


def _run_from_cold_start(folder: Path, name: str, learner: str, settings: Mapping[str, Any]) -> Figures:
    lines = run_asterism(folder / name, {**settings, "learner.device": learner})
    ends = {"first": lines[0], "last": lines[-1]}
    return {f"{name}_{end}_{key}": line[key] for end, line in ends.items() for key in _COMPARED}


def make_cold_start(runs: Path, device: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Run a cold start. Return settings of runs that continue from its last checkpoint with its questions."""
    run_asterism(runs, {**settings, "learner.device": device, "rl.steps": 0})
    demo = runs / "demo"
    questions = {f"data.{part}": demo / "data" / f"{part}.jsonl" for part in ("train", "test")}
    return {"sft.steps": 0, "model.checkpoint": demo / "checkpoints" / "step_000000", **questions}


def run_large(device: torch.device, settings: Mapping[str, Any]) -> Figures:
    """Measure a run with learner and embedded engine on one GPU. The seconds are those of the last step."""
    placed = {**settings, "learner.device": device.type, "engine.device": device.type}
    with tempfile.TemporaryDirectory() as folder:
        lines = run_asterism(Path(folder), placed)
    first, last = lines[0], lines[-1]
    figures = {key: last[key] for key in _SECONDS}
    return {"steps": float(len(lines)), **figures, "first_loss": first["loss"], "first_grad_norm": first["grad_norm"]}


def run_asterism(runs: Path, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Run `asterism run`. Return the lines of metrics.jsonl of the RL steps. Raises SystemExit if the run fails.

    The launcher prints on this process's stderr, so that its last lines are in the error of a section that is killed.
    """
    placed = {"runs_folder": runs, "sandbox.backend": "process", **settings}
    flags = [flag for key, value in placed.items() for flag in ("--set", f"{key}={value}")]
    command = build_command("-m", "asterism.actors.cli.main", "run", "configs/tiny.toml", *flags)
    environment = {**build_environment(), "PYTHONUNBUFFERED": "1"}
    code = subprocess.run(command, cwd=ROOT, env=environment, stdout=sys.stderr, check=False).returncode
    if code:
        raise SystemExit(f"asterism run ended with exit code {code}")
    lines = map(json.loads, (runs / "demo" / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == "step"]
