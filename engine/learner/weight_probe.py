"""Fixed prompts with which the recorder checks that an engine computes with the published weights (docs/health.md).

A prompt ends before a token with a low probability: there, an update moves the log probability of the most likely
token. An engine computes the same number when it generates one greedy token, as it generates for a trajectory.

Shapes: P prompts, T tokens of all prompts, E hidden size, R rows of the output matrix on this rank.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed import ReduceOp
from torch.nn import functional

from asterism.bus.messages import WeightProbe
from asterism.engine.learner.batches.training_sequence import SequenceSource, TrainingSequence
from asterism.engine.learner.checkpoints.checkpoint_folders import ProbePrompts
from asterism.engine.learner.distributed import RankGroup, all_reduce, broadcast_object, get_local
from asterism.engine.learner.sharding import reshard_parameters
from asterism.engine.model.causal_lm import CausalLM
from asterism.engine.model.packed_attention import build_segments
from asterism.policies.seeded_random import shuffle_range

NUM_PROMPTS = 16
MAX_PROMPT_TOKENS = 64
RENEWAL_STEPS = 100  # the tokens after old prompts become too likely during training
_SURE_LOGPROB = math.log(0.9)

Prompts = list[NDArray[np.int32]]


class WeightProber:
    """A prober with current `prompts`, which are equal on all ranks and None before the first batch."""

    def __init__(self, seed: int, ranks: RankGroup) -> None:
        self.prompts: ProbePrompts | None = None
        self._seed, self._ranks = seed, ranks

    def choose_prompts(self, step: int, sequences: Sequence[SequenceSource]) -> None:
        """Choose prompts from the batch of `step` if there are no prompts or they are old. Every rank calls it.

        Raises OSError and ValueError as SequenceSource.load does, on the leading rank.
        """
        if not sequences or (self.prompts is not None and step < self.prompts.chosen_at + RENEWAL_STEPS):
            return
        chosen = pick_prompts(sequences, self._seed, step) if self._ranks.is_leader else []
        prompts = broadcast_object(self._ranks, tuple(prompt.tobytes() for prompt in chosen))
        self.prompts = ProbePrompts(step, prompts) if prompts else None

    def measure(self, model: CausalLM) -> WeightProbe | None:
        """Measure the probe with the current weights; None without prompts. Every rank calls it."""
        if self.prompts is None:
            return None
        chosen_at, prompts = self.prompts.chosen_at, self.prompts.prompts
        with self._ranks.operation("weight probe"):
            token_ids = [np.frombuffer(prompt, np.int32) for prompt in prompts]
            logprobs = compute_highest_logprobs(model, token_ids, self._ranks)
        return WeightProbe(chosen_at, prompts, tuple(logprobs.tolist()))


def pick_prompts(sequences: Sequence[SequenceSource], seed: int, step: int) -> Prompts:
    """Pick up to NUM_PROMPTS prompts, from as many sequences as possible; fewer if fewer tokens were generated."""
    order = shuffle_range(len(sequences), seed, step)[:NUM_PROMPTS]
    per_sequence = -(-NUM_PROMPTS // len(order))
    loaded = [sequences[index].load() for index in order]
    found = [prompt for each in loaded for prompt in _cut_prompts(each, per_sequence, seed)]
    return found[:NUM_PROMPTS]


def _cut_prompts(sequence: TrainingSequence, count: int, seed: int) -> Prompts:
    """Return the prompts that end before `count` generated tokens, preferably unlikely tokens."""
    generated = np.flatnonzero(sequence.loss_mask)
    unsure = generated[sequence.logprobs[generated] < _SURE_LOGPROB]
    positions = unsure if len(unsure) else generated
    order = shuffle_range(len(positions), seed, sequence.trajectory_id)[:count]
    ends = [int(positions[index]) for index in order]
    return [np.ascontiguousarray(sequence.token_ids[max(0, end - MAX_PROMPT_TOKENS) : end]) for end in ends]


@torch.no_grad()
def compute_highest_logprobs(model: CausalLM, prompts: Prompts, ranks: RankGroup) -> Tensor:
    """Return the log probability of the most likely token after each prompt, float64 [P]. Every rank calls it.

    The temperature is 1. Each rank multiplies only its own rows of the output matrix.
    """
    token_ids_T = torch.from_numpy(np.concatenate(prompts, dtype=np.int64)).to(ranks.device)
    segments = build_segments([len(prompt) for prompt in prompts])
    ends_P = (segments.offsets[1:].long() - 1).to(ranks.device)
    segments = segments._replace(
        offsets=segments.offsets.to(ranks.device), positions_T=segments.positions_T.to(ranks.device)
    )
    hidden_PE = model(token_ids_T[None], segments=segments)[0].index_select(0, ends_P).float()
    reshard_parameters(model)
    head = model.model.embed_tokens if model.lm_head is None else model.lm_head
    rows_RE = get_local(head.weight).to(ranks.device, torch.float32)
    # The padding gives a rank without rows one logit, of a token that does not exist.
    logits_PR = functional.pad((hidden_PE @ rows_RE.T).double(), (0, 1), value=-math.inf)
    highest_P = all_reduce(ranks, logits_PR.amax(-1), ReduceOp.MAX)
    sums_P = all_reduce(ranks, (logits_PR - highest_P[:, None]).exp().sum(-1), ReduceOp.SUM)
    return -(sums_P / ranks.dims.dp_replicate).log().cpu()
