"""Training on 1, 2 and 4 ranks gives the same gradients and weights, in whatever way the parameters are sharded."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from engine.learner.distributed import gather_full_parameters
from tests.engine.learner.train_ranks import RankScript
from tests.engine.learner.training_examples import trainable_model

pytestmark = pytest.mark.slow


def run_ranks(ranks: int, module: str, *arguments: str) -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *launcher, "-m", f"tests.engine.learner.{module}", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert done.returncode == 0, done.stderr


class Outcome(msgspec.Struct):
    parameters: dict[str, Tensor]
    gradients: dict[str, Tensor]  # of the last update
    metrics: list[dict[str, float]]
    state: dict[str, Any]


def train(ranks: int, script: RankScript) -> Outcome:
    run_ranks(ranks, "train_ranks", msgspec.json.encode(script).decode())
    folder = Path(script.out)
    return Outcome(
        torch.load(folder / "parameters.pt", weights_only=True),
        torch.load(folder / "gradients.pt", weights_only=True),
        json.loads((folder / "metrics.json").read_text()),
        json.loads((folder / "state.json").read_text()),
    )


def largest_relative_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Over the parameters: the largest difference of two elements, relative to the largest element."""
    return max(float((one[name] - other[name]).abs().max() / one[name].abs().max()) for name in one)


FOUR = pytest.param(4, marks=pytest.mark.nightly)


@pytest.mark.parametrize("ranks", [2, FOUR])
@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("stage", ["sft", "rl", "recomputed"])
def test_gradients_and_parameters_do_not_depend_on_the_ranks(
    stage: str, is_tied: bool, ranks: int, tmp_path: Path
) -> None:
    one = train(1, RankScript(stage, str(tmp_path / "one"), is_tied=is_tied))
    several = train(
        ranks, RankScript(stage, str(tmp_path / "several"), is_tied=is_tied, learner={"micro_batch_tokens": 40})
    )
    start = gather_full_parameters(trainable_model(is_tied=is_tied))
    assert largest_relative_difference(one.parameters, start) > 1e-3
    for name in ("parameters", "gradients"):
        x, y = getattr(one, name), getattr(several, name)
        print(name, largest_relative_difference(x, y), max(float((x[n]-y[n]).abs().max()) for n in x))
    assert 0
