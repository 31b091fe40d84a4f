"""Memory of one rank of the learner: its state between steps, and the largest of three moments of a step.

at the logits       all activations and one chunk of logits; embedding or output matrix gathered
at the last layer   all activations; two layers gathered, the gradients of one not yet reduced
at the optimizer    nothing else: AdamW is one kernel without temporary tensors
"""

from typing import NamedTuple

from asterism.analysis.planning.activation_memory import FLOAT32_BYTES, ActivationMemory
from asterism.analysis.planning.model_size import ModelSize

MOMENTS = 2  # of AdamW
_PREFETCHED_LAYERS = 2  # the computing one and the next one


class RankShare(NamedTuple):
    """How a rank holds the model."""

    dp_shard: int = 1  # ranks that share the parameters of one copy
    value_bytes: int = 4  # of gathered parameters and of activations
    has_units: bool = False  # whether FSDP gathers parameters: with several ranks, or with an offloaded optimizer
    keeps_casts: bool = (
        False  # a rank without units keeps 16-bit copies of the layers from the forward to the backward pass
    )
    has_reference: bool = False  # a second, frozen model for the KL term
    offloads: bool = False  # learner.memory.offload = "optimizer" on a GPU: shards are in main memory
    adapters: int | None = None  # their number of parameters if only they are trained
    accumulates: bool = True  # whether an update has several micro batches, so that the next one finds gradients
    reduces_once: bool = False  # after the last one; until then the rank has gradients of all parameters


class RankMemory(NamedTuple):
    """Bytes. `parameters`, `moments` and `reference` stay between steps."""

    parameters: float
    gradients: float
    moments: float
    reference: float
    activations: float  # at the moment of the peak
    logits: float
    gathered: float
    moment: str

    @property
    def total(self) -> float:
        return sum(part for part in self if not isinstance(part, str))

    @property
    def held(self) -> float:
        """Between steps."""
        return self.parameters + self.moments + self.reference


def compute_rank_memory(size: ModelSize, share: RankShare, activations: ActivationMemory) -> RankMemory:
    """On the device of the rank, at the largest of the moments of a step, after the first one."""
    whole, whole_adapters = FLOAT32_BYTES * size.total, FLOAT32_BYTES * (share.adapters or 0)
    shard, adapters = (0.0 if share.offloads else each / share.dp_shard for each in (whole, whole_adapters))
    trained, whole_trained = (shard, whole) if share.adapters is None else (adapters, whole_adapters)
    at_start = 0.0  # gradients, before the first backward pass of an update
    if share.accumulates:
        at_start = whole_trained if share.reduces_once else trained
    reference = shard if share.has_reference else 0.0
    zero = RankMemory(shard + adapters, 0.0, MOMENTS * trained, reference, 0.0, 0.0, 0.0, "")
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
    """What a rank with `offloads` has in main memory, during the update on the CPU."""
    nothing = ActivationMemory(0.0, 0.0, 0.0, 0.0, 0.0)
    return compute_rank_memory(size, share._replace(offloads=False, has_units=False), nothing)


def _count_gathered_at_logits(size: ModelSize, share: RankShare) -> float:
    """The output unit, its gradient in float32, a chunk's summand of it, and the buffer of the last layer's gather."""
    gradient = FLOAT32_BYTES * size.output
    if share.value_bytes < FLOAT32_BYTES:
        gradient += share.value_bytes * size.output
    if not share.has_units:
        return gradient + _count_casts(size, share)
    return gradient + share.value_bytes * (size.output + size.largest_layer)


def _count_gathered_at_layer(size: ModelSize, share: RankShare) -> float:
    """Gathered layers, a buffer, the gradients of one layer, and the gradients in reduction, in float32: of a layer
    or of the output matrix. In a tied model also the embedding with its gradient."""
    if not share.has_units:
        return _count_casts(size, share)
    layers = (_PREFETCHED_LAYERS + 2) * share.value_bytes * size.largest_layer
    if share.offloads:  # the shard of a layer, before its conversion
        layers += FLOAT32_BYTES * size.largest_layer / share.dp_shard
    reduced = FLOAT32_BYTES * max(size.largest_layer, size.head)
    return layers + reduced + 2 * share.value_bytes * size.root


def _count_casts(size: ModelSize, share: RankShare) -> float:
    """The parameters of the layers in the dtype of computation, of a rank without units: of all layers, or of one."""
    if share.value_bytes == FLOAT32_BYTES:
        return 0.0
    return share.value_bytes * (size.total - size.ends if share.keeps_casts else size.largest_layer)
