"""Fixtures for tests of weight transports: a checkpoint, published weights, a fake server and transports to it."""

from pathlib import Path

import pytest
import torch

from asterism.bus.messages import WeightsPublished
from asterism.engine.sglang.weights import TransportParts, WeightTransport, build_transport
from asterism.engine.sglang.weights.checksums import ChecksumRegistry
from asterism.engine.weight_transfer.weight_layout import load_layout
from tests.engine.sglang.weights.fake_weight_server import FakeWeightServer
from tests.engine.sglang.weights.update_scenes import SMALL_BUCKET, Make, publish
from tests.engine.tiny_models import save_small_model, small_model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_model(tmp_path_factory.mktemp("checkpoint"), small_model())


@pytest.fixture
def server() -> FakeWeightServer:
    return FakeWeightServer()


@pytest.fixture
def weights(tmp_path: Path) -> WeightsPublished:
    return publish(tmp_path, torch.float32)


@pytest.fixture
def make(checkpoint: Path, tmp_path: Path) -> Make:
    def make_transport(
        name: str,
        dtype: torch.dtype = torch.float32,
        folder: Path = tmp_path,
        bucket: int = SMALL_BUCKET,
        timeout_s: float = 20.0,
        device: str = "cpu",
    ) -> WeightTransport:
        layout, checksums = load_layout(checkpoint, dtype), ChecksumRegistry(tmp_path / "checksums", "sglang-0")
        options = (folder / "for_server", bucket, torch.device(device), "gloo", timeout_s, 0.1)
        return build_transport(name, TransportParts(layout, checksums, *options))

    return make_transport
