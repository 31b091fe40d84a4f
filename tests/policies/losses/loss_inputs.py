"""Loss inputs for tests, with neutral values for all fields that a test does not set."""

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
