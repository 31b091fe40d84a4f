"""The input of a plan: configuration, model, machines and assumptions; and sizes that several parts derive from it."""

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any, NamedTuple

import msgspec

from asterism.analysis.planning.model_size import ModelSize, measure_model
from asterism.analysis.simulation.cluster_model import A100, H100, H200, MI300X, GpuSpec
from asterism.configs.choices.engine_kinds import ENGINE_KINDS
from asterism.configs.schema.run_config import RunConfig
from asterism.configs.schema.schema_tree import replace_keys
from asterism.engine.hf.model_config import DecoderConfig
from asterism.engine.model.lora_options import count_adapter_parameters, get_lora_options

GIB = 2**30
VALUE_BYTES = {"float32": 4, "bfloat16": 2}
SEQUENCE_KEYS = ("dialogue.response_tokens", "evaluation.response_tokens")  # these bound the longest trajectory


# Memory in GB, bandwidth and dense bf16 rate from the data sheets of the SXM and OAM modules:
# https://www.nvidia.com/content/dam/en-zz/Solutions/Data-Center/a100/pdf/nvidia-a100-datasheet-us-nvidia-1758950-r4-web.pdf
# https://resources.nvidia.com/en-us-tensor-core/nvidia-tensor-core-gpu-datasheet (H100)
# https://www.nvidia.com/en-us/data-center/h200/
# https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html
GPUS = {"a100": A100, "h100": H100, "h200": H200, "mi300x": MI300X}


class PlannedMachines(msgspec.Struct, frozen=True):
    """Machines of a run. Memory and disk are per node; an unknown value is None and is not compared."""

    gpus: int | None = None  # number per node
    gpu: GpuSpec | None = None
    nodes: int = 1
    host_memory_bytes: float | None = None
    shared_memory_bytes: float | None = None  # size of /dev/shm
    disk_bytes: float | None = None  # free bytes on the disk of the run's folder
    cpu: GpuSpec | None = None  # measured rates of the processor, without memory

    def get_device(self, name: str) -> GpuSpec | None:
        return self.gpu if name == "cuda" else self.cpu


class Assumptions(NamedTuple):
    """Numbers that no file gives. They are printed with the plan."""

    mfu: float = 0.4  # share of the learner's peak rate
    mean_tokens_share: float = 0.5  # ratio of the mean response to dialogue.response_tokens
    gpu_reserve_gib: float = 2.0  # memory of a GPU for the CUDA context, NCCL, fragmentation
    process_gib: float = 0.5  # host memory: interpreter and libraries of one learner rank or engine


class PlanInputs:
    def __init__(
        self,
        run: RunConfig,
        config: DecoderConfig,
        machines: PlannedMachines,
        assumptions: Assumptions | None = None,
    ) -> None:
        self.run = run
        self.config = config
        self.machines = machines
        self.assumptions = assumptions or Assumptions()

    def change(self, changes: Mapping[str, Any]) -> "PlanInputs":
        """Return the inputs with changed keys, such as {"learner.ranks": 2}. Raises ValueError for invalid values."""
        changed = PlanInputs(replace_keys(self.run, changes), self.config, self.machines, self.assumptions)
        changed.size = self.size
        return changed

    @cached_property
    def adapters(self) -> int | None:
        """Number of adapter parameters, or None if RL trains all parameters."""
        options = get_lora_options(self.run.learner)
        return None if options is None else count_adapter_parameters(self.config, options)

    @cached_property
    def size(self) -> ModelSize:
        return measure_model(self.config)

    @property
    def has_rl(self) -> bool:
        """True if the planned step is an RL step; otherwise the step is one of the cold start."""
        return self.run.rl.steps > 0

    # ---------------------------------------------------------------- learner

    @property
    def ranks(self) -> int:
        return self.run.learner.ranks * self.run.cluster.learner_nodes

    @property
    def learner_value_bytes(self) -> int:
        return VALUE_BYTES[self.run.learner.dtype]

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens of the largest micro batch: a longer trajectory or dialogue has its own micro batch."""
        trajectory = self.run.trained_sequence_tokens if self.has_rl else 0
        dialogue = self.run.sft.max_tokens if self.run.sft.is_enabled else 0
        return max(self.run.learner.memory.micro_batch_tokens, trajectory - 1, dialogue - 1)

    @property
    def notes(self) -> tuple[str, ...]:
        """Further assumptions, in words."""
        if not self.run.sft.is_enabled or self.run.sft.max_tokens:
            return ()
        limit = f"at most {self.micro_batch_tokens:,} tokens, those of a micro batch"
        return (f"sft.max_tokens = 0 sets no limit to dialogues of the cold start; assumed: {limit}",)

    @property
    def micro_batches(self) -> int:
        """Estimated number of micro batches per rank and update."""
        tokens = self.trained_tokens / (self.run.learner.minibatches if self.has_rl else 1) / self.ranks
        return max(1, math.ceil(tokens / self.micro_batch_tokens))

    # ---------------------------------------------------------------- trajectories of a step

    @property
    def mean_response_tokens(self) -> float:
        return self.assumptions.mean_tokens_share * self.run.response_tokens

    @property
    def mean_prompt_tokens(self) -> float:
        return self.assumptions.mean_tokens_share * (self.run.trained_sequence_tokens - self.run.response_tokens)

    @property
    def mean_sequence_tokens(self) -> float:
        return self.mean_response_tokens + self.mean_prompt_tokens

    @property
    def generated_trajectories(self) -> int:
        return self.run.rl.started_groups * self.run.rl.rollouts if self.has_rl else 0

    @property
    def trained_trajectories(self) -> int:
        kept = self.run.kept_trajectories if self.run.roc.enabled else self.run.rl.rollouts
        return self.run.rl.prompts * kept

    @property
    def trained_tokens(self) -> float:
        """Tokens per step of RL, prompts included; without RL, the maximum per step of the cold start."""
        if self.has_rl:
            return self.trained_trajectories * self.mean_sequence_tokens
        sft = self.run.sft
        return float(sft.tokens_per_step or sft.batch_size * self.dialogue_tokens) if sft.is_enabled else 0.0

    @property
    def dialogue_tokens(self) -> int:
        """Tokens of the longest dialogue of the cold start; assumed if its length has no limit."""
        return self.run.sft.max_tokens or self.micro_batch_tokens

    # ---------------------------------------------------------------- engines

    @property
    def engine_value_bytes(self) -> int:
        return VALUE_BYTES[self.run.engine.dtype]

    @property
    def has_servers(self) -> bool:
        """True if engines are servers, which manage their memory."""
        return not ENGINE_KINDS[self.run.engine.kind].in_process

    @property
    def gpus_per_engine(self) -> int:
        return self.run.servers.tensor_parallel * self.run.servers.data_parallel

    @property
    def engines_per_gpu(self) -> int:
        """Engines on the most loaded GPU."""
        if self.has_servers or not self.machines.gpus:
            return 1
        return math.ceil(self.run.engine.num_engines / self.machines.gpus)
