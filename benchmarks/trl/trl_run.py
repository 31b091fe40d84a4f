"""Runs TRL's GRPOTrainer in its own environment, with the settings of a run."""

import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import msgspec

from asterism.actors.launch.child_processes import SPINS
from asterism.configs.schema.run_config import RunConfig
from asterism.policies.dialogue.chat_format import build_dialogue_format, build_prompt_segments
from asterism.tasks.math_python import MATH_PYTHON

_PROGRAM = Path(__file__).with_name("train_with_trl.py")
# As in the processes of a run: training is far slower with threads that spin for long if another process needs a core.
_ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": SPINS, "TRL_EXPERIMENTAL_SILENCE": "1"}


class TrlFailed(Exception):
    """TRL failed. `str(error)` has the command's exit code; its output is on stderr."""


def accept_any_rewards(_: Sequence[float]) -> bool:
    """Accept every group as a group filter (docs/losses.md). As in TRL, equal rewards have advantage 0."""
    return True


def has_trl(python: Path) -> bool:
    """Return whether this interpreter exists and finds TRL."""
    find = "import importlib.util, sys; sys.exit(importlib.util.find_spec('trl') is None)"
    try:
        return subprocess.run([str(python), "-c", find], check=False).returncode == 0
    except OSError:
        return False


class TrlSettings(msgspec.Struct, frozen=True):
    checkpoint: str
    data: str  # rows with "question" and "answer"
    prompt_head: str  # text before a question
    prefill: str  # start of each assistant turn
    seed: int
    threads: int
    steps: int
    prompts: int
    rollouts: int
    minibatches: int  # updates per step
    micro_batches: int  # micro batches per update, each with an equal number of rollouts
    response_tokens: int
    max_turns: int
    lr: float
    warmup_steps: int
    clip_low: float
    clip_high: float


def build_settings(run: RunConfig, threads: int, micro_batch_rows: int = 0) -> TrlSettings:
    """`micro_batch_rows`: the most rollouts of TRL's micro batches; 0: those of an update."""
    rows = run.rl.prompts * run.rl.rollouts // run.learner.minibatches
    task = run.resolved_tasks[0]
    dialogue_format = build_dialogue_format(task.get_dialogue(), MATH_PYTHON)
    return TrlSettings(
        checkpoint=run.model.checkpoint,
        data=task.data,
        prompt_head=build_prompt_segments("", dialogue_format)[0].text,
        prefill=dialogue_format.prefill,
        seed=run.seed,
        threads=threads,
        steps=run.rl.steps,
        prompts=run.rl.prompts,
        rollouts=run.rl.rollouts,
        minibatches=run.learner.minibatches,
        micro_batches=count_micro_batches(rows, micro_batch_rows or rows),
        response_tokens=run.dialogue.response_tokens,
        max_turns=run.dialogue.max_turns,
        lr=run.learner.optimizer.lr,
        warmup_steps=run.learner.optimizer.warmup_steps,
        clip_low=run.learner.loss.clip_low,
        clip_high=run.learner.loss.clip_high,
    )


def count_micro_batches(rows: int, most_rows: int) -> int:
    """Return the smallest number of equal micro batches with at most `most_rows` rows."""
    return next(count for count in range(-(-rows // most_rows), rows + 1) if rows % count == 0)


def run_trl(python: Path, settings: TrlSettings) -> list[dict[str, float]]:
    """Train with TRL. Return `step_s`, `reward`, `rows` and `tokens` of each step. Raises TrlFailed."""
    done = subprocess.run(
        [str(python), str(_PROGRAM), msgspec.json.encode(settings).decode()],
        env={**os.environ, "OMP_NUM_THREADS": str(settings.threads), **_ENVIRONMENT},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        raise TrlFailed(f"{_PROGRAM.name} in {python} ended with exit code {done.returncode}; see its output above")
    return json.loads(done.stdout.splitlines()[-1])
