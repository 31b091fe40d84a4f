"""Fixtures of the transports: a checkpoint, published weights, a fake server and transports to it."""

from pathlib import Path

import pytest
import torch

from asterism.bus.messages import WeightsPublished
from asterism.engine.sglang.weights import WeightTransport
from asterism.engine.sglang.weights.checksums import ChecksumRegistry
from asterism.engine.sglang.weights.disk_transport import DiskTransport
from asterism.engine.sglang.weights.ipc_transport import IpcTransport
from asterism.engine.sglang.weights.transports import ProcessGroupTransport, TensorTransport
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
        match name:
            case "disk":
                return DiskTransport(layout, checksums, folder / "for_server")
            case "tensor":
                return TensorTransport(layout, checksums, bucket)
            case "ipc":
                return IpcTransport(layout, checksums, bucket, torch.device(device))
            case _:
                return ProcessGroupTransport(layout, checksums, bucket, timeout_s=timeout_s, response_timeout_s=0.1)

    return make_transport
