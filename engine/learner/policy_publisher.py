"""Publishes each version of the policy: its weights, and a probe with which engines are compared."""

import time
from collections.abc import Sequence

from msgspec.structs import replace

from asterism.bus.messages import WeightsPublished
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.run_config import RunConfig
from asterism.engine.learner.adapters.adapter_publisher import AdapterPublisher, build_publisher
from asterism.engine.learner.batches.training_sequence import SequenceSource
from asterism.engine.learner.checkpoints.checkpoint_folders import ProbePrompts
from asterism.engine.learner.distributed import RankGroup
from asterism.engine.learner.weight_probe import WeightProber
from asterism.engine.learner.weight_publisher import WeightPublisher
from asterism.engine.model.causal_lm import CausalLM


class PolicyPublisher:
    """The publisher of one rank. Every rank makes the same calls."""

    def __init__(self, run: RunConfig, folder: RunFolder, ranks: RankGroup) -> None:
        self._run, self._folder, self._ranks = run, folder, ranks
        self._prober = WeightProber(run.seed, ranks)
        self._publisher: WeightPublisher | AdapterPublisher | None = None

    @property
    def prompts(self) -> ProbePrompts | None:
        """The prompts of the probe, which a checkpoint of the current step contains."""
        return self._prober.prompts

    def restore_prompts(self, prompts: ProbePrompts | None) -> None:
        """Use the prompts of the checkpoint from which training resumes."""
        self._prober.prompts = prompts

    def choose_prompts(self, step: int, sequences: Sequence[SequenceSource]) -> None:
        """See WeightProber.choose_prompts."""
        self._prober.choose_prompts(step, sequences)

    def publish(self, model: CausalLM, version: int) -> tuple[WeightsPublished | None, dict[str, float]]:
        """Publish a version; return the leading rank's message for the engines, and `publish_s` and `probe_s`."""
        began = time.monotonic()
        with self._ranks.operation("publish"):
            published = self._get_publisher(model).publish(version)
        written = time.monotonic()
        probe = self._prober.measure(model)
        times = {"publish_s": written - began, "probe_s": time.monotonic() - written}
        return None if published is None else replace(published, probe=probe), times

    def get_num_bytes(self, model: CausalLM) -> int:
        """Return the bytes of a publication."""
        return self._get_publisher(model).num_bytes

    def close(self) -> None:
        """Remove the published weights."""
        if self._publisher is not None:
            self._publisher.close()

    def _get_publisher(self, model: CausalLM) -> WeightPublisher | AdapterPublisher:
        if self._publisher is None:
            self._publisher = build_publisher(self._run, self._folder.shared_memory, model, self._ranks)
        return self._publisher
