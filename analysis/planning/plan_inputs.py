"""What a plan is computed from, and the derived sizes that several parts of it use."""

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any, cast

import msgspec

from analysis.planning.activation_memory import Checkpointing
from analysis.planning.model_size import ModelSize, measure_model
from analysis.planning.planned_machines import Assumptions, PlannedMachines
from configs.schema import RunConfig
from engine.model.model_config import DecoderConfig

VALUE_BYTES = {"float32": 4, "bfloat16": 2}


class PlanInputs:
    """`checkpointing` replaces learner.activation_checkpointing."""

    def __init__(
        self,
        run: RunConfig,
        config: DecoderConfig,
        machines: PlannedMachines,
        assumptions: Assumptions | None = None,
        checkpointing: Checkpointing | None = None,
    ) -> None:
        self.run = run
        self.config = config
        self.machines = machines
        self.assumptions = assumptions or Assumptions()
        # Of a configuration without this key: no checkpointing.
        configured = cast("Checkpointing", getattr(run.learner, "activation_checkpointing", "none"))
        self.checkpointing: Checkpointing = checkpointing or configured

    def change(self, changes: Mapping[str, Any]) -> "PlanInputs":
        """With other values of configuration keys, such as {"learner.ranks": 2}. Raises ValueError if they are invalid."""
        changes = dict(changes)
        checkpointing = changes.pop("learner.activation_checkpointing", self.checkpointing)
        run = self.run
        for key, value in changes.items():
            section, _, name = key.partition(".")
            run = msgspec.structs.replace(
                run, **{section: msgspec.structs.replace(getattr(run, section), **{name: value})}
            )
        changed = PlanInputs(run, self.config, self.machines, self.assumptions, checkpointing)
        changed.size = self.size
        return changed

    @cached_property
    def size(self) -> ModelSize:
        return measure_model(self.config)

    # ---------------------------------------------------------------- learner

    @property
    def ranks(self) -> int:
        return self.run.learner.ranks * self.run.cluster.learner_nodes

    @property
    def learner_value_bytes(self) -> int:
        return VALUE_BYTES[self.run.learner.dtype]

    @property
    def micro_batch_tokens(self) -> int:
        """Of the largest micro batch: a longer sequence has its own."""
        return max(self.run.learner.micro_batch_tokens, self.run.sequence_tokens - 1)

    @property
    def micro_batches(self) -> int:
        """Of one rank and one update, estimated."""
        tokens = self.trained_tokens / self.run.learner.minibatches / self.ranks
        return max(1, math.ceil(tokens / self.micro_batch_tokens))

    # ---------------------------------------------------------------- trajectories of a step

    @property
    def mean_response_tokens(self) -> float:
        return self.assumptions.mean_tokens_share * self.run.response_tokens

    @property
    def mean_prompt_tokens(self) -> float:
        return self.assumptions.mean_tokens_share * (self.run.sequence_tokens - self.run.response_tokens)

    @property
    def mean_sequence_tokens(self) -> float:
        return self.mean_response_tokens + self.mean_prompt_tokens

    @property
    def generated_trajectories(self) -> int:
        return self.run.rl.started_groups * self.run.rl.rollouts

    @property
    def trained_trajectories(self) -> int:
        kept = self.run.kept_trajectories if self.run.roc.enabled else self.run.rl.rollouts
        return self.run.rl.prompts * kept

    @property
    def trained_tokens(self) -> float:
        """Per step, prompts included."""
        return self.trained_trajectories * self.mean_sequence_tokens

    # ---------------------------------------------------------------- engines

    @property
    def engine_value_bytes(self) -> int:
        return VALUE_BYTES[self.run.engine.dtype]

    @property
    def has_servers(self) -> bool:
        """Whether engines are SGLang servers."""
        return self.run.engine.kind == "sglang"

    @property
    def gpus_per_engine(self) -> int:
        return self.run.sglang.tensor_parallel * self.run.sglang.data_parallel if self.has_servers else 1

    @property
    def engines_per_gpu(self) -> int:
        """On the most loaded GPU."""
        if self.has_servers or not self.machines.gpus:
            return 1
        return math.ceil(self.run.engine.num_engines / self.machines.gpus)
