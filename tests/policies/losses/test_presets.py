"""Each algorithm's preset agrees on one group with a direct computation of its paper's equations."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from asterism.configs.load import load_run
from asterism.configs.schema.run_config import RunConfig
from asterism.engine.learner.batches.minibatches import compute_token_weights
from asterism.policies.groups.advantages import load_advantage_estimator
from asterism.policies.losses.policy_objective import PolicyObjective
from tests.policies.losses.loss_inputs import build_sequences_input

REWARDS = [1.0, 0.0, 0.0, 1.0, 0.0, 0.0]
# log pi_old and log pi of each token. The ratios from 0.5 to 8 let each clip act on some tokens.
OLD = [[-1.0, -2.0], [-0.5], [-1.5, -0.3, -2.0], [-3.0, -0.2, -0.7, -1.1], [-0.4, -0.9], [-2.5]]
NOW = [[-0.7, -2.1], [-0.5001], [-1.2, -0.9, -1.9], [-0.9, -0.25, -0.6995, -1.4], [-0.1, -1.6], [-2.7]]
LIMIT = 64  # dialogue.response_tokens
G = len(REWARDS)
MEAN = sum(REWARDS) / G
STD = math.sqrt(sum((reward - MEAN) ** 2 for reward in REWARDS) / (G - 1))
NUM_TOKENS = sum(map(len, NOW))


class Paper(NamedTuple):
    """The equations of a paper: the advantage of a reward, and the objective J of the group."""

    advantage: Callable[[float], float]
    objective: Callable[[list[float]], float]  # J, computed from the group's advantages


def clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def ratio(i: int, t: int) -> float:
    return math.exp(NOW[i][t] - OLD[i][t])


def sum_clipped(i: int, advantage: float, low: float, high: float) -> float:
    ratios = [ratio(i, t) for t in range(len(NOW[i]))]
    return sum(min(r * advantage, clip(r, 1 - low, 1 + high) * advantage) for r in ratios)


def normalize(reward: float) -> float:
    return (reward - MEAN) / (STD + 1e-6)


def dapo(advantages: list[float]) -> float:
    """Compute equation 8 of DAPO. GRPO-RoC has the same objective over the kept trajectories."""
    return sum(sum_clipped(i, each, 0.2, 0.28) for i, each in enumerate(advantages)) / NUM_TOKENS


def dr_grpo(advantages: list[float]) -> float:
    return sum(sum_clipped(i, each, 0.2, 0.2) for i, each in enumerate(advantages)) / (G * LIMIT)


def gspo(advantages: list[float]) -> float:
    total = 0.0
    for i, advantage in enumerate(advantages):
        s = math.exp(sum(NOW[i][t] - OLD[i][t] for t in range(len(NOW[i]))) / len(NOW[i]))
        total += min(s * advantage, clip(s, 1 - 3e-4, 1 + 4e-4) * advantage)
    return total / G


def cispo(advantages: list[float]) -> float:
    total = 0.0
    for i, advantage in enumerate(advantages):
        total += sum(min(ratio(i, t), 5.0) * advantage * NOW[i][t] for t in range(len(NOW[i])))
    return total / NUM_TOKENS


PAPERS = {
    "grpo_roc": Paper(normalize, dapo),
    "dapo": Paper(normalize, dapo),
    "dr_grpo": Paper(lambda reward: reward - MEAN, dr_grpo),
    "gspo": Paper(normalize, gspo),
    "cispo": Paper(normalize, cispo),
}


class Sequence(NamedTuple):
    group_id: int
    num_loss_tokens: int


def load_preset(name: str, folder: Path) -> RunConfig:
    file = folder / "run.toml"
    file.write_text(
        f'name = "r"\npreset = "{name}"\ndialogue.response_tokens = {LIMIT}\nrl.overlong_buffer_tokens = 0\n'
        f'learner.loss.old_logprobs = "recomputed"\nlearner.loss.correction = "none"\nbus.queue_messages = 1_000_000\n'
    )
    return load_run(file)


def make_tensors(rows: list[list[float]]) -> list[torch.Tensor]:
    return [torch.tensor(row, dtype=torch.float64, requires_grad=True) for row in rows]


def compute_loss(run: RunConfig, advantages: list[float], logprobs: list[torch.Tensor]) -> torch.Tensor:
    weights = compute_token_weights([Sequence(0, len(each)) for each in NOW], run.learner.loss.mean, LIMIT)
    options: dict[str, Any] = {name: getattr(run.learner.loss, name) for name in ("clip_low", "clip_high", "clip_dual")}
    old = [each.detach() for each in make_tensors(OLD)]
    batch = build_sequences_input(logprobs, old, advantages, weights, minibatch_sequences=G, **options)
    return PolicyObjective(run.learner).compute(batch, None).loss


@pytest.mark.parametrize("name", PAPERS)
def test_a_presets_advantages_and_loss_are_those_of_its_paper(name: str, tmp_path: Path) -> None:
    run, paper = load_preset(name, tmp_path), PAPERS[name]
    advantages = list(load_advantage_estimator(run.rl)(REWARDS))
    assert advantages == pytest.approx([paper.advantage(reward) for reward in REWARDS])
    assert compute_loss(run, advantages, make_tensors(NOW)).item() == pytest.approx(
        -paper.objective(advantages), rel=1e-9
    )


def test_cispo_keeps_the_gradient_of_a_token_that_other_losses_clip(tmp_path: Path) -> None:
    """The paper's gradient of a token is clip(r) A / sum |o_i|. Token 0 of sequence 3 has the ratio 8.2 and A > 0."""
    gradients = {}
    for name in ("cispo", "dapo", "grpo_roc"):
        logprobs, run = make_tensors(NOW), load_preset(name, tmp_path)
        compute_loss(run, [normalize(reward) for reward in REWARDS], logprobs).backward()
        assert logprobs[3].grad is not None
        gradients[name] = logprobs[3].grad[0].item()
    assert gradients["cispo"] == pytest.approx(-5.0 * normalize(1.0) / NUM_TOKENS)
    assert gradients["dapo"] == gradients["grpo_roc"] == 0


def test_the_preset_of_grpo_roc_has_the_values_of_the_schema(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text('name = "r"\npreset = "grpo_roc"\n')
    (tmp_path / "b.toml").write_text('name = "r"\n')
    assert load_run(tmp_path / "a.toml") == load_run(tmp_path / "b.toml")
