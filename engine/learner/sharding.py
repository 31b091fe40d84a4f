"""Sharded models of the learner: FSDP units, and loading without a whole model on any rank.

A unit gathers its parameters before its forward pass and again before its backward pass. Units:

    each decoder layer
    the embedding             untied models; freed during the layers, and not gathered for the backward pass
    the output matrix         untied models; gathered once per micro batch, from its forward to its backward pass
    the last norm, and the embedding of tied models, which is the output matrix too: one unit, used twice; gathered from
                              the start of the forward to the end of the backward pass

Parameters, gradients and the optimizer's state are float32 shards. With learner.dtype = "bfloat16" the gathered copies are
bfloat16, and gradients are reduced in float32. A single rank has no units: its layers convert the float32 parameters where
they compute (engine/model/layers.py), which saves the copies of a gather. With learner.memory.offload = "optimizer" the shards are in main memory: a unit is
copied to the GPU before it is gathered, and its reduced gradients are copied back.
"""

from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from asterism.configs.learner_options import LearnerConfig
from asterism.engine.learner.distributed import RankGroup
from asterism.engine.model.causal_lm import CausalLM
from asterism.engine.model.hf_checkpoint import fill_parameters
from asterism.engine.model.lora.lora_linear import add_adapters, list_base_parameters
from asterism.engine.model.lora.lora_options import LoraOptions
from asterism.engine.model.model_config import DecoderConfig, load_model_config


def load_sharded_model(
    folder: Path, ranks: RankGroup, dtype: str = "float32", lora: LoraOptions | None = None
) -> CausalLM:
    """In float32, on `state_device` of the rank, which reads only its own rows of the files. Every rank must call it.

    `dtype`: of computation. `lora`: add adapters without values. Raises CheckpointError or UnsupportedModel with the
    missing or invalid file.
    """
    model = build_sharded_model(folder, ranks, dtype, lora)
    fill_parameters(list_base_parameters(model), folder)
    return model


def build_sharded_model(
    source: Path | DecoderConfig, ranks: RankGroup, dtype: str = "float32", lora: LoraOptions | None = None
) -> CausalLM:
    """With uninitialized weights in float32, on `state_device` of the rank.

    `source`: the configuration, or a folder with config.json. `lora`: with adapters. Frozen and trained parameters share the
    units.
    """
    config = source if isinstance(source, DecoderConfig) else load_model_config(source)
    with torch.device("meta"):
        model = CausalLM(config)
    if lora is not None:
        add_adapters(model, lora)
    shard_model(model, ranks, dtype)
    model.to_empty(device=ranks.state_device)
    return model


def shard_model(model: CausalLM, ranks: RankGroup, dtype: str = "float32") -> None:
    """Shard the parameters, which are on the meta device or equal on every rank. A rank without a mesh keeps them whole.

    `dtype`: of computation.
    """
    if ranks.mesh is None:
        if dtype != "float32":
            model.set_compute_dtype(getattr(torch, dtype))
        return
    policy = MixedPrecisionPolicy()
    if dtype != "float32":
        policy = MixedPrecisionPolicy(param_dtype=getattr(torch, dtype), reduce_dtype=torch.float32)
    for layer in model.model.layers:
        _shard_unit(layer, ranks, policy)
    if model.lm_head is not None:
        _shard_unit(model.model.embed_tokens, ranks, policy).set_unshard_in_backward(False)
        # Its backward pass follows immediately.
        _shard_unit(model.lm_head, ranks, policy).set_reshard_after_forward(False)
    _shard_unit(model, ranks, policy)


def _shard_unit(module: nn.Module, ranks: RankGroup, policy: MixedPrecisionPolicy) -> FSDPModule:
    """Gradients are summed over ranks, not averaged: the loss is already divided by the tokens of the whole minibatch."""
    pin_memory = ranks.device.type == "cuda"
    offload = CPUOffloadPolicy(pin_memory=pin_memory) if ranks.offloads_optimizer else OffloadPolicy()
    unit = fully_shard(module, mesh=ranks.parameter_mesh, mp_policy=policy, offload_policy=offload)
    assert isinstance(unit, FSDPModule)
    if ranks.dims.num_data_ranks > 1:  # a single rank would divide by 1, which costs a pass over all gradients
        unit.set_gradient_divide_factor(1.0)
    unit.set_force_sum_reduction_for_comms(True)
    return unit


def set_gradient_reduction(model: nn.Module, ranks: RankGroup, learner: LearnerConfig, *, is_last: bool) -> None:
    """For the next backward pass; `is_last`: of an update.

    Gradients are reduced over the copies of the model after the last micro batch. Within a copy they are reduced after
    each one, or once; until then a rank holds float32 gradients of all parameters, as a rank with a whole copy does anyway.
    """
    if isinstance(model, FSDPModule):
        is_reduced_once = learner.memory.reduce_gradients == "once" or ranks.dims.dp_shard == 1
        model.set_requires_all_reduce(is_last)
        model.set_requires_gradient_sync(is_last or not is_reduced_once)


def reshard_parameters(model: nn.Module) -> None:
    """Free the gathered parameters of all units after a forward pass that no backward pass follows."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
