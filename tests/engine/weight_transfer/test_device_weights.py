"""Tests of weights in the memory of the learner's device, here a file. The CUDA calls have never run on a GPU."""

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from asterism.bus.messages import WeightsPublished
from asterism.engine.contract import WeightsRefused
from asterism.engine.learner.distributed import RankGroup
from asterism.engine.learner.weight_publisher import WeightPublisher
from asterism.engine.weight_transfer.device_weights import (
    RECORD_NAME,
    DeviceRecord,
    DeviceWeightsWriter,
    compute_checksum,
)
from asterism.engine.weight_transfer.file_lock import opened, try_lock
from asterism.engine.weight_transfer.memory_sharing import CudaSharing, SharingFailed
from asterism.engine.weight_transfer.published_loader import PublishedLoader
from tests.engine.weight_transfer.host_sharing import HostSharing
from tests.engine.whole_publisher import damage, publish

SHAPES = {"a": (300, 200), "b": (7,), "c": (64, 64)}
DTYPE = torch.bfloat16
CPU = torch.device("cpu")


class Transfer:
    """A transfer from a learner to one engine on the same device."""

    def __init__(self, folder: Path, *, engine: HostSharing | None = None, learner: HostSharing | None = None) -> None:
        memory = folder / "memory"
        memory.mkdir(exist_ok=True)
        self.folder = folder / "slots"
        self.learner_memory, self.engine_memory = learner or HostSharing(memory), engine or HostSharing(memory)
        self.source = {name: torch.randn(shape) for name, shape in SHAPES.items()}
        self.publisher = WeightPublisher(self.folder, self.source, DTYPE, sharing=self.learner_memory)
        self.loader = PublishedLoader(DTYPE, CPU, sharing=self.engine_memory)
        assert self.loader.device_reader is not None
        self.reader = self.loader.device_reader

    def publish(self, version: int) -> WeightsPublished:
        for parameter in self.source.values():
            parameter.normal_()
        return publish(self.publisher, version)

    def load(self, published: WeightsPublished) -> dict[str, Tensor]:
        target = make_target()
        self.loader.load(published, target)
        return target

    def transfers(self, version: int) -> bool:
        return self.is_loaded(self.load(self.publish(version)))

    def is_loaded(self, target: Mapping[str, Tensor]) -> bool:
        return all(torch.equal(target[name], self.source[name].to(DTYPE)) for name in SHAPES)

    @property
    def counts(self) -> tuple[int, int]:
        return self.reader.num_loads, self.reader.num_fallbacks


@pytest.fixture
def transfer(tmp_path: Path) -> Transfer:
    return Transfer(tmp_path)


def make_target() -> dict[str, Tensor]:
    return {name: torch.full(shape, -1.0, dtype=DTYPE) for name, shape in SHAPES.items()}


def test_an_engine_maps_device_memory_only_while_it_copies_a_version(transfer: Transfer) -> None:
    for version in range(4):
        published = transfer.publish(version)
        damage(published)  # this proves that the engine does not read the slot
        assert transfer.is_loaded(transfer.load(published))
        assert transfer.engine_memory.num_mapped == 0
    assert transfer.counts == (4, 0)
    assert (transfer.learner_memory.num_allocated, transfer.engine_memory.num_opened) == (1, 4)


def test_the_slot_contains_the_same_weights_for_other_engines(transfer: Transfer) -> None:
    published = transfer.publish(1)
    target = make_target()
    PublishedLoader(DTYPE, CPU).load(published, target)
    assert transfer.is_loaded(target)


@pytest.mark.parametrize(
    ("memory", "cause"),
    [
        (partial(HostSharing, device_id="another GPU"), "is on memory, not on another GPU"),
        (partial(HostSharing, fails=True), "the handle cannot be opened"),
    ],
    ids=["another device", "no mapping"],
)
def test_an_engine_that_cannot_map_the_memory_loads_and_counts_the_slot(
    tmp_path: Path, memory: Any, cause: str, capsys: pytest.CaptureFixture[str]
) -> None:
    transfer = Transfer(tmp_path, engine=memory(tmp_path))
    assert all(transfer.transfers(version) for version in range(2))
    assert transfer.counts == (0, 2)
    assert cause in capsys.readouterr().out


