"""The objective of an RL update: the configured loss with optional terms, and the metrics of every loss.

The optional terms are a KL divergence to a frozen reference and an entropy bonus. Both are off by default, as in
rStar2-Agent (arXiv 2508.20722, section 3).
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from asterism.configs.schema.learner_config import LearnerConfig
from asterism.policies.losses import load_policy_loss
from asterism.policies.losses.mismatch import compute_correction, compute_mismatch_metrics
from asterism.policies.losses.policy_loss import LossInput, LossOutput, compute_policy_metrics


class PolicyObjective:
    def __init__(self, learner: LearnerConfig) -> None:
        """Load the loss of `learner`, after LearnerConfig.resolve_auto. Raises UnusableInput for an unknown loss."""
        self._learner = learner
        self._compute_loss = load_policy_loss(learner.loss.function)

    def compute(self, batch: LossInput, reference_logprobs_N: Tensor | None) -> LossOutput:
        """Compute the loss with importance weights, plus the optional terms. All metrics have different names."""
        learner = self._learner
        # Recomputed log probabilities are those before the step; the engine's are compared with the present ones.
        learner_logprobs_N = batch.logprobs_N if learner.loss.old_logprobs == "engine" else batch.old_logprobs_N
        correction = compute_correction(batch.old_logprobs_N, batch.behaviour_logprobs_N, learner)
        output = self._compute_loss(batch._replace(corrections_N=correction.weights_N))
        terms = compute_optional_terms(batch, reference_logprobs_N, learner)
        metrics = (
            compute_policy_metrics(batch),
            compute_mismatch_metrics(learner_logprobs_N, batch.behaviour_logprobs_N, correction),
            terms,
        )
        return LossOutput(
            loss=output.loss + terms.loss,
            token_means={**output.token_means, **_merge([each.token_means for each in metrics])},
            sequence_means=output.sequence_means,
            maxima={**output.maxima, **_merge([each.maxima for each in metrics])},
        )


def _merge(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {name: value for part in parts for name, value in part.items()}


def compute_optional_terms(batch: LossInput, reference_logprobs_N: Tensor | None, learner: LearnerConfig) -> LossOutput:
    """Compute kl_coef * KL(pi | pi_ref) - entropy_coef * entropy, as configured means without importance weights.

    `reference_logprobs_N` has no gradient, and is None without a KL term.
    """
    loss = batch.logprobs_N.new_zeros(())
    metrics: dict[str, Tensor] = {}
    if reference_logprobs_N is not None:
        kl_N = estimate_kl(
            batch.logprobs_N, reference_logprobs_N, learner.loss.kl_estimator, learner.loss.log_ratio_limit
        )
        loss = loss + learner.loss.kl_coef * batch.mean(kl_N)
        metrics["kl_reference"] = kl_N.detach().sum()
    if learner.loss.entropy_coef:
        loss = loss - learner.loss.entropy_coef * batch.mean(batch.entropies_N)
    return LossOutput(loss, token_means=metrics)


def estimate_kl(logprobs_N: Tensor, reference_N: Tensor, estimator: str, limit: float) -> Tensor:
    """Estimate KL(pi | pi_ref) of each token in nats, with d = log pi - log pi_ref within +-limit.

    k1 = d (its gradient has the expectation 0), k2 = d^2 / 2 (its gradient is that of the divergence),
    k3 = exp(-d) - 1 + d. Source: Schulman, "Approximating KL divergence", 2020; k3: GRPO, arXiv 2402.03300, equation 4.
    """
    differences_N = (logprobs_N - reference_N).clamp(-limit, limit)
    if estimator == "k1":
        return differences_N
    if estimator == "k2":
        return differences_N.square() / 2
    return torch.expm1(-differences_N) + differences_N
