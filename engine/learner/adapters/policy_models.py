"""The models of a run on one rank: the policy, with or without adapters, and the frozen policy of the KL term."""

from pathlib import Path

from torch import nn

from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.run_config import RunConfig
from asterism.engine.learner.adapters.adapted_model import (
    BasePolicy,
    build_saved_model,
    start_from_folder,
    start_from_model,
)
from asterism.engine.learner.checkpoints.training_state import load_weights
from asterism.engine.learner.distributed import RankGroup
from asterism.engine.learner.sharding import build_sharded_model, load_sharded_model
from asterism.engine.model.causal_lm import CausalLM
from asterism.engine.model.lora_linear import list_adapters
from asterism.engine.model.lora_options import get_lora_options


class PolicyModels:
    """The models of one rank. Every rank makes the same calls, which raise the errors of load_sharded_model."""

    def __init__(self, run: RunConfig, folder: RunFolder, ranks: RankGroup) -> None:
        self._ranks = ranks
        self._has_cold_start = run.sft.is_enabled
        self._dtype = run.learner.dtype
        self._seed = run.seed
        self._lora = get_lora_options(run.learner)
        self._initial_checkpoint = folder.expand_path(run.model.checkpoint)
        self._first_checkpoint = folder.get_checkpoint_path(0)

    def load_initial(self) -> CausalLM:
        """Load the initial model, with adapters for RL or without adapters for the cold start."""
        if self._lora is None or self._has_cold_start:
            return load_sharded_model(self._initial_checkpoint, self._ranks, self._dtype)
        return start_from_folder(self._initial_checkpoint, self._ranks, self._dtype, self._lora, self._seed)

    def build(self, checkpoint: Path) -> CausalLM:
        """Build a model with the uninitialized parameters of a training checkpoint."""
        return build_saved_model(checkpoint, self._ranks, self._dtype, self._lora)

    def needs_adapters(self, model: CausalLM) -> bool:
        """Return whether RL trains adapters that the model of the cold start does not have."""
        return self._lora is not None and not list_adapters(model)

    def add_adapters(self, model: CausalLM) -> CausalLM:
        """Return a copy of the cold start's model, with adapters."""
        assert self._lora is not None
        return start_from_model(model, self._ranks, self._dtype, self._lora, self._seed)

    def load_reference(self, policy: CausalLM) -> nn.Module:
        """Load the policy before RL from the checkpoint of step 0, in float32. With adapters, return a view of `policy`
        that needs no memory."""
        if self._lora is not None:
            return BasePolicy(policy)
        with self._ranks.operation("load of the reference"):
            model = build_sharded_model(self._first_checkpoint, self._ranks, self._dtype)
            load_weights(self._first_checkpoint, model, self._ranks)
        return model.requires_grad_(False)