def test_the_slot_is_loaded_if_the_learner_cannot_allocate_a_buffer(tmp_path: Path) -> None:
    transfer = Transfer(tmp_path, learner=HostSharing(tmp_path, fails=True))
    assert all(transfer.transfers(version) for version in range(2))
    assert transfer.counts == (0, 2)
    assert not (transfer.folder / RECORD_NAME).exists()


def test_an_earlier_version_is_loaded_from_its_slot(transfer: Transfer) -> None:
    old = transfer.publish(1)
    expected = transfer.load(old)
    transfer.publish(2)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in transfer.load(old).items())
    assert transfer.counts == (1, 1)


def test_the_same_version_with_another_digest_is_refused(transfer: Transfer) -> None:
    published = transfer.publish(1)
    target = make_target()
    with pytest.raises(WeightsRefused):
        transfer.loader.load(replace(published, digest="00" * 16), target)
    assert all(torch.equal(tensor, make_target()[name]) for name, tensor in target.items())
    assert transfer.counts == (0, 1)


def read_record(folder: Path) -> DeviceRecord:
    return msgspec.msgpack.decode((folder / RECORD_NAME).read_bytes(), type=DeviceRecord)


def change_record(folder: Path, **changes: Any) -> None:
    (folder / RECORD_NAME).write_bytes(msgspec.msgpack.encode(replace(read_record(folder), **changes)))


def test_memory_with_a_wrong_checksum_is_not_copied(transfer: Transfer) -> None:
    published = transfer.publish(1)
    with Path(read_record(transfer.folder).handle.decode()).open("r+b") as memory:
        memory.seek(500)
        memory.write(b"\x55\x55")
    assert transfer.is_loaded(transfer.load(published))
    assert transfer.counts == (0, 1)
    assert (transfer.engine_memory.num_opened, transfer.engine_memory.num_mapped) == (1, 0)


def test_the_memory_of_an_ended_process_is_not_used(transfer: Transfer) -> None:
    published = transfer.publish(1)
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    change_record(transfer.folder, process=ended.pid)
    assert transfer.is_loaded(transfer.load(published))
    assert (transfer.counts, transfer.engine_memory.num_opened) == ((0, 1), 0)


@pytest.mark.parametrize("content", [b"", b"\x81", b"\xff" * 40], ids=["empty", "cut off", "not a record"])
def test_an_unfinished_record_is_not_used(transfer: Transfer, content: bytes) -> None:
    published = transfer.publish(1)
    (transfer.folder / RECORD_NAME).write_bytes(content)
    assert transfer.is_loaded(transfer.load(published))
    assert transfer.counts == (0, 1)


def test_a_buffer_is_not_overwritten_while_an_engine_copies_it(transfer: Transfer) -> None:
    transfer.publish(1)
    handle = Path(read_record(transfer.folder).handle.decode())
    before = handle.read_bytes()
    with opened(transfer.folder / RECORD_NAME) as record:
        assert try_lock(record, shared=True)
        published = transfer.publish(2)
        assert handle.read_bytes() == before
    assert transfer.is_loaded(transfer.load(published))
    assert transfer.counts == (0, 1)
    assert transfer.transfers(3)
    assert transfer.counts == (1, 1)


def test_a_buffer_is_not_read_while_it_is_written(transfer: Transfer) -> None:
    published = transfer.publish(1)
    with opened(transfer.folder / RECORD_NAME) as record:
        assert try_lock(record)
        assert transfer.is_loaded(transfer.load(published))
    assert transfer.counts == (0, 1)


def test_the_memory_of_a_restarted_learner_is_mapped(tmp_path: Path) -> None:
    first = Transfer(tmp_path)
    first.load(first.publish(1))
    second = Transfer(tmp_path, learner=HostSharing(tmp_path))
    published = second.publish(2)
    target = first.load(published)
    assert second.is_loaded(target)
    assert first.counts == (2, 0)
    assert (first.engine_memory.num_opened, first.engine_memory.num_mapped) == (2, 0)


