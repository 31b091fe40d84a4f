"""Keeps the newest published weights in the memory of the learner's GPU, for engines on the same GPU.

The learner writes each version into one buffer, in the layout of a slot, and copies the buffer into the slot. A record
in the folder of the slots has the version, its digest, a checksum of the buffer, and a handle of its memory:

    learner    locks the record exclusively and empties it, writes the buffer, fills the record and unlocks it
    engine     locks the record, maps the buffer, compares the checksum on the GPU, copies, and unmaps the buffer

Between loads no engine has the buffer mapped, so the GPU gets the memory back when the learner ends. torch counts one
release of the memory per load: the lock, not this count, keeps the learner from writing while an engine copies.

An engine loads the slot instead of the buffer if the GPU or node differs, if the record has another version or is
locked, if the learner has ended, or if the memory cannot be mapped.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec
import structlog
import torch
from torch import Tensor

from asterism.bus.messages import WeightsPublished
from asterism.engine.weight_transfer.file_lock import opened, try_lock
from asterism.engine.weight_transfer.memory_sharing import MemorySharing, SharedBuffer, SharingFailed
from asterism.engine.weight_transfer.shared_memory import copy_into, wait_for_copies
from asterism.engine.weight_transfer.weight_layout import WeightLayout, get_layout

RECORD_NAME = "device_weights"  # name of the record's file in the folder of the slots
_CHECKSUM_VALUES = 8 * 2**20  # number of 64-bit values that are summed at once
_CHECKSUM_FACTOR, _CHECKSUM_MASK = 0x9E3779B97F4A7C15, 2**63 - 1


class DeviceRecord(msgspec.Struct, frozen=True):
    kind: str
    device_id: str
    process: int  # pid of the learner
    handle: bytes
    version: int
    num_bytes: int
    digest: str
    checksum: int


def compute_checksum(body: Tensor) -> int:
    """Return a checksum of uint8 [num_bytes], computed on its device. The size is a multiple of 8."""
    sums = [values.sum() for values in body.view(torch.int64).split(_CHECKSUM_VALUES)]
    total = 0
    for part in torch.stack(sums).tolist():
        total = (total * _CHECKSUM_FACTOR + part) & _CHECKSUM_MASK
    return total


class DeviceWeightsWriter:
    """Writes the buffer in the learner. Without a free record or memory, only the slot has the version."""

    def __init__(self, folder: Path, num_bytes: int, sharing: MemorySharing) -> None:
        """`folder`: the folder of the slots."""
        self._path, self._num_bytes, self._sharing = folder / RECORD_NAME, num_bytes, sharing
        self._buffer: SharedBuffer | None = None
        self._has_failed = False
        self._record: int | None = None  # the open record while the buffer is written

    def begin(self) -> Tensor | None:
        """Return the buffer, to be written until `finish`; None if an engine still copies the previous version."""
        buffer = self._allocate()
        if buffer is None:
            return None
        if self._record is not None:  # the last publication failed
            os.close(self._record)
            self._record = None
        record = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if not try_lock(record):
            os.close(record)
            structlog.get_logger().info("weights.not_on_device", cause="an engine still copies the version before")
            return None
        os.ftruncate(record, 0)
        self._record = record
        return buffer.body

    def finish(self, published: WeightsPublished) -> None:
        """Fill the record: the buffer holds these weights."""
        if self._record is None or self._buffer is None:
            return
        record = DeviceRecord(
            kind=self._sharing.kind,
            device_id=self._sharing.device_id,
            process=os.getpid(),
            handle=self._buffer.handle,
            version=published.version,
            num_bytes=published.num_bytes,
            digest=published.digest,
            checksum=compute_checksum(self._buffer.body),
        )
        os.pwrite(self._record, msgspec.msgpack.encode(record), 0)
        os.close(self._record)  # closing the record unlocks it
        self._record = None

    def close(self) -> None:
        self._path.unlink(missing_ok=True)
        if self._record is not None:
            os.close(self._record)
        self._record = self._buffer = None

    def _allocate(self) -> SharedBuffer | None:
        if self._buffer is None and not self._has_failed:
            try:
                self._buffer = self._sharing.allocate(self._num_bytes)
            except SharingFailed as failure:
                self._has_failed = True
                structlog.get_logger().warning("weights.not_on_device", cause=str(failure))
        return self._buffer


class DeviceWeightsReader:
    """Loads weights from the buffer, in an engine."""

    def __init__(self, sharing: MemorySharing) -> None:
        self.num_loads = self.num_fallbacks = 0
        self._sharing = sharing

    def load(self, published: WeightsPublished, parameters: Mapping[str, Tensor], dtype: torch.dtype) -> bool:
        """Copy the published weights into `parameters`. Return False, without a change, if the slot must be loaded."""
        try:
            self._load(published, parameters, get_layout(parameters, dtype))
        except SharingFailed as failure:
            self.num_fallbacks += 1
            structlog.get_logger().info(
                "weights.from_slot", version=published.version, cause=str(failure), fallbacks=self.num_fallbacks
            )
            return False
        self.num_loads += 1
        return True

    def _load(self, published: WeightsPublished, parameters: Mapping[str, Tensor], layout: WeightLayout) -> None:
        """Load from the buffer. Raises SharingFailed.

        Only variables of this call refer to the mapped buffer, so returning unmaps the buffer.
        """
        path = Path(published.path).with_name(RECORD_NAME)
        try:
            with opened(path) as file:
                if not try_lock(file, shared=True):
                    raise SharingFailed("the learner writes other weights into its buffer")
                body = self._map_verified(_read_record(file), published, layout)
                with torch.no_grad():
                    for name, source in layout.view(body).items():
                        copy_into(parameters[name], source)
                    wait_for_copies(parameters)
        except FileNotFoundError:
            raise SharingFailed("the learner has no buffer of weights on this machine") from None

    def _map_verified(self, record: DeviceRecord, published: WeightsPublished, layout: WeightLayout) -> Tensor:
        if (record.kind, record.device_id) != (self._sharing.kind, self._sharing.device_id):
            raise SharingFailed(f"the learner's buffer is on {record.device_id}, not on {self._sharing.device_id}")
        if (record.version, record.digest) != (published.version, published.digest):
            raise SharingFailed(f"the learner's buffer holds version {record.version}, or other weights")
        if not record.num_bytes == published.num_bytes == layout.num_bytes:
            raise SharingFailed(f"the buffer has {record.num_bytes} bytes, but the model needs {layout.num_bytes}")
        if not Path(f"/proc/{record.process}").exists():
            raise SharingFailed(f"process {record.process}, which had the buffer, has ended")
        body = self._sharing.open(record.handle, record.num_bytes)
        if compute_checksum(body) != record.checksum:
            raise SharingFailed(f"the buffer of version {record.version} has another checksum")
        return body


def _read_record(file: int) -> DeviceRecord:
    """Read the record, which is empty if the learner was killed while it wrote the buffer. Raises SharingFailed."""
    try:
        return msgspec.msgpack.decode(os.pread(file, os.fstat(file).st_size, 0), type=DeviceRecord)
    except msgspec.DecodeError as error:
        raise SharingFailed("the learner has not finished its buffer") from error
