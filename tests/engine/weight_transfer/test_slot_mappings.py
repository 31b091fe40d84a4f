"""Tests of mappings of slots, which both sides of a transfer keep, and of their page-locked memory."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor

from asterism.bus.messages import WeightsPublished
from asterism.engine.contract import WeightsRefused
from asterism.engine.learner import weight_publisher
from asterism.engine.learner.weight_publisher import WeightPublisher
from asterism.engine.weight_transfer.page_locks import CudaPageLocker, make_page_locker
from asterism.engine.weight_transfer.shared_memory import load_published
from asterism.engine.weight_transfer.slot_file import compute_file_bytes
from asterism.engine.weight_transfer.slot_mappings import SlotMappings
from tests.engine.whole_publisher import damage, publish

GPU = torch.device("cuda", 1)
SHAPES = {"a": (300, 200), "b": (7,), "c": (64, 64)}


class FakePageLocker:
    """Records which memory is page-locked, in place of a GPU's driver."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.calls: list[str] = []
        self.locked: dict[int, int] = {}  # number of locked bytes by address
        self._refuses = refuses

    def register(self, address: int, num_bytes: int) -> bool:
        assert address not in self.locked
        self.calls.append("register")
        if not self._refuses:
            self.locked[address] = num_bytes
        return not self._refuses

    def unregister(self, address: int) -> None:
        self.calls.append("unregister")
        del self.locked[address]


def make_parameters(value: float) -> dict[str, Tensor]:
    return {name: torch.full(shape, value) for name, shape in SHAPES.items()}


def load(published: WeightsPublished, mappings: SlotMappings) -> Mapping[str, Tensor]:
    target = make_parameters(-1.0)
    load_published(published, target, torch.float32, mappings)
    return target


def set_values(parameters: Mapping[str, Tensor], value: float) -> None:
    for parameter in parameters.values():
        parameter.fill_(value)


def test_overwritten_slots_are_mapped_and_locked_only_once(tmp_path: Path) -> None:
    parameters, locker = make_parameters(0.0), FakePageLocker()
    publisher, mappings = WeightPublisher(tmp_path, parameters, torch.float32), SlotMappings(locker)
    for version in range(8):
        set_values(parameters, float(version))
        loaded = load(publish(publisher, version), mappings)
        assert all(torch.equal(loaded[name], parameters[name]) for name in SHAPES)
    assert locker.calls == ["register", "register"]
    assert set(locker.locked.values()) == {compute_file_bytes(publisher.num_bytes)}


def test_the_mapping_of_a_new_file_per_version_is_not_kept(tmp_path: Path) -> None:
    """A download from another node creates a new file for each version."""
    parameters, locker = make_parameters(0.0), FakePageLocker()
    mappings = SlotMappings(locker)
    with ExitStack() as stack:
        for version in range(4):
            publisher = WeightPublisher(tmp_path, parameters, torch.float32, 1)
            set_values(parameters, float(version))
            published = publish(publisher, version)
            stack.enter_context(Path(published.path).open("rb"))  # keeps the inode, which a new file could reuse
            loaded = load(published, mappings)
            assert all(torch.equal(loaded[name], parameters[name]) for name in SHAPES)
            publisher.close()
    assert locker.calls == []


def test_a_replaced_slot_is_unlocked_at_the_next_load(tmp_path: Path) -> None:
    parameters, locker = make_parameters(1.0), FakePageLocker()
    publisher, mappings = WeightPublisher(tmp_path, parameters, torch.float32, 1), SlotMappings(locker)
    for version in range(2):
        load(publish(publisher, version), mappings)
    assert len(locker.locked) == 1
    publisher.close()
    loaded = load(publish(WeightPublisher(tmp_path, make_parameters(2.0), torch.float32, 1), 2), mappings)
    assert loaded["b"].tolist() == [2.0] * 7
    assert locker.calls == ["register", "unregister"]


def test_weights_are_loaded_even_if_pages_cannot_be_locked(tmp_path: Path) -> None:
    parameters, locker = make_parameters(3.0), FakePageLocker(refuses=True)
    publisher, mappings = WeightPublisher(tmp_path, parameters, torch.float32, 1), SlotMappings(locker)
    for version in range(3):
        assert load(publish(publisher, version), mappings)["b"].tolist() == [3.0] * 7
    assert (locker.calls, locker.locked) == (["register"], {})


