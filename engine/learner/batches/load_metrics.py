"""The metrics of a step's speed: fill and balance of micro batches, model FLOP/s, memory, and load of the experts."""

import resource
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.distributed import ReduceOp

from asterism.engine.learner.batches.siblings import Siblings, find_siblings
from asterism.engine.learner.batches.training_sequence import RankShares, SequenceSource
from asterism.engine.learner.distributed import RankGroup, all_reduce
from asterism.engine.model.experts import compute_expert_load, take_expert_counts
from asterism.engine.model.training_flops import ForwardFlops

GIB = 1 << 30
_MAXRSS_UNIT = 1024  # bytes, on Linux


class MinibatchPlan(NamedTuple):
    """The micro batches of a minibatch on all ranks, to compute their metrics."""

    sequences: Sequence[SequenceSource]
    shares: RankShares
    shares_prompts: bool

    def list_siblings(self) -> list[list[list[Siblings]]]:
        """Return the siblings of each micro batch of each rank."""
        return [
            [find_siblings(self.sequences, indices, shares_prompts=self.shares_prompts) for indices in share]
            for share in self.shares
        ]


def compute_plan_metrics(
    minibatches: Sequence[MinibatchPlan], micro_batch_tokens: int, attention_tokens: float
) -> dict[str, float]:
    """Compute metrics of the micro batches of all ranks; empty without minibatches.

    fill                  tokens, over micro batches times `micro_batch_tokens`; above 1 with longer sequences
    imbalance             share of time in which ranks wait for the slowest rank of each round, by the costs of packing.py
    shared_prompt_share   tokens of shared prompts that are not computed again, over all tokens of the sequences
    """
    tokens, shared, num_micro_batches, mean_cost, longest_cost = 0, 0, 0, 0.0, 0.0
    for minibatch in minibatches:
        by_rank = minibatch.list_siblings()
        flat = [siblings for share in by_rank for each in share for siblings in each]
        tokens += sum(siblings.num_tokens for siblings in flat)
        shared += sum(_count_shared(siblings) for siblings in flat)
        num_micro_batches += sum(len(share) for share in by_rank)
        costs_RM = np.array(
            [[sum(each.compute_cost(attention_tokens) for each in one) for one in share] for share in by_rank]
        )
        mean_cost += float(costs_RM.mean(0).sum())
        longest_cost += float(costs_RM.max(0).sum())
    if not longest_cost:
        return {}
    return {
        "fill": tokens / (num_micro_batches * micro_batch_tokens),
        "imbalance": 1 - mean_cost / longest_cost,
        "shared_prompt_share": shared / (tokens + shared),
    }


def _count_shared(siblings: Siblings) -> int:
    return (len(siblings.indices) - 1) * siblings.prompt_tokens


def list_shared_prompts(minibatches: Sequence[MinibatchPlan]) -> list[int]:
    """Return the lengths of the prompts that are not computed again, one for each sequence that shares a prompt."""
    found = [each for minibatch in minibatches for share in minibatch.list_siblings() for one in share for each in one]
    return [siblings.prompt_tokens for siblings in found for _ in siblings.indices[1:]]


def compute_speed_metrics(
    sequences: Sequence[SequenceSource],
    flops: ForwardFlops,
    train_s: float,
    num_ranks: int,
    peak_tflops: float,
    shared_prompts: Sequence[int] = (),
) -> dict[str, float]:
    """Compute the tokens per second of all ranks, including prompts, and the MFU if `peak_tflops` is set.

    `shared_prompts`: the result of `list_shared_prompts`. Their tokens count in the speed, but not in the MFU.
    """
    trained = [each for each in sequences if each.num_loss_tokens]
    lengths = [each.num_tokens - 1 for each in trained]
    speed = {"trained_tokens_per_s": sum(lengths) / train_s}
    if not peak_tflops:
        return speed
    needed = flops.count_training(lengths, sum(each.num_loss_tokens for each in trained))
    needed -= flops.count_training(shared_prompts, 0)
    return speed | {"mfu": needed / (train_s * num_ranks * peak_tflops * 1e12)}


def reset_peak_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def measure_peak_memory(device: torch.device) -> dict[str, float]:
    """Return peak GiB of GPU tensors since the reset, or of resident main memory since the process started."""
    if device.type == "cuda":
        return {"peak_memory_gib": torch.cuda.max_memory_allocated(device) / GIB}
    return {"peak_memory_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_UNIT / GIB}


def compute_expert_metrics(model: nn.Module, ranks: RankGroup) -> dict[str, float]:
    """Compute metrics of all ranks' tokens since the last call; empty without experts. Every rank calls it."""
    counts_LX = take_expert_counts(model)
    if counts_LX is None:
        return {}
    load = compute_expert_load(all_reduce(ranks, counts_LX, ReduceOp.SUM))
    return {
        "expert_load": load.max_over_mean,
        "expert_load_worst": load.worst_max_over_mean,
        "experts_idle_share": load.idle_share,
    }
