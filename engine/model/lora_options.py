"""Options of low-rank adapters, without torch: for the learner, and for the checks and the plan of a run."""

from typing import NamedTuple

from asterism.configs.schema.learner_config import LearnerConfig, LoraTarget
from asterism.configs.schema.run_config import RunConfig
from asterism.engine.hf.model_config import DecoderConfig, UnsupportedModel

ATTENTION_TARGETS: tuple[LoraTarget, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP_TARGETS: tuple[LoraTarget, ...] = ("gate_proj", "up_proj", "down_proj")


class LoraOptions(NamedTuple):
    rank: int
    alpha: float
    targets: tuple[LoraTarget, ...]

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


def get_lora_options(learner: LearnerConfig) -> LoraOptions | None:
    """Return the options of the adapters, or None if all parameters are trained."""
    if learner.lora.rank == 0:
        return None
    targets = (*ATTENTION_TARGETS, *MLP_TARGETS) if learner.lora.targets == ("all",) else learner.lora.targets
    return LoraOptions(learner.lora.rank, learner.lora.alpha, targets)


def get_published_adapters(learner: LearnerConfig) -> LoraOptions | None:
    """Return the options of the adapters that engines receive, or None if engines receive whole weights."""
    return get_lora_options(learner) if learner.lora.publish == "adapters" else None


def check_lora_targets(config: DecoderConfig, options: LoraOptions) -> None:
    """Raise UnsupportedModel for adapters of experts."""
    sparse = next((layer for layer in range(config.num_layers) if config.has_experts(layer)), None)
    refused = [target for target in options.targets if target in MLP_TARGETS]
    if sparse is not None and refused:
        raise UnsupportedModel(
            f"learner.lora.targets: {', '.join(refused)} of layer {sparse} belong to experts, which cannot have adapters; "
            f"set learner.lora.targets = {list(ATTENTION_TARGETS)}"
        )


def count_adapter_parameters(config: DecoderConfig, options: LoraOptions) -> int:
    shapes = config.compute_weight_shapes().items()
    adapted = [shape for name, shape in shapes if name.endswith(tuple(f".{each}.weight" for each in options.targets))]
    return options.rank * sum(sum(shape) for shape in adapted)


def count_trained_parameters(config: DecoderConfig, run: RunConfig) -> tuple[int, int]:
    """Return the numbers of all and of trained parameters of the learner, for the stage that needs more memory.

    The cold start trains all parameters. Without a cold start, only adapters have gradients and moments.
    """
    total = config.count_parameters()
    options = get_lora_options(run.learner)
    if options is None or run.sft.is_enabled:
        return total, total
    adapters = count_adapter_parameters(config, options)
    return total + adapters, adapters
