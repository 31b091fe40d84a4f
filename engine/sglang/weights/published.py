"""The published weights as a server wants them: by name, in its dtype, in buckets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from bus.messages import WeightsPublished
from engine.checkpoint import load_config
from engine.qwen3 import Qwen3
from engine.weights import load_published


class PublishedLayout:
    def __init__(self, model: Path, dtype: torch.dtype) -> None:
        """`model` is the folder of a checkpoint: the learner publishes the parameters of a model like this, by names
        that the server knows. With tied embeddings there is no lm_head among them; the server's is the embedding.
        """
        with torch.device("meta"):
            parameters = Qwen3(load_config(model)).named_parameters()
        self._shapes = {name: parameter.shape for name, parameter in parameters}
        self._dtype = dtype

    def read(self, weights: WeightsPublished) -> dict[str, Tensor]:
        """Copies, each with memory of its own. Raises WeightsRefused."""
        parameters = {name: torch.empty(shape, dtype=self._dtype) for name, shape in self._shapes.items()}
        load_published(weights, parameters)
        return parameters


def buckets(parameters: Mapping[str, Tensor], num_bytes: int) -> Iterator[dict[str, Tensor]]:
    """In order; each of at most so many bytes, or of one parameter."""
    bucket: dict[str, Tensor] = {}
    filled = 0
    for name, parameter in parameters.items():
        if bucket and filled + parameter.nbytes > num_bytes:
            yield bucket
            bucket, filled = {}, 0
        bucket[name] = parameter
        filled += parameter.nbytes
    if bucket:
        yield bucket
