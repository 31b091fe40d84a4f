"""The trainers of a run on one rank: from initial weights, from a checkpoint, or from another run's checkpoint."""

from pathlib import Path

import structlog

from asterism.configs.file_manifest import DamagedFile
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.run_config import RunConfig
from asterism.engine.hf.tokenizer import check_vocabulary, load_tokenizer
from asterism.engine.learner.adapters.policy_models import PolicyModels
from asterism.engine.learner.distributed import RankGroup
from asterism.engine.learner.trainer import Trainer
from asterism.engine.model.causal_lm import CausalLM


class PolicyTrainers:
    """The trainers of one rank. All ranks make the same calls, which raise UnusableInput for unusable files."""

    def __init__(self, run: RunConfig, folder: RunFolder, ranks: RankGroup) -> None:
        self.models = PolicyModels(run, folder, ranks)
        self._run = run
        self._ranks = ranks
        self._initial_checkpoint = folder.expand_path(run.model.checkpoint)
        self._other_run = folder.expand_path(run.learner.resume_from)

    def start(self) -> Trainer:
        """Return a trainer with the initial weights, before the cold start."""
        with self._ranks.operation("load of the weights"):
            return self._make(self.models.load_initial(), self._initial_checkpoint)

    def resume(self, checkpoint: Path) -> Trainer:
        """Return a trainer in a checkpoint's state. Raises DamagedFile with the command to use an older checkpoint."""
        try:
            return self._load(checkpoint)
        except DamagedFile as error:
            raise DamagedFile(f"{error}; `asterism run ... --resume` continues from an older checkpoint") from None

    def _load(self, checkpoint: Path) -> Trainer:
        trainer = self._make(self.models.build(checkpoint), checkpoint)
        with self._ranks.operation("load of the optimizer"):
            trainer.load(checkpoint)
        return trainer

    def continue_other_run(self) -> Trainer:
        """Return a trainer at step 0 of RL, with weights, random states and optional moments of learner.resume_from."""
        trainer = self._load(self._other_run)
        if not self._run.learner.resume_optimizer:
            trainer.start_stage("rl")
        trainer.step = 0
        structlog.get_logger().info("training.continued", checkpoint=str(self._other_run), rank=self._ranks.rank)
        return trainer

    def _make(self, model: CausalLM, tokenizer_folder: Path) -> Trainer:
        check_vocabulary(model.config, load_tokenizer(tokenizer_folder))
        return Trainer(model, self._run, self._ranks)
