"""Table of the transfers of new weights to a server: one record for each value of sglang.weights (docs/sglang.md)."""

from typing import NamedTuple


class WeightTransfer(NamedTuple):
    """A kind of transfer. The defaults describe engines that read the published weights themselves.

    Buckets have sglang.bucket_mib. All counts apply to one server during an update.
    """

    transport: str = ""  # import path of the asterism.engine.sglang.weights.WeightTransport
    reads_folder: bool = False  # the servers of a node read a folder of whole weights in shared memory
    reaches_copies: bool = False  # the transfer reaches servers with several copies of the model
    joins_group: bool = False  # generator and server form a process group: sglang.group_backend
    device_buckets: int = 0  # buckets on the server's device
    shares_device: bool = False  # the generator maps the device's memory, or shared memory on a CPU
    host_buckets: int = 0  # buckets in main memory
    host_buckets_per_gpu: int = 0  # further buckets in main memory for each GPU of the server


# A request body has a copy per rank: base64, sent and received body with 4/3 of a bucket each, and the decoded bucket.
# With "ipc" a server can still read one bucket while the generator copies the next one.
WEIGHT_TRANSFERS = {
    "disk": WeightTransfer(
        "asterism.engine.sglang.weights.disk_transport:DiskTransport", reads_folder=True, reaches_copies=True
    ),
    "tensor": WeightTransfer(
        "asterism.engine.sglang.weights.transports:TensorTransport",
        device_buckets=1,
        host_buckets=1,
        host_buckets_per_gpu=5,
    ),
    "group": WeightTransfer(
        "asterism.engine.sglang.weights.transports:ProcessGroupTransport",
        joins_group=True,
        device_buckets=1,
        host_buckets=2,
    ),
    "ipc": WeightTransfer(
        "asterism.engine.sglang.weights.ipc_transport:IpcTransport", device_buckets=2, shares_device=True
    ),
}
