"""Memory of one rank of the learner: its state between steps, and the largest of three moments of a step.

at the logits       all activations and one chunk of logits; embedding or output matrix gathered
at the last layer   all activations; two layers gathered, the gradients of one not yet reduced
at the optimizer    the temporary tensor of AdamW, one number per parameter
"""

from typing import NamedTuple

from analysis.planning.activation_memory import FLOAT32_BYTES, ActivationMemory
from analysis.planning.model_size import ModelSize

MOMENTS = 2  # of AdamW
_PREFETCHED_LAYERS = 2  # the computing one and the next one


class RankShare(NamedTuple):
    """How a rank holds the model."""

    dp_shard: int = 1  # ranks that share the parameters of one copy
    value_bytes: int = 4  # of gathered parameters and of activations
    has_units: bool = False  # whether parameters are gathered: with several ranks, or in bfloat16
    has_reference: bool = False  # a second, frozen model for the KL term
    adapters: int | None = None  # their number of parameters if only they are trained
    accumulates: bool = True  # whether an update has several micro batches, so that the next one finds gradients


class RankMemory(NamedTuple):
    """Bytes. `parameters`, `moments` and `reference` stay between steps."""

    parameters: float
    gradients: float
    moments: float
    reference: float
    activations: float  # at the moment of the peak
    logits: float
    gathered: float
    optimizer: float
    moment: str

    @property
    def total(self) -> float:
        return sum(part for part in self if not isinstance(part, str))

    @property
    def held(self) -> float:
        """Between steps."""
        return self.parameters + self.moments + self.reference


def compute_rank_memory(size: ModelSize, share: RankShare, activations: ActivationMemory) -> RankMemory:
    """At the largest of the moments of a step, after the first one."""
    shard = FLOAT32_BYTES * size.total / share.dp_shard
    adapters = FLOAT32_BYTES * (share.adapters or 0) / share.dp_shard
    trained = shard if share.adapters is None else adapters
    at_start = trained if share.accumulates else 0.0  # gradients, before the first backward pass of an update
    reference = shard if share.has_reference else 0.0
    zero = RankMemory(shard + adapters, 0.0, MOMENTS * trained, reference, 0.0, 0.0, 0.0, 0.0, "")
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
        zero._replace(gradients=trained, optimizer=trained, moment="at the optimizer"),
    )
    return max(moments, key=lambda memory: memory.total)


def _count_gathered_at_logits(size: ModelSize, share: RankShare) -> float:
    """The output unit with its gradient, and the buffer of the last layer's gather."""
    if not share.has_units:
        return 0.0
    return share.value_bytes * (2 * size.output + size.largest_layer)


def _count_gathered_at_layer(size: ModelSize, share: RankShare) -> float:
    """Gathered layers, a buffer, the gradients of one layer, and the gradients in reduction, in float32: of a layer
    or of the output matrix. In a tied model also the embedding with its gradient."""
    if not share.has_units:
        return 0.0
    layers = (_PREFETCHED_LAYERS + 2) * share.value_bytes * size.largest_layer
    reduced = FLOAT32_BYTES * max(size.largest_layer, size.head)
    return layers + reduced + 2 * share.value_bytes * size.root