def test_a_damaged_chunk_in_a_kept_mapping_changes_no_parameter(tmp_path: Path) -> None:
    parameters = make_parameters(1.0)
    publisher, mappings = WeightPublisher(tmp_path, parameters, torch.float32, 1), SlotMappings()
    for version in range(2):
        load(publish(publisher, version), mappings)
    published = publish(publisher, 2)
    damage(published)
    target = make_parameters(-1.0)
    with pytest.raises(WeightsRefused, match="chunk 0 of the weights of version 2 is damaged"):
        load_published(published, target, torch.float32, mappings)
    assert all(torch.equal(target[name], torch.full(shape, -1.0)) for name, shape in SHAPES.items())


def test_a_slot_can_be_overwritten_while_its_mapping_is_kept(tmp_path: Path) -> None:
    publisher, mappings = WeightPublisher(tmp_path, make_parameters(1.0), torch.float32, 1), SlotMappings()
    inodes: set[int] = set()
    for version in range(4):
        published = publish(publisher, version)
        inodes.add(Path(published.path).stat().st_ino)
        load(published, mappings)
    assert len(inodes) == 1


def test_the_learner_locks_each_slot_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locker = FakePageLocker()

    def make_locker(device: torch.device) -> FakePageLocker:
        assert device.type == "cpu"
        return locker

    monkeypatch.setattr(weight_publisher, "make_page_locker", make_locker)
    publisher = WeightPublisher(tmp_path, make_parameters(1.0), torch.float32, 2)
    for version in range(6):
        publish(publisher, version)
    assert locker.calls == ["register", "register"]
    publisher.close()
    assert locker.locked == {}


def test_only_memory_for_a_gpu_is_locked() -> None:
    assert make_page_locker(torch.device("cpu")) is None
    assert isinstance(make_page_locker(GPU), CudaPageLocker)


class FakeCudart:
    """A fake of torch.cuda.cudart() whose calls return `error`."""

    def __init__(self, error: int) -> None:
        self.error, self.calls = error, list[tuple[object, ...]]()

    def cudaHostRegister(self, *arguments: int) -> int:
        self.calls.append(arguments)
        return self.error

    def cudaHostUnregister(self, *arguments: int) -> int:
        self.calls.append(arguments)
        return self.error

    def cudaGetErrorString(self, error: int) -> str:
        return {2: "out of memory", 713: "part or all of the requested memory range is not mapped"}[error]


def test_pages_are_registered_for_all_devices_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    cudart, devices = FakeCudart(0), list[torch.device]()

    def select(device: torch.device) -> nullcontext[None]:
        devices.append(device)
        return nullcontext()

    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "device", select)
    locker = CudaPageLocker(GPU)
    assert locker.register(4096, 100)
    locker.unregister(4096)
    assert cudart.calls == [(4096, 100, 1), (4096,)]
    assert devices == [GPU, GPU]


@pytest.mark.parametrize(
    ("call", "arguments", "error", "expected"),
    [
        (
            CudaPageLocker.register,
            (4096, 100),
            2,
            {"event": "weights.pages_not_locked", "cause": "out of memory", "bytes": 100},
        ),
        (
            CudaPageLocker.unregister,
            (4096,),
            713,
            {"event": "weights.pages_not_unlocked", "cause": "part or all of the requested memory range is not mapped"},
        ),
    ],
    ids=["register", "unregister"],
)
def test_an_error_of_the_driver_is_logged_with_its_name_and_cleared(
    monkeypatch: pytest.MonkeyPatch,
    call: Callable[..., bool | None],
    arguments: tuple[int, ...],
    error: int,
    expected: dict[str, object],
) -> None:
    launched: list[torch.device] = []

    def launch(_: int, *, device: torch.device) -> None:
        launched.append(device)
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: FakeCudart(error))
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    monkeypatch.setattr(torch, "zeros", launch)
    with capture_logs() as logged:
        assert not call(CudaPageLocker(GPU), *arguments)
    assert logged == [{**expected, "cuda_error": error, "log_level": "warning"}]
    assert launched == [GPU]
