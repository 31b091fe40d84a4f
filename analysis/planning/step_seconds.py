"""Estimates the seconds of an RL step by a roofline: generation, then training, or both at once with rl.max_staleness.

With rl.steps = 0 a step is one of the cold start, which only trains.

Not counted: tool calls, grading, the publication of weights, checkpoints, and the wait for the longest trajectory.
"""

import msgspec
from msgspec.structs import replace

from asterism.analysis.planning.memory_plan import compute_cache_tokens
from asterism.analysis.planning.plan_inputs import PlanInputs
from asterism.analysis.simulation.cluster_model import GpuSpec, ModelShape, StepCostModel, estimate_roofline_cost
from asterism.engine.hf.model_config import DecoderConfig

_FLOPS_PER_PARAMETER = 6  # forward 2, backward 4
_FLOPS_PER_PAIR = 12  # FLOPs of a query-key pair, per layer and head value: two products, three passes


class StepSeconds(msgspec.Struct, frozen=True):
    """Times of a step, or None if the machine's rates are unknown. Without RL, generation takes 0 s and has no rate."""

    generation_s: float | None
    training_s: float | None
    training_flops: float
    running: int  # concurrent sequences of one copy of the model
    tokens_per_s: float | None  # rate of all engines together
    overlaps: bool  # whether training overlaps the generation of the next step

    @property
    def step_s(self) -> float | None:
        if self.generation_s is None or self.training_s is None:
            return None
        both = self.generation_s, self.training_s
        return max(both) if self.overlaps else sum(both)


def count_training_flops(parameters: float, tokens: float, attention: float = 0.0) -> float:
    """Count the FLOPs of forward and backward passes. `attention`: the FLOPs of `count_attention_flops`."""
    return _FLOPS_PER_PARAMETER * parameters * tokens + attention


def count_attention_flops(config: DecoderConfig, sequences: float, sequence_tokens: float) -> float:
    """Count the FLOPs of causal attention in forward and backward passes."""
    pairs = sequences * sequence_tokens**2 / 2
    return _FLOPS_PER_PAIR * config.num_layers * config.num_heads * config.head_dim * pairs


def compute_training_s(flops: float, devices: int, peak: float, mfu: float) -> float:
    """Return the seconds of training; `peak` is the FLOP/s of one device."""
    return flops / (devices * peak * mfu)


def estimate_step(inputs: PlanInputs) -> StepSeconds:
    flops = _count_step_flops(inputs)
    learner, engine = (inputs.machines.get_device(part.device) for part in (inputs.run.learner, inputs.run.engine))
    training_s = None
    if learner is not None:
        count = inputs.ranks if inputs.run.learner.device == "cuda" else inputs.run.cluster.learner_nodes
        training_s = compute_training_s(flops, count, learner.flops, inputs.assumptions.mfu)
    if not inputs.has_rl:
        return StepSeconds(0.0, training_s, flops, 0, None, overlaps=False)
    running, copies = _count_running(inputs), _count_copies(inputs)
    generation_s = tokens_per_s = None
    if engine is not None:
        cost = _estimate_cost(inputs, engine)
        held = inputs.mean_prompt_tokens + inputs.mean_response_tokens / 2
        tokens_per_s = copies * running / cost.compute_step_s(running, round(running * held))
        generation_s = inputs.generated_trajectories * inputs.mean_response_tokens / tokens_per_s
    return StepSeconds(generation_s, training_s, flops, running, tokens_per_s, inputs.run.rl.max_staleness > 0)


def _count_step_flops(inputs: PlanInputs) -> float:
    """Count a step's FLOPs with its passes without gradient: old log probabilities, and the reference model."""
    length = inputs.mean_sequence_tokens if inputs.has_rl else inputs.dialogue_tokens
    attention = count_attention_flops(inputs.config, inputs.trained_tokens / length, length)
    trained = count_training_flops(inputs.size.active, inputs.trained_tokens, attention)
    if not inputs.has_rl:
        return trained
    learner = inputs.run.learner.resolve_auto(inputs.run.engine.dtype)
    forward_passes = 1.0 if learner.loss.kl_coef else 0.0
    if learner.loss.old_logprobs == "recomputed":
        forward_passes += 1 - 1 / learner.minibatches
    return trained * (1 + forward_passes / 3)


def _count_copies(inputs: PlanInputs) -> float:
    """Count the copies of the model that generate at full speed: engines that share a device count as one."""
    run, nodes = inputs.run, inputs.run.cluster.nodes
    copies = nodes * run.engine.num_engines * run.servers.data_parallel
    if run.engine.device == "cpu":
        return nodes
    return copies if inputs.has_servers else min(copies, nodes * (inputs.machines.gpus or 1))


def _count_running(inputs: PlanInputs) -> int:
    """Return the concurrent sequences of one copy: bounded by trajectories, engine.max_running and the KV cache."""
    held = inputs.mean_prompt_tokens + inputs.mean_response_tokens / 2
    waiting = inputs.generated_trajectories / _count_copies(inputs)
    cache = compute_cache_tokens(inputs)
    fitting = inputs.run.engine.max_running if cache is None else cache // max(1.0, held)
    return max(1, int(min(inputs.run.engine.max_running, waiting, fitting)))


def _estimate_cost(inputs: PlanInputs, device: GpuSpec) -> StepCostModel:
    config, size = inputs.config, inputs.size
    tensor_parallel = inputs.run.servers.tensor_parallel
    shape = ModelShape(
        config.model_type,
        # A step with many sequences reads all experts, but no embedding of an untied model.
        parameters=size.total - (size.embedding if size.head else 0),
        layers=config.num_layers,
        heads=config.num_heads,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        bytes_per_value=inputs.engine_value_bytes,
    )
    cost = estimate_roofline_cost(shape, device, tensor_parallel)
    return replace(cost, token_s=cost.token_s * size.active / shape.parameters)
