"""The engine's process in the weights section: the loaded values, and errors that reach the learner."""

from collections.abc import Generator
from pathlib import Path

import pytest
import torch

from asterism.bus.messages import WeightsPublished
from asterism.engine.learner.weight_publisher import WeightPublisher
from benchmarks.gpu.checks.model_checks import build_small_config, build_small_model
from benchmarks.gpu.weight_engine import ENGINE_DTYPE, EngineFailed, WeightEngine, running_engine

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Generator[WeightEngine]:
    """Yield the engine of both tests, because its process imports torch. The second test ends the process."""
    with running_engine(build_small_config(), torch.device("cpu"), tmp_path_factory.mktemp("engine")) as engine:
        yield engine


def test_weights_from_the_slot_fail_where_shared_memory_is_required(engine: WeightEngine, tmp_path: Path) -> None:
    model = build_small_model(build_small_config())
    publisher = WeightPublisher(tmp_path, dict(model.named_parameters()), ENGINE_DTYPE, 1)
    published = publisher.publish(0)
    assert published is not None
    loaded = engine.load(published, returns_values=True)
    assert not loaded.is_shared
    name, parameter = next(iter(model.named_parameters()))
    assert torch.equal(torch.from_numpy(loaded.values[name]).view(ENGINE_DTYPE), parameter.to(ENGINE_DTYPE))
    with pytest.raises(EngineFailed, match=r"loaded the slot.*the learner has no buffer"):
        engine.load_shared(published)


def test_a_failed_load_is_reported_to_the_learner(engine: WeightEngine) -> None:
    with pytest.raises(EngineFailed, match="WeightsRefused: weights have 1 bytes"):
        engine.load(WeightsPublished(0, "/no/such/slot", 1, ""))
    with pytest.raises(EngineFailed, match="ended"):
        engine.load(WeightsPublished(0, "/no/such/slot", 1, ""))