def test_a_closed_publisher_leaves_no_record(transfer: Transfer) -> None:
    published = transfer.publish(1)
    transfer.publisher.close()
    with pytest.raises(WeightsRefused, match="cannot be read"):
        transfer.load(published)
    assert transfer.counts == (0, 1)


def test_ranks_with_sharded_parameters_allocate_no_buffer(tmp_path: Path) -> None:
    memory = HostSharing(tmp_path)
    publisher = WeightPublisher(
        tmp_path, {"a": torch.ones(4)}, DTYPE, ranks=RankGroup(rank=1, world_size=2, local_world_size=2), sharing=memory
    )
    publisher.close()
    assert memory.num_allocated == 0


def test_a_checksum_depends_on_every_value_and_on_the_order_of_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("asterism.engine.weight_transfer.device_weights._CHECKSUM_VALUES", 4)
    values = torch.randint(-(2**62), 2**62, (19,))
    body = values.view(torch.uint8)
    checksum = compute_checksum(body)
    assert compute_checksum(body.clone()) == checksum
    changed = body.clone()
    changed[100] ^= 1
    swapped = torch.cat((values[4:8], values[:4], values[8:])).view(torch.uint8)
    assert len({checksum, compute_checksum(changed), compute_checksum(swapped)}) == 3


def die_while_writing(slots: Path, num_bytes: int, memory: Path) -> None:
    torch.set_num_threads(1)  # the other threads of the pool do not exist in a fork
    writer = DeviceWeightsWriter(slots, num_bytes, HostSharing(memory))
    buffer = writer.begin()
    assert buffer is not None
    buffer.fill_(7)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_learner_killed_during_a_write_leaves_no_usable_record(transfer: Transfer, tmp_path: Path) -> None:
    published = transfer.publish(1)
    arguments = (transfer.folder, published.num_bytes, tmp_path)
    learner = multiprocessing.get_context("fork").Process(target=die_while_writing, args=arguments)
    learner.start()
    learner.join(60)
    assert learner.exitcode == -signal.SIGKILL
    assert transfer.is_loaded(transfer.load(published))
    assert transfer.counts == (0, 1)
    assert transfer.transfers(2)
    assert transfer.counts == (1, 1)


# ---------------------------------------------------------------- the calls of CUDA


class FakeStorage:
    """A fake of the private functions of torch's storages, which need a GPU."""

    shared = (0, b"memory", 4096, 512, b"counter", 3, b"event", True)

    def _share_cuda_(self) -> tuple[Any, ...]:
        return self.shared


def test_a_cuda_handle_contains_all_arguments_for_mapping_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[tuple[Any, ...]] = []

    def open_storage(*arguments: Any) -> torch.UntypedStorage:
        opened.append(arguments)
        return torch.zeros(4096, dtype=torch.uint8).untyped_storage()

    class FakeBody(torch.Tensor):
        def untyped_storage(self) -> Any:
            return FakeStorage()

    empty = torch.empty

    def make_empty(size: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        assert device == torch.device("cuda", 2)
        return empty(size, dtype=dtype).as_subclass(FakeBody) if size else empty(0, dtype=dtype)

    monkeypatch.setattr(torch, "empty", make_empty)
    monkeypatch.setattr(torch.UntypedStorage, "_new_shared_cuda", open_storage, raising=False)
    sharing = CudaSharing(torch.device("cuda", 2))
    body = sharing.open(sharing.allocate(4096).handle, 4096)
    assert (body.dtype, body.numel()) == (torch.uint8, 4096)
    assert opened == [(2, *FakeStorage.shared[1:])]


def test_a_cuda_error_is_a_sharing_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("CUDA error: invalid resource handle\nCompile with `TORCH_USE_CUDA_DSA`")

    monkeypatch.setattr(torch, "empty", refuse)
    with pytest.raises(SharingFailed, match=r"^CUDA error: invalid resource handle$"):
        CudaSharing(torch.device("cuda", 0)).allocate(64)
