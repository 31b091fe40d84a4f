"""The examples of docs/losses.md work."""

import re
from pathlib import Path

import pytest
import torch

from asterism.configs.load import load_run
from asterism.policies.groups.advantages import load_advantage_estimator
from asterism.policies.groups.group_filters import load_group_filter
from asterism.policies.losses import load_policy_loss
from tests.policies.losses.loss_inputs import build_loss_input

PAGE = Path(__file__).parents[3] / "docs" / "losses.md"
BATCH = build_loss_input(
    torch.tensor([-1.0, -2.0, -3.0], requires_grad=True),
    torch.tensor([-1.0, -2.0, -3.0]),
    torch.tensor([1.0, 1.0, -2.0]),
    sequences_N=torch.tensor([0, 0, 1]),
    num_sequences=2,
    minibatch_sequences=2,
    weights_N=torch.tensor([0.25, 0.25, 0.5], dtype=torch.float64),
)


def test_the_examples_are_loaded_and_compute(tmp_path: Path) -> None:
    code, toml, lengths = re.findall(r"```(?:python|toml)\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "training.py").write_text(code)
    (tmp_path / "run.toml").write_text(f'name = "some"\n{toml}')
    run = load_run(tmp_path / "run.toml")
    (tmp_path / "lengths.toml").write_text(f'name = "other"\n{lengths}')
    assert load_run(tmp_path / "lengths.toml").rl.overlong_penalty == 0.5
    output = load_policy_loss(run.learner.loss.function)(BATCH)
    assert output.loss.item() == pytest.approx(0.5)  # -(1 - 2) / 2 at ratio 1
    assert output.sequence_means["ratio_of_sequences"].item() == 2.0
    (gradient_N,) = torch.autograd.grad(output.loss, BATCH.logprobs_N)
    assert gradient_N.tolist() == pytest.approx([-0.25, -0.25, 1.0])
    assert load_advantage_estimator(run.rl)([0.0, 1.0]) == [-1.0, 0.0]
    assert [load_group_filter(run.rl)(rewards) for rewards in ([0.0, 1.0], [1.0, 1.0], [-1.0, 0.0])] == [
        True,
        False,
        False,
    ]
