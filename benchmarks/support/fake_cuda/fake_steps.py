"""Steps of the learner on fake CUDA: a model without values, a trainer, sequences, and the costs of one step.

Only processes that benchmarks/support/fake_cuda/__main__.py started can use it.
"""

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple

import torch

from asterism.configs.schema.algorithm import RlConfig, SftConfig
from asterism.configs.schema.learner_config import LearnerConfig
from asterism.configs.schema.run_config import RunConfig
from asterism.configs.schema.schema_tree import replace_keys
from asterism.engine.hf.model_config import DecoderConfig
from asterism.engine.learner.distributed import RankGroup
from asterism.engine.learner.sharding import build_sharded_model
from asterism.engine.learner.trainer import Trainer
from asterism.engine.model.causal_lm import CausalLM
from asterism.engine.model.lora_options import get_lora_options
from benchmarks.gpu.training import make_sequences
from benchmarks.support.fake_cuda.operation_costs import KernelCount, sum_counts
from benchmarks.support.fake_cuda.operation_log import Copy, MixedDevices, OperationLog, Sync

Part = Literal["layers", "attention", "ends", "head", "loss", "gradients", "optimizer", "checks", "other"]

# The first matching prefix of "module:function" gives the part.
_PLACES: tuple[tuple[str, Part], ...] = (
    ("asterism.engine.model.packed_attention:", "attention"),
    ("asterism.engine.model.causal_lm:Backbone.", "ends"),  # token embedding, and tables of the rotary embedding
    ("asterism.engine.model.causal_lm:CausalLM.", "ends"),  # the selection of the scored hidden states
    ("asterism.engine.model.rope:apply_rope", "layers"),
    ("asterism.engine.model.rope:", "ends"),
    ("asterism.engine.model.", "layers"),  # includes the last norm and the conversion of float32 parameters
    ("asterism.policies.losses.token_scores:", "head"),
    ("asterism.policies.losses.head_kernels:", "head"),
    ("asterism.policies.losses.", "loss"),
    ("asterism.engine.learner.loss_reduction:", "loss"),
    ("asterism.engine.learner.trainer:_build_loss_input", "loss"),
    ("asterism.engine.learner.trainer:Trainer._forward_backward", "gradients"),  # sums of gradients over micro batches
    ("asterism.engine.learner.trainer:Trainer._apply_gradients", "optimizer"),
    ("asterism.engine.learner.optimizers:", "optimizer"),
    ("asterism.engine.learner.distributed:", "checks"),  # checks for non-finite weights
)
DEVICE = torch.device("cuda", 0)
SEQUENCES = 4  # sequences per micro batch


class StepCosts(NamedTuple):
    """Costs of one step after warm-up steps, which create the optimizer's state and the compiled code."""

    parts: dict[Part, KernelCount]
    updates: int
    micro_batches: int
    syncs: list[Sync]
    copies: list[Copy]
    mixed: list[MixedDevices]
    peak_bytes: int  # highest bytes of live CUDA tensors
    peak_place: str

    @property
    def total(self) -> KernelCount:
        return sum_counts(list(self.parts.values()))


def build_fake_model(config: DecoderConfig, learner: LearnerConfig) -> CausalLM:
    """Build the model of a single learner rank: float32 parameters, without a mesh, with the configured adapters."""
    return build_sharded_model(config, RankGroup(device=DEVICE), learner.dtype, get_lora_options(learner))


def build_fake_trainer(
    config: DecoderConfig, learner: LearnerConfig, *, sft: SftConfig | None = None, ranks: RankGroup | None = None
) -> Trainer:
    """Build a trainer, with a reference model for a positive KL coefficient and adapters for a positive LoRA rank."""
    model = build_fake_model(config, learner)
    run = RunConfig(name="fake", rl=RlConfig(steps=1000), sft=sft or SftConfig(), learner=learner)
    trainer = Trainer(model, run, ranks or RankGroup(device=DEVICE))
    if learner.loss.kl_coef:
        frozen = build_fake_model(config, replace_keys(learner, {"lora.rank": 0}))
        trainer.set_reference(frozen.requires_grad_(False))
    return trainer


def measure_step_costs(
    log: OperationLog, step: Callable[[], dict[str, float]], micro_batches: int, updates: int = 1, warmups: int = 1
) -> StepCosts:
    """Record `step` after `warmups` unrecorded steps. Raises RuntimeError for a step without an update."""
    for _ in range(warmups):
        step()
    log.clear()
    metrics = step()
    if metrics.get("updates_skipped", 0.0):
        raise RuntimeError("the step skipped an update, so that the optimizer was not recorded")
    return StepCosts(
        parts=divide_by_part(log.counts),
        updates=updates,
        micro_batches=micro_batches,
        syncs=log.syncs,
        copies=log.copies,
        mixed=log.mixed,
        peak_bytes=log.memory.peak_bytes,
        peak_place=log.memory.peak_site.place,
    )


def measure_rl_step(
    log: OperationLog, config: DecoderConfig, tokens: int, learner: LearnerConfig, micro_batches: int = 2
) -> StepCosts:
    """Measure a GRPO step with micro batches of `tokens` tokens, in equal sequences, and one update.

    Other settings of `learner` keep their values.
    """
    learner = replace_keys(learner, {"device": "cuda", "memory.micro_batch_tokens": tokens, "minibatches": 1})
    trainer = build_fake_trainer(config, learner)
    sequences = make_sequences([tokens // SEQUENCES] * SEQUENCES * micro_batches, config.vocab_size, groups=4)
    return measure_step_costs(log, lambda: trainer.run_rl_step(sequences), micro_batches)


# ---------------------------------------------------------------- parts of a step


def find_part(module: str, function: str) -> Part:
    place = f"{module}:{function}"
    found: Part | None = next((part for prefix, part in _PLACES if place.startswith(prefix)), None)
    return found or "other"


def divide_by_part(counts: Mapping[tuple[str, str], KernelCount]) -> dict[Part, KernelCount]:
    """Sum the counts of each part. The keys of `counts` are module and function."""
    parts: dict[Part, KernelCount] = {}
    for place, count in counts.items():
        part = find_part(*place)
        parts[part] = parts.get(part, KernelCount()).plus(count)
    return parts
