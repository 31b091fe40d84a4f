"""Loss inputs for tests, with neutral values for all fields that a test does not set."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from asterism.policies.losses.policy_loss import LossInput

LOW, HIGH = 0.2, 0.28


def build_loss_input(logprobs_N: Tensor, behaviour_N: Tensor, advantages_N: Tensor, **settings: Any) -> LossInput:
    """Build a loss input. The default has one sequence and a mean over the tokens of this micro batch."""
    tokens = settings.pop("minibatch_tokens", max(1, len(logprobs_N)))
    defaults: dict[str, Any] = {
        "old_logprobs_N": behaviour_N,
        "entropies_N": torch.zeros_like(behaviour_N),
        "sequences_N": torch.zeros(len(behaviour_N), dtype=torch.int64),
        "num_sequences": 1,
        "weights_N": torch.full((len(behaviour_N),), 1.0 / tokens, dtype=torch.float64),
        "corrections_N": torch.ones_like(behaviour_N),
        "minibatch_sequences": 1,
        "max_response_tokens": 100,
        "clip_low": LOW,
        "clip_high": HIGH,
        "clip_dual": 0.0,
        "log_ratio_limit": 20.0,
    }
    return LossInput(
        logprobs_N=logprobs_N,
        behaviour_logprobs_N=behaviour_N,
        advantages_N=advantages_N,
        minibatch_tokens=tokens,
        **(defaults | settings),
    )


def build_sequences_input(
    logprobs: Sequence[Tensor],
    behaviour: Sequence[Tensor],
    advantages: Sequence[float],
    weights: Sequence[float],
    **settings: Any,
) -> LossInput:
    """Build a loss input of several sequences in float64, with one advantage and one token weight per sequence."""
    numbers = [number for number, each in enumerate(logprobs) for _ in each]
    advantages_N, weights_N = (
        torch.tensor([values[number] for number in numbers], dtype=torch.float64) for values in (advantages, weights)
    )
    settings |= {"sequences_N": torch.tensor(numbers, dtype=torch.int64), "num_sequences": len(logprobs)}
    return build_loss_input(
        torch.cat(list(logprobs)), torch.cat(list(behaviour)), advantages_N, weights_N=weights_N, **settings
    )
