"""Sharded models of the learner: FSDP units, and loading without a whole model on any rank.

A unit gathers its parameters before its forward pass and again before its backward pass. Units:

    each decoder layer
    the embedding             (untied models) freed during the layers, and not gathered for the backward pass
    the output matrix         (untied models) gathered once per micro batch, from its forward to its backward pass
    the last norm             in tied models with the embedding, which is also the output matrix; gathered from the
                              start of the forward pass to the end of the backward pass

Parameters, gradients and the optimizer's state are float32 shards. With learner.dtype = "bfloat16" the gathered copies
are bfloat16, and gradients are reduced in float32. A single rank has no units: its layers convert the float32
parameters where they compute (engine/model/layers.py), which saves the copies of a gather. With learner.memory.offload =
"optimizer" the shards are in main memory: units are copied to the GPU for a gather, reduced gradients are copied back.
"""

from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from asterism.configs.schema.learner_config import LearnerConfig
from asterism.engine.hf.model_config import DecoderConfig, load_model_config
from asterism.engine.learner.distributed import RankGroup
from asterism.engine.model.causal_lm import CausalLM
from asterism.engine.model.hf_checkpoint import fill_parameters
from asterism.engine.model.lora_linear import add_adapters, list_base_parameters
from asterism.engine.model.lora_options import LoraOptions


def load_sharded_model(
    folder: Path, ranks: RankGroup, dtype: str = "float32", lora: LoraOptions | None = None
) -> CausalLM:
    """Load float32 weights to `state_device`; the rank reads only its own rows of the files. Every rank must call it.

    `dtype`: dtype of computation. `lora`: adapters to add, without values. Raises CheckpointError or UnsupportedModel
    with the missing or invalid file.
    """
    model = build_sharded_model(folder, ranks, dtype, lora)
    fill_parameters(list_base_parameters(model), folder)
    return model


def build_sharded_model(
    source: Path | DecoderConfig, ranks: RankGroup, dtype: str = "float32", lora: LoraOptions | None = None
) -> CausalLM:
    """Build a model with uninitialized float32 weights on `state_device` of the rank.

    `source`: the configuration, or a folder with config.json. `lora`: adapters to add; units contain both frozen and
    trained parameters.
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
    """Shard parameters that are on the meta device or equal on every rank. A rank without a mesh keeps them whole.

    `dtype`: dtype of computation.
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
        # The backward pass of the output matrix follows immediately.
        _shard_unit(model.lm_head, ranks, policy).set_reshard_after_forward(False)
    _shard_unit(model, ranks, policy)


def _shard_unit(module: nn.Module, ranks: RankGroup, policy: MixedPrecisionPolicy) -> FSDPModule:
    """Sum gradients over ranks, without averaging: the loss is already divided by the minibatch's tokens."""
    pin_memory = ranks.device.type == "cuda"
    offload = CPUOffloadPolicy(pin_memory=pin_memory) if ranks.offloads_optimizer else OffloadPolicy()
    unit = fully_shard(module, mesh=ranks.parameter_mesh, mp_policy=policy, offload_policy=offload)
    assert isinstance(unit, FSDPModule)
    if ranks.dims.num_data_ranks > 1:  # a single rank would divide by 1, which costs a pass over all gradients
        unit.set_gradient_divide_factor(1.0)
    unit.set_force_sum_reduction_for_comms(True)
    return unit


def set_gradient_reduction(model: nn.Module, ranks: RankGroup, learner: LearnerConfig, *, is_last: bool) -> None:
    """Set the reduction of gradients for the next backward pass. `is_last`: the pass is the last of an update.

    Gradients are reduced over copies of the model after the last micro batch. Within a copy they are reduced after each
    micro batch, or only once; until then a rank has float32 gradients of all parameters, like a rank with a whole copy.
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
