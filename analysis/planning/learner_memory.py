"""Computes the memory of one learner rank: its state between steps, and the largest of three moments of a step.

at the logits       all activations and one chunk of logits; embedding or output matrix gathered
at the last layer   all activations; two layers gathered, the gradients of one not yet reduced
at the optimizer    neither activations nor logits: a fused kernel has no temporary tensors
"""

from typing import NamedTuple

from asterism.analysis.planning.activation_memory import FLOAT32_BYTES, ActivationMemory
from asterism.analysis.planning.model_size import ModelSize

_PREFETCHED_LAYERS = 2  # gathered layers: the present one and the next one


class RankShare(NamedTuple):
    """Shares and dtypes in which a rank holds the model."""

    dp_shard: int = 1  # ranks that share the parameters of one copy
    value_bytes: int = 4  # size of a number in gathered parameters and in activations
    has_units: bool = False  # whether FSDP gathers parameters: with several ranks, or with an offloaded optimizer
    keeps_casts: bool = (
        False  # a rank without units keeps 16-bit copies of the layers from the forward to the backward pass
    )
    moments: int = 2  # float32 numbers of the optimizer per trained parameter
    has_reference: bool = False  # a second, frozen model for the KL term
    offloads: bool = False  # learner.memory.offload = "optimizer" on a GPU: shards are in main memory
    adapters: int | None = None  # number of adapter parameters if only adapters are trained
    accumulates: bool = True  # whether an update has several micro batches, so that later ones add to gradients
    reduces_once: bool = False  # whether only the last micro batch reduces; until then, the rank holds all gradients


class RankMemory(NamedTuple):
    """Bytes of one rank. `parameters`, `moments` and `reference` stay between steps."""

    parameters: float
    gradients: float
    moments: float
    reference: float
    activations: float  # activations at the moment of the peak
    logits: float
    gathered: float
    moment: str

    @property
    def total(self) -> float:
        return sum(part for part in self if not isinstance(part, str))

    @property
    def held(self) -> float:
        """Bytes between steps."""
        return self.parameters + self.moments + self.reference


def compute_rank_memory(size: ModelSize, share: RankShare, activations: ActivationMemory) -> RankMemory:
    """Compute the memory on the rank's device at the largest moment of a step, after the first step."""
    whole, whole_adapters = FLOAT32_BYTES * size.total, FLOAT32_BYTES * (share.adapters or 0)
    shard, adapters = (0.0 if share.offloads else each / share.dp_shard for each in (whole, whole_adapters))
    trained, whole_trained = (shard, whole) if share.adapters is None else (adapters, whole_adapters)
    at_start = 0.0  # gradients before the first backward pass of an update
    if share.accumulates:
        at_start = whole_trained if share.reduces_once else trained
    reference = shard if share.has_reference else 0.0
    zero = RankMemory(shard + adapters, 0.0, share.moments * trained, reference, 0.0, 0.0, 0.0, "")
    moments = (
        zero._replace(
            gradients=at_start,
            activations=activations.layers + activations.ends,
            logits=activations.logits,
            gathered=_count_gathered_at_logits(size, share),
            moment="at the logits",
        ),
        zero._replace(
            gradients=at_start,
            activations=activations.at_last_layer,
            gathered=_count_gathered_at_layer(size, share),
            moment="at the last layer",
        ),
        zero._replace(gradients=trained, moment="at the optimizer"),
    )
    return max(moments, key=lambda memory: memory.total)


def compute_offloaded_memory(size: ModelSize, share: RankShare) -> RankMemory:
    """Compute the main memory of a rank with `offloads`, during the update on the CPU."""
    nothing = ActivationMemory(0.0, 0.0, 0.0, 0.0, 0.0)
    return compute_rank_memory(size, share._replace(offloads=False, has_units=False), nothing)


def _count_gathered_at_logits(size: ModelSize, share: RankShare) -> float:
    """Count the output unit, its float32 gradient, a chunk's part of that gradient, and a layer's gather buffer."""
    gradient = FLOAT32_BYTES * size.output
    if share.value_bytes < FLOAT32_BYTES:
        gradient += share.value_bytes * size.output
    if not share.has_units:
        return gradient + _count_casts(size, share)
    return gradient + share.value_bytes * (size.output + size.largest_layer)


def _count_gathered_at_layer(size: ModelSize, share: RankShare) -> float:
    """Count gathered layers, a buffer, one layer's gradients, and the float32 gradients in reduction (of a layer or of
    the output matrix); in a tied model also the embedding with its gradient."""
    if not share.has_units:
        return _count_casts(size, share)
    layers = (_PREFETCHED_LAYERS + 2) * share.value_bytes * size.largest_layer
    if share.offloads:  # the shard of a layer, before its conversion
        layers += FLOAT32_BYTES * size.largest_layer / share.dp_shard
    reduced = FLOAT32_BYTES * max(size.largest_layer, size.head)
    return layers + reduced + 2 * share.value_bytes * size.root


def _count_casts(size: ModelSize, share: RankShare) -> float:
    """Count the cast layers of a rank without units, in the dtype of computation: all layers, or one."""
    if share.value_bytes == FLOAT32_BYTES:
        return 0.0
    return share.value_bytes * (size.total - size.ends if share.keeps_casts else size.largest_layer)
