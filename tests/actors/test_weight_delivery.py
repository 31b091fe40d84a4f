"""A real learner and a real engine: lost weights and lost adapters are reported, and delivered ones are not."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from asterism.actors.generator import Generator
from asterism.bus import messages as msg
from asterism.bus.addresses import BUFFER, LAUNCHER, RECORDER
from asterism.bus.transport.in_process import Hub
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.run_config import RunConfig
from asterism.engine.contract import Capacity
from asterism.engine.inference.embedded import EmbeddedEngine
from asterism.engine.learner.distributed import RankGroup
from asterism.engine.learner.learner_rank import LearnerRank
from asterism.engine.model.lora_options import get_published_adapters
from asterism.policies.recipe import Recipe
from asterism.policies.recorder import Recorder
from asterism.policies.step_evaluations import EvaluationPlan
from tests.engine.learner.adapters.adapted_models import SETTINGS
from tests.engine.learner.learner_runs import make_run, no_report, sweep_runs
from tests.engine.learner.learner_settings import change_learner
from tests.engine.learner.training_examples import rows, store_batch

pytestmark = [pytest.mark.slow, pytest.mark.real_clock, pytest.mark.timeout(120)]
STEPS = 5


class LossyEngine(EmbeddedEngine):
    """An engine that confirms each version of the weights, but does not load versions from `first_lost` on."""

    first_lost = 10_000

    async def load_weights(self, weights: msg.WeightsPublished) -> None:
        if weights.version < self.first_lost:
            await super().load_weights(weights)
            return
        thread = self._require_thread()
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        await self._post_and_wait(future, lambda: thread.load_weights(lambda _core: weights.version, future))
        self._version = weights.version


@pytest.fixture
def adapted(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[RunConfig, RunFolder]]:
    """Yield a run without LoRA for "full", or with LoRA and the publication that the parameter names."""
    run, folder = make_run(tmp_path, sft_steps=0)
    settings = {} if request.param == "full" else {**SETTINGS, "publish": request.param}
    yield replace(run, learner=change_learner(run.learner, **settings, minibatches=1, warmup_steps=0)), folder
    sweep_runs(tmp_path)


class Conversation:
    """The recipe and the recorder of a run, which exchange messages with its learner and its engine."""

    def __init__(self, hub: Hub, run: RunConfig) -> None:
        self._head = hub.join("head", 100)
        self._recipe = Recipe(EvaluationPlan(STEPS, 0), ("generator-0",))
        self._recorder = Recorder(STEPS, run.health)
        for decider in (self._recipe, self._recorder):
            decider.decide(0.0, msg.RunStarted(0, msg.BufferCursor()))
        self.reports: list[msg.HealthReported] = []
        self.metrics: list[dict[str, float]] = []

    def record(self, *events: msg.AnyMessage) -> None:
        for event in events:
            for message in [send.message for send in self._recorder.decide(0.0, event) if send.to == LAUNCHER]:
                if isinstance(message, msg.HealthReported):
                    self.reports.append(message)
                elif isinstance(message, msg.Progress):
                    self.metrics.append(message.values)

    async def publish(self, weights: msg.WeightsPublished) -> None:
        (send,) = self._recipe.decide(0.0, weights)
        await self._head.send("generator-0", send.message)
        while True:
            answer = (await self._head.receive()).message
            if isinstance(answer, msg.WeightsLoaded):
                break
            assert isinstance(answer, msg.EngineLoadReported | msg.EngineJoined)
        for effect in self._recipe.decide(0.0, answer):
            if effect.to == RECORDER:
                self.record(effect.message)
            else:
                assert effect.to == BUFFER


async def train_and_publish(run: RunConfig, folder: RunFolder, first_lost: int) -> Conversation:
    hub = Hub()
    conversation = Conversation(hub, run)
    rank = LearnerRank(run, folder, RankGroup())
    engine = LossyEngine(
        folder.checkpoints / "init", Capacity(4096, 16, 512), lora=get_published_adapters(run.learner), version=-1
    )
    engine.first_lost = first_lost
    bus = hub.join("generator-0", 100)
    running = asyncio.create_task(Generator("generator-0", bus, engine, "head/arbiter", 1).run())
    try:
        started = await asyncio.to_thread(rank.start, None, no_report)
        assert started.published is not None
        await conversation.publish(started.published)
        for step in range(1, STEPS + 1):
            conversation.record(msg.StepRequested(step, step - 1))
            conversation.record(msg.StepCollected(step, 20, msg.StepCounts(), {}, msg.BufferCursor()))
            batch = store_batch(folder.batches, step, rows(step))
            trained = await asyncio.to_thread(rank.train, step, batch)
            # The mismatch is set to a small value, because that of random tokens would be large.
            conversation.record(
                msg.StepTrained(step, {**trained.metrics, "mismatch_k3": 1e-12, "mismatch_above_1": 0.0})
            )
            assert trained.published is not None
            await conversation.publish(trained.published)
    finally:
        await hub.join("rollout-0", 10).send("generator-0", msg.Shutdown())
        await running
        rank.close()
    return conversation


@pytest.mark.parametrize("adapted", ["full", "merged", "adapters"], indirect=True)
async def test_delivered_weights_and_adapters_have_equal_probes(adapted: tuple[RunConfig, RunFolder]) -> None:
    done = await train_and_publish(*adapted, first_lost=10_000)
    assert [each for each in done.reports if "weight_sync" in each.checks] == []
    probed = [each for each in done.metrics if "probe_gap" in each]
    assert len(probed) == STEPS
    assert max(each["probe_gap"] for each in probed) < 1e-4
    followed = [each["probe_followed"] for each in probed if "probe_followed" in each]
    assert followed == [pytest.approx(1.0, abs=0.01)] * len(followed)
    assert len(followed) >= STEPS - 2
    assert all(each["probe_s"] > 0 for each in probed)


@pytest.mark.parametrize("first_lost", [1, 3])
@pytest.mark.parametrize("adapted", ["full", "merged", "adapters"], indirect=True)
async def test_lost_weights_and_adapters_are_reported_within_two_steps(
    adapted: tuple[RunConfig, RunFolder], first_lost: int
) -> None:
    done = await train_and_publish(*adapted, first_lost=first_lost)
    (report,) = [each for each in done.reports if "weight_sync" in each.checks]
    assert first_lost <= report.step <= first_lost + 1
    assert report.check == "weight_sync"
    assert "1 of 1 engines did not receive the published weights" in report.message
