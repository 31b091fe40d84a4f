"""Losses of the policy by name: GRPO, GSPO, CISPO, and others by import path. Importing this package does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from asterism.configs.import_path import load_object

if TYPE_CHECKING:
    from asterism.policies.losses.policy_loss import PolicyLoss

LOSSES = {
    "grpo": "asterism.policies.losses.grpo:compute_grpo_loss",
    "gspo": "asterism.policies.losses.grpo:compute_gspo_loss",
    "cispo": "asterism.policies.losses.grpo:compute_cispo_loss",
}


def load_policy_loss(name: str) -> PolicyLoss:
    """`name`: name of a built-in loss, or an import path. Raises UnusableInput."""
    return cast("PolicyLoss", load_object(LOSSES.get(name, name), "learner.loss.function"))
