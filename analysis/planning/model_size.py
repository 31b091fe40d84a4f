"""Counts a model's parameters by the units that the learner shards (engine/learner/sharding.py)."""

from collections import defaultdict
from math import prod
from typing import NamedTuple

from asterism.engine.hf.model_config import DecoderConfig

LAYER_PREFIX = "model.layers."


class ModelSize(NamedTuple):
    """Numbers of parameters of a model."""

    total: int
    embedding: int
    head: int  # the output matrix of an untied model; 0 for a tied one, which uses the embedding
    largest_layer: int
    num_layers: int
    largest_matrix: int
    active: int  # parameters that a token uses: only its selected experts, and no embedding if untied

    @property
    def output(self) -> int:
        """Parameters of the unit that computes logits."""
        return self.head or self.embedding

    @property
    def root(self) -> int:
        """Parameters of the unit that stays gathered from the start of the forward to the end of the backward pass."""
        return 0 if self.head else self.embedding

    @property
    def ends(self) -> int:
        """Parameters of the embedding and of the output matrix."""
        return self.embedding + self.head


def measure_model(config: DecoderConfig) -> ModelSize:
    sizes = {name: prod(shape) for name, shape in config.compute_weight_shapes().items()}
    layers: defaultdict[str, int] = defaultdict(int)
    for name, size in sizes.items():
        if name.startswith(LAYER_PREFIX):
            layers[name.split(".")[2]] += size
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    unused = 0.0
    if config.experts is not None:
        unused = experts * (1 - config.experts.experts_per_token / config.experts.num_experts)
    embedding, head = sizes["model.embed_tokens.weight"], sizes.get("lm_head.weight", 0)
    return ModelSize(
        total=sum(sizes.values()),
        embedding=embedding,
        head=head,
        largest_layer=max(layers.values()),
        num_layers=config.num_layers,
        largest_matrix=max(sizes.values()),
        active=sum(sizes.values()) - round(unused) - (embedding if head else 0),
    )
