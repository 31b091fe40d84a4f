"""The trainers of a run on one rank: from the initial weights, from a checkpoint, or from one of another run."""

from pathlib import Path

import structlog

from asterism.configs.integrity.file_manifest import DamagedFile
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema import RunConfig
from asterism.engine.learner.adapters.policy_models import PolicyModels
from asterism.engine.learner.distributed import RankGroup
from asterism.engine.learner.trainer import Trainer
from asterism.engine.model.causal_lm import CausalLM
from asterism.engine.model.tokenizer import check_vocabulary, load_tokenizer


class PolicyTrainers:
    """Every rank makes the same calls. They raise UnusableInput for an unusable checkpoint or tokenizer."""

    def __init__(self, run: RunConfig, folder: RunFolder, ranks: RankGroup) -> None:
        self.models = PolicyModels(run, folder, ranks)
        self._run = run
        self._ranks = ranks
        self._initial_checkpoint = folder.expand_path(run.model.checkpoint)
        self._other_run = folder.expand_path(run.learner.resume_from)

    def start(self) -> Trainer:
        """With the initial weights, before the cold start."""
        with self._ranks.operation("load of the weights"):
            return self._make(self.models.load_initial(), self._initial_checkpoint)

    def resume(self, checkpoint: Path) -> Trainer:
        """In the state of the checkpoint. Raises DamagedFile with the way to an older one."""
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
        """Step 0 of RL, with weights, random states and, as configured, moments of learner.resume_from."""
        trainer = self._load(self._other_run)
        if not self._run.learner.resume_optimizer:
            trainer.start_stage("rl")
        trainer.step = 0
        structlog.get_logger().info("training.continued", checkpoint=str(self._other_run), rank=self._ranks.rank)
        return trainer

    def _make(self, model: CausalLM, tokenizer_folder: Path) -> Trainer:
        check_vocabulary(model.config, load_tokenizer(tokenizer_folder))
        return Trainer(model, self._run, self._ranks)
