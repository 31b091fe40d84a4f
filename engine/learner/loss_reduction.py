"""Reduces losses and their metrics over the micro batches and ranks of a minibatch, by name."""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from asterism.configs.errors import UnusableInput
from asterism.engine.learner.distributed import RankGroup, all_reduce
from asterism.policies.losses.mismatch import describe_excessive_mismatch
from asterism.policies.losses.policy_loss import LossOutput


class MinibatchTotals(NamedTuple):
    """The totals of a minibatch over all ranks. Each total is at least 1."""

    tokens: int  # number of tokens in the loss
    sequences: int  # number of sequences with a token in the loss


class LossSums(NamedTuple):
    """The sums and maxima of each metric over a minibatch."""

    loss: float
    token_sums: dict[str, float]
    sequence_sums: dict[str, float]
    maxima: dict[str, float]


class OptimizerUpdate(NamedTuple):
    totals: MinibatchTotals
    sums: LossSums
    grad_norm: float  # norm of the gradients before clipping


def reduce_outputs(outputs: Sequence[LossOutput], ranks: RankGroup) -> LossSums:
    """Reduce this rank's `outputs` over all ranks. Raises UnusableInput if their metrics differ."""
    first = outputs[0]
    device = first.loss.device
    sums = all_reduce(ranks, torch.stack([_stack_sums(each, first) for each in outputs]).sum(0), ReduceOp.SUM)
    maxima = torch.stack([_stack(each.maxima, first.maxima, device) for each in outputs]).amax(0)
    if first.maxima:  # the cold start has no maxima
        all_reduce(ranks, maxima, ReduceOp.MAX)
    loss, *values = sums.tolist()
    return LossSums(
        loss=loss,
        token_sums=dict(zip(first.token_means, values, strict=False)),
        sequence_sums=dict(zip(first.sequence_means, values[len(first.token_means) :], strict=True)),
        maxima=dict(zip(first.maxima, maxima.tolist(), strict=True)),
    )


def _stack_sums(output: LossOutput, first: LossOutput) -> Tensor:
    loss = output.loss.detach().reshape(1).to(torch.float64)
    names = ((output.token_means, first.token_means), (output.sequence_means, first.sequence_means))
    return torch.cat([loss, *(_stack(values, expected, loss.device) for values, expected in names)])


def _stack(values: Mapping[str, Tensor], names: Mapping[str, Tensor], device: torch.device) -> Tensor:
    """Stack values in the order of `names`, in float64 on `device`: collectives need even an empty tensor there."""
    if set(values) != set(names):
        raise UnusableInput(
            f"learner.loss.function: metrics differ between micro batches: {', '.join(values)}; {', '.join(names)}"
        )
    stacked = [values[name].detach().reshape(()).to(device, torch.float64) for name in names]
    return torch.stack(stacked) if stacked else torch.zeros(0, dtype=torch.float64, device=device)


def check_mismatch(sums: LossSums, totals: MinibatchTotals, limit: float) -> None:
    """Raise UnusableInput for a mismatch above learner.loss.mismatch_limit."""
    if message := describe_excessive_mismatch(_compute_mismatch(sums, totals), limit):
        raise UnusableInput(message)


def _compute_mismatch(sums: LossSums, totals: MinibatchTotals) -> dict[str, float]:
    """Compute the mismatch of one minibatch. `maxima` has the lowest value with the opposite sign."""
    means = {name: value / totals.tokens for name, value in sums.token_sums.items() if _is_mismatch(name)}
    means["mismatch_mean"] = means.pop("mismatch")
    means["mismatch_confident"] = sums.token_sums["mismatch_confident"]  # a count of tokens, not a share
    tails = {name: value for name, value in sums.maxima.items() if _is_mismatch(name)}
    return means | tails | {"mismatch_lowest": -tails["mismatch_lowest"]}


def _is_mismatch(name: str) -> bool:
    return name.startswith(("mismatch", "correction"))


def compute_rl_metrics(updates: Sequence[OptimizerUpdate]) -> dict[str, float]:
    """Compute means over the tokens or sequences of all updates.

    The mismatch is that of the first minibatch. With several, "minibatch NUMBER: METRIC" is the mismatch of each. With
    learner.loss.old_logprobs = "engine", the mismatch of later minibatches includes the policy's own changes.
    """
    if not updates:
        return {"updates": 0.0}
    norms, all_sums = [update.grad_norm for update in updates], [update.sums for update in updates]
    tokens = sum(update.totals.tokens for update in updates)
    sequences = sum(update.totals.sequences for update in updates)
    first = all_sums[0]
    names = [name for name in first.token_sums if not _is_mismatch(name)]
    means = {name: sum(each.token_sums[name] for each in all_sums) / tokens for name in names}
    means["ratio_mean"] = means.pop("ratio")
    mismatches = [_compute_mismatch(update.sums, update.totals) for update in updates]
    by_minibatch = {
        f"minibatch {number}: {name}": value
        for number, mismatch in enumerate(mismatches, start=1)
        for name, value in mismatch.items()
        if len(updates) > 1
    }
    return {
        "updates": float(len(updates)),
        "updates_skipped": float(sum(not math.isfinite(norm) for norm in norms)),
        "loss": sum(each.loss for each in all_sums) / len(updates),
        "grad_norm": sum(norms) / len(updates),
        **means,
        **{name: sum(each.sequence_sums[name] for each in all_sums) / sequences for name in first.sequence_sums},
        **{name: max(each.maxima[name] for each in all_sums) for name in first.maxima},
        **mismatches[0],
        **by_minibatch,
    }


# ---------------------------------------------------------------- losses by file of the cold start


def sum_by_file(groups_N: Tensor, logprobs_N: Tensor, names: Sequence[str]) -> dict[str, Tensor]:
    """Return each file's sum of losses and number of tokens. `groups_N`: the number of each token's file."""
    if not names:
        return {}
    zeros_F = torch.zeros(len(names), dtype=torch.float64, device=logprobs_N.device)
    losses_F = zeros_F.index_add(0, groups_N, -logprobs_N.detach().double())
    tokens_F = zeros_F.index_add(0, groups_N, torch.ones_like(groups_N, dtype=torch.float64))
    sums = {f"{name}: loss": losses_F[number] for number, name in enumerate(names)}
    return sums | {f"{name}: tokens": tokens_F[number] for number, name in enumerate(names)}


def compute_file_losses(sums: Mapping[str, float], names: Sequence[str]) -> dict[str, float]:
    """Return the loss per token by file, without files that have no token."""
    tokens = {name: sums[f"{name}: tokens"] for name in names}
    return {name: sums[f"{name}: loss"] / count for name, count in tokens.items() if count}
