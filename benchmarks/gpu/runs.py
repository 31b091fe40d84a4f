"""Whole runs with `asterism run`: the demo with its learner on the CPU and on the device, and a large model."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]
_COMPARED = ("loss", "grad_norm", "reward")
DEMO = {"rl.steps": 20, "evaluation.questions": 128}
# Qwen3-1.7B with the vocabulary of the demo.
LARGE = {
    **{"tiny.hidden_size": 2048, "tiny.intermediate_size": 6144, "tiny.num_layers": 28, "tiny.num_heads": 16},
    **{"tiny.num_kv_heads": 8, "tiny.head_dim": 128, "sft.steps": 0, "rl.steps": 3, "engine.dtype": "bfloat16"},
    **{"learner.dtype": "bfloat16", "learner.lr": 1e-6, "learner.micro_batch_tokens": 16_384},
    **{"learner.checkpoint_every": 100, "evaluation.questions": 16},
}
QUICK: Mapping[str, Any] = {
    **{"tiny.num_train_questions": 64, "tiny.num_test_questions": 16, "tiny.num_sft_dialogues": 200, "sft.steps": 2},
    **{"sft.batch_size": 16, "rl.steps": 2, "rl.prompts": 2, "rl.rollouts": 4, "evaluation.questions": 4},
}


def compare_demo(device: str, settings: Mapping[str, Any] = DEMO) -> dict[str, float | str]:
    """The first steps of the demo on the CPU and with the learner on the device, with equal seeds.

    The rewards of the last step differ more: a rounded probability changes a sampled token.
    """
    figures: dict[str, float | str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, learner in (("cpu", "cpu"), ("device", device)):
            lines = run_asterism(Path(folder) / name, {**settings, "learner.device": learner})
            figures |= {f"{name}_first_{key}": lines[0][key] for key in _COMPARED if key in lines[0]}
            figures[f"{name}_last_reward"] = lines[-1]["reward"]
    return figures


def run_large(device: str, settings: Mapping[str, Any] = LARGE) -> dict[str, float | str]:
    """Learner and embedded engine on one GPU. Seconds of the last step."""
    placed = {**settings, "learner.device": device, "engine.device": device}
    with tempfile.TemporaryDirectory() as folder:
        lines = run_asterism(Path(folder), placed)
    last = lines[-1]
    return {"steps": float(len(lines)), **{key: last[key] for key in ("step_s", "train_s", "rollout_s", "weights_s")}}


def run_asterism(runs: Path, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl of the RL steps. Raises SystemExit with the end of the output of a failed run."""
    placed = {"runs_folder": runs, "sandbox.backend": "process", **settings}
    flags = [flag for key, value in placed.items() for flag in ("--set", f"{key}={value}")]
    command = [sys.executable, "-m", "actors.cli.main", "run", "configs/tiny.toml", *flags]
    finished = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    if finished.returncode:
        raise SystemExit(f"asterism run failed:\n{(finished.stdout + finished.stderr)[-4000:]}")
    lines = map(json.loads, (runs / "demo" / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["kind"] == "step"]
