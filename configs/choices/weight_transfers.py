"""The ways in which new weights reach a server: one record for each value of sglang.weights (docs/sglang.md)."""

from typing import NamedTuple


class WeightTransfer(NamedTuple):
    """The default values are those of engines that read the published weights themselves.

    Buckets have sglang.bucket_mib. All counts are of one server during an update.
    """

    transport: str = ""  # the class: asterism.engine.sglang.weights.WeightTransport
    reads_folder: bool = False  # the servers of a node read a folder of whole weights in shared memory
    reaches_copies: bool = False  # also a server with several copies of the model
    joins_group: bool = False  # generator and server: sglang.group_backend
    device_buckets: int = 0  # on the server's device
    shares_device: bool = False  # the generator maps the device's memory; on a CPU it is shared memory
    host_buckets: int = 0  # in main memory
    host_buckets_per_gpu: int = 0  # in main memory, in addition, for each GPU of the server


# A request body has a copy for each rank: base64, sent and received body with 4/3 of a bucket each, and the decoded one.
# With "ipc" a server may still read one bucket while the next one is copied.
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
