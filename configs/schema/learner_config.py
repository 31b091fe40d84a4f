"""[learner]: the learner's processes and computation, and tables for optimizer, loss, memory, LoRA and checkpoints."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta
from msgspec.structs import replace

from asterism.configs.choices.optimizer_kinds import OPTIMIZER_KINDS
from asterism.configs.schema.schema_tree import (
    Count,
    FilePath,
    ImportPath,
    LearningRate,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Section,
    require,
    require_choice,
)

Beta = Annotated[float, Meta(ge=0, lt=1)]
LossMean = Literal["tokens", "group", "sequence", "constant"]
Checkpointing = Literal["none", "selective", "attention", "full"]  # modes, from most to least memory
LoraTarget = Literal["all", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class OptimizerConfig(Section, frozen=True):
    """The optimizer of RL, in float32."""

    name: str = "adamw"  # name of the optimizer: docs/learner.md
    lr: LearningRate = 1e-6  # learning rate after the warm-up
    final_lr_fraction: Annotated[float, Meta(ge=0, le=1)] = 1.0  # learning rate at the end, as a share of `lr`
    warmup_steps: Count = 5  # RL steps during which the learning rate rises linearly
    betas: tuple[Beta, Beta] = (0.9, 0.95)  # decay rates of AdamW's two moments
    weight_decay: NonNegativeFloat = 0.0  # decoupled weight decay of AdamW
    max_grad_norm: PositiveFloat = 1.0  # limit of the gradient norm; larger gradients are scaled down

    def __post_init__(self) -> None:
        require_choice("name", self.name, [name for name, kind in OPTIMIZER_KINDS.items() if kind.trains_policy])


class LossConfig(Section, frozen=True):
    """The loss of RL updates: docs/losses.md."""

    function: ImportPath = "grpo"  # "grpo", "gspo", "cispo", or a function by import path
    mean: LossMean = "group"  # mean of token losses
    # Lower clip limit of the probability ratio: 1 - clip_low.
    clip_low: Annotated[float, Meta(ge=0, le=1)] = 0.2
    clip_high: NonNegativeFloat = 0.28  # upper clip limit of the probability ratio: 1 + clip_high
    clip_dual: NonNegativeFloat = 0.0  # bound of the ratio for negative advantages, above 1; 0: none (release: 3)
    # Denominator of the ratio. recomputed: the learner's, with the weights from the start of the step.
    # auto: the engine's if engine and learner compute in float32, else recomputed: docs/mismatch.md
    old_logprobs: Literal["auto", "engine", "recomputed"] = "auto"
    # Correction by importance weights. auto: tis for bfloat16.
    correction: Literal["auto", "none", "tis", "icepop", "decoupled"] = "auto"
    correction_low: NonNegativeFloat = 0.5  # lower limit of importance weights; icepop masks smaller ones
    correction_high: PositiveFloat = 2.0  # upper limit of importance weights; tis truncates larger ones, others mask
    log_ratio_limit: Annotated[float, Meta(gt=0, le=80)] = 20.0  # nats; a token with a larger log ratio has no gradient
    # The run ends if engine and learner differ by over 1 nat for a larger share of a minibatch's tokens.
    mismatch_limit: Annotated[float, Meta(ge=0, le=1)] = 0.1  # 0: no limit
    kl_coef: NonNegativeFloat = 0.0  # weight of the KL divergence to the weights before RL; needs a second model
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"  # estimator of the KL divergence
    entropy_coef: NonNegativeFloat = 0.0  # weight of the entropy bonus

    def __post_init__(self) -> None:
        require(
            self.clip_dual == 0 or self.clip_dual > 1,
            f"clip_dual must exceed 1, or be 0 for no dual clip: {self.clip_dual:g}",
        )
        require(
            self.correction_low < self.correction_high,
            f"correction_low = {self.correction_low:g} must be below correction_high = {self.correction_high:g}",
        )
        require(
            self.function != "gspo" or self.mean == "sequence",
            'function = "gspo" is a mean over sequences; set mean = "sequence"',
        )
        require(
            self.correction in ("auto", "none") or self.old_logprobs != "engine",
            f'correction = "{self.correction}" weights tokens by recomputed against engine probabilities; '
            'set old_logprobs = "recomputed"',
        )


class MemoryConfig(Section, frozen=True):
    """Memory of the learner: docs/learner.md."""

    micro_batch_tokens: PositiveInt = 16_384  # tokens per forward and backward pass
    # Activations that the backward pass recomputes, to save memory.
    activation_checkpointing: Checkpointing = "none"
    shared_prompts: bool = True  # RL computes a prompt of several trajectories once in each micro batch
    # State in main memory instead of the GPU. optimizer: weights, gradients and moments, for an update on the CPU.
    # between_steps: weights and moments while engines generate on the same GPU.
    offload: Literal["none", "optimizer", "between_steps"] = "none"
    # When ranks reduce gradients. once: after the last micro batch; needs 4 bytes per parameter on each rank.
    reduce_gradients: Literal["each_micro_batch", "once"] = "each_micro_batch"


class LoraConfig(Section, frozen=True):
    """RL trains low-rank adapters of the projections and freezes the weights: docs/learner.md."""

    rank: Count = 0  # rank of the adapters' matrices; 0: no adapters
    alpha: PositiveFloat = 32.0  # the adapters' product is scaled by alpha / rank
    targets: tuple[LoraTarget, ...] = ("all",)  # projections with adapters
    # Weights that engines receive. adapters: the frozen weights once, then only the adapters.
    publish: Literal["merged", "adapters"] = "merged"

    def __post_init__(self) -> None:
        targets = self.targets
        require(
            targets == ("all",) or (0 < len(targets) == len(set(targets)) and "all" not in targets),
            f'targets must be ["all"], or name projections once each: {list(targets)}',
        )
        require(
            self.publish == "merged" or self.rank > 0,
            'publish = "adapters" needs adapters: set rank, or publish = "merged"',
        )


class CheckpointsConfig(Section, frozen=True):
    every: PositiveInt = 10  # steps between checkpoints; the last step is always saved
    minutes: NonNegativeFloat = 0.0  # minutes after a save, from which the next end of a step saves; 0: no limit
    keep: PositiveInt = 2  # number of checkpoints to keep, besides those of the cold start and the last step
    # Steps between checkpoints with a transformers model; 0: each checkpoint has one: docs/learner.md
    export_every: Count = 0
    export_dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # dtype of exported weights; auto: learner.dtype


class LearnerConfig(Section, frozen=True):
    ranks: PositiveInt = 1  # learner processes per node
    threads: PositiveInt = 2  # CPU threads per rank
    device: Literal["cpu", "cuda"] = "cpu"  # device of training; cuda: rank n of a node uses GPU n
    dtype: Literal["float32", "bfloat16"] = "float32"  # dtype of products; the learner's state is float32
    dp_replicate: PositiveInt = 1  # copies of the model, each sharded over an equal part of all ranks
    minibatches: PositiveInt = 1  # optimizer updates per step
    collective_timeout_s: PositiveFloat = 600.0  # timeout of a collective or of a rank's operation: docs/learner.md
    # Checkpoint of another run, step_NNNNNN, from whose float32 weights RL continues: docs/stages.md
    resume_from: FilePath = ""
    resume_optimizer: bool = True  # load the optimizer's moments of `resume_from`; false: moments start at 0
    # Compile the layers, and on GPUs the output head, with torch.compile; needs a compiler. auto: on GPUs
    compile: bool | Literal["auto"] = "auto"
    # Dtype of the logits of a bfloat16 model. auto: float32 on GPUs, bfloat16 on CPUs: docs/mismatch.md
    head_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    peak_tflops: NonNegativeFloat = 0.0  # peak TFLOP/s of a rank's device, for the metric mfu; 0: no such metric
    optimizer: OptimizerConfig = OptimizerConfig()
    loss: LossConfig = LossConfig()
    memory: MemoryConfig = MemoryConfig()
    lora: LoraConfig = LoraConfig()
    checkpoints: CheckpointsConfig = CheckpointsConfig()

    def __post_init__(self) -> None:
        require(
            self.head_dtype != "bfloat16" or self.dtype == "bfloat16",
            'head_dtype = "bfloat16" needs dtype = "bfloat16"',
        )

    @property
    def compiles(self) -> bool:
        return self.device == "cuda" if self.compile == "auto" else self.compile

    @property
    def has_float32_logits(self) -> bool:
        return self.device == "cuda" if self.head_dtype == "auto" else self.head_dtype == "float32"

    def resolve_auto(self, engine_dtype: str) -> LearnerConfig:
        """Replace "auto" in loss.old_logprobs, loss.correction and checkpoints.export_dtype."""
        loss, checkpoints = self.loss, self.checkpoints
        is_float32 = engine_dtype == self.dtype == "float32"
        exact = is_float32 and loss.correction in ("auto", "none")
        old_logprobs = ("engine" if exact else "recomputed") if loss.old_logprobs == "auto" else loss.old_logprobs
        default = "tis" if old_logprobs == "recomputed" and not is_float32 else "none"
        correction = default if loss.correction == "auto" else loss.correction
        export_dtype = self.dtype if checkpoints.export_dtype == "auto" else checkpoints.export_dtype
        return replace(
            self,
            loss=replace(loss, old_logprobs=old_logprobs, correction=correction),
            checkpoints=replace(checkpoints, export_dtype=export_dtype),
        )
