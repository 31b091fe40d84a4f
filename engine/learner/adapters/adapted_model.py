"""Builds models with adapters for RL, from a folder or from the cold start's model, and their frozen policy."""

import math
from pathlib import Path

import torch
from torch import Tensor, nn

from asterism.engine.learner.checkpoints.checkpoint_folders import read_trainer_state
from asterism.engine.learner.distributed import RankGroup, get_local
from asterism.engine.learner.sharding import build_sharded_model, load_sharded_model
from asterism.engine.model.causal_lm import CausalLM
from asterism.engine.model.hf_checkpoint import fill_rows
from asterism.engine.model.lora_linear import list_adapters, list_base_parameters
from asterism.engine.model.lora_options import LoraOptions
from asterism.engine.model.packed_attention import Segments
from asterism.policies.losses.token_scores import ScoredTokens, TokenScores


def start_from_folder(folder: Path, ranks: RankGroup, dtype: str, options: LoraOptions, seed: int) -> CausalLM:
    """Load a model and add initial adapters. Every rank calls it. Raises the errors of load_sharded_model."""
    model = load_sharded_model(folder, ranks, dtype, options)
    initialize_adapters(model, seed)
    return model


@torch.no_grad()
def start_from_model(trained: CausalLM, ranks: RankGroup, dtype: str, options: LoraOptions, seed: int) -> CausalLM:
    """Build a model with initial adapters and a copy of the weights of `trained`, which has the same shards.

    FSDP cannot add parameters to a unit. The copy needs as much memory as the gradients of the cold start, which are
    free by then.
    """
    model = build_sharded_model(trained.config, ranks, dtype, options)
    sources = dict(trained.named_parameters())
    for name, parameter in list_base_parameters(model).items():
        get_local(parameter).copy_(get_local(sources[name]))
    initialize_adapters(model, seed)
    return model


def build_saved_model(checkpoint: Path, ranks: RankGroup, dtype: str, options: LoraOptions | None) -> CausalLM:
    """Build a model with uninitialized parameters for Trainer.load. A checkpoint of the cold start has no adapters."""
    is_adapted = read_trainer_state(checkpoint).stage == "rl"
    return build_sharded_model(checkpoint, ranks, dtype, options if is_adapted else None)


@torch.no_grad()
def initialize_adapters(model: nn.Module, seed: int) -> None:
    """Set A as nn.Linear does (Kaiming-uniform, a = sqrt(5)), equally for any number of ranks, and B to 0."""
    generator = torch.Generator().manual_seed(seed)
    for layer in list_adapters(model).values():
        whole_a = torch.empty(layer.lora_A.weight.shape)
        nn.init.kaiming_uniform_(whole_a, a=math.sqrt(5), generator=generator)
        fill_rows(layer.lora_A.weight, whole_a)
        get_local(layer.lora_B.weight).zero_()


class BasePolicy(nn.Module):
    """The frozen policy before RL, which computes with a model's weights without the adapters, and needs no memory."""

    def __init__(self, model: CausalLM) -> None:
        super().__init__()
        self._model = model

    @torch.no_grad()
    def forward(self, token_ids_BT: Tensor, tokens: ScoredTokens, segments: Segments | None = None) -> TokenScores:
        layers = list_adapters(self._model).values()
        for layer in layers:
            layer.is_enabled = False
        try:
            return self._model(token_ids_BT, tokens=tokens, segments=segments)
        finally:
            for layer in layers:
                layer.is_enabled = True
