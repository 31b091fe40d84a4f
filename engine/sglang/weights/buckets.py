"""Reads published weights by name, in the server's dtype, and splits them into buckets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from bus.messages import WeightsPublished
from engine.model.hf_checkpoint import load_model_config
from engine.model.qwen3 import Qwen3
from engine.weight_transfer.shared_memory import load_published


class PublishedLayout:
    def __init__(self, model: Path, dtype: torch.dtype) -> None:
        """`model`: checkpoint folder of the model that the learner publishes; the server uses the
        same parameter names.

        With tied embeddings there is no lm_head: the server uses the embedding.
        """
        with torch.device("meta"):
            parameters = Qwen3(load_model_config(model)).named_parameters()
        self._shapes = {name: parameter.shape for name, parameter in parameters}
        self._dtype = dtype

    def read(self, weights: WeightsPublished) -> dict[str, Tensor]:
        """Copies of the parameters in separate memory. Raises WeightsRefused."""
        parameters = {name: torch.empty(shape, dtype=self._dtype) for name, shape in self._shapes.items()}
        load_published(weights, parameters)
        return parameters


def split_into_buckets(parameters: Mapping[str, Tensor], bucket_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Keeps the order; a bucket exceeds `bucket_bytes` only if it holds a single parameter."""
    bucket: dict[str, Tensor] = {}
    filled_bytes = 0
    for name, parameter in parameters.items():
        if bucket and filled_bytes + parameter.nbytes > bucket_bytes:
            yield bucket
            bucket, filled_bytes = {}, 0
        bucket[name] = parameter
        filled_bytes += parameter.nbytes
    if bucket:
        yield bucket
