"""Runs the process `weights`: `python -m asterism.engine.weight_transfer.weight_server --run-folder FOLDER ...`.

The process serves weights from this machine's shared memory to the other nodes of a cluster: it receives requests for
chunks and answers each. It waits only for the disk, never for a node: a node's outstanding requests bound the answers
that it has not received. SIGTERM ends the process.
"""

import asyncio
import signal
import sys
from pathlib import Path

import msgspec
import structlog
import uvloop
import zmq

from asterism.bus.process.heartbeat import sending_heartbeats
from asterism.bus.process.process_main import make_process_parser, run_process_main
from asterism.bus.process.structured_log import configure_logging
from asterism.bus.process.waiting import wait_for_first
from asterism.bus.transport.curve_auth import ClusterKey, ZapAuthenticator, load_key, secure_server_socket
from asterism.configs.errors import UnusableInput
from asterism.configs.load import load_run
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.run_config import RunConfig
from asterism.engine.weight_transfer.slot_file import (
    CHUNK_BYTES,
    MAX_REQUEST_BYTES,
    WINDOW_CHUNKS,
    decode_request,
    read_chunk,
)

PROCESS_NAME = "weights"
REPORT_S = 10.0  # interval of log lines, if the counts have changed
_READERS = 4  # number of concurrent reads from the slots
_IO_THREADS = 4  # threads of ZeroMQ: each encrypts for a part of the connections
_MAX_QUEUED_ANSWERS = 2 * WINDOW_CHUNKS  # limit per connection; doubled, because ZeroMQ's count lags by up to half
_MAX_QUEUED_REQUESTS = 64  # limit of queued requests per connection

Socket = zmq.Socket[bytes]


class WeightServerCounts(msgspec.Struct):
    """Counts requests, answers and connections since the start of the server."""

    chunks: int = 0
    bytes: int = 0
    absent: int = 0  # number of requests for weights that no slot holds
    malformed: int = 0  # number of malformed requests
    unanswered: int = 0  # answers to nodes that had disconnected or did not receive them
    refused: int = 0  # number of connections without the cluster key


class WeightServer:
    def __init__(self, folder: Path, host: str, port: int, key: ClusterKey) -> None:
        """Serve the slots in `folder`; port 0 means any free port. Raises UnusableInput."""
        self.counts = WeightServerCounts()
        self._folder = folder
        self._logger = structlog.get_logger()
        self._loop = asyncio.get_running_loop()
        self._readable = asyncio.Event()  # set when requests can be waiting
        self._context = zmq.Context[Socket](_IO_THREADS)
        self._authenticator = ZapAuthenticator(self._context, key, self._count_refused)
        self._router: Socket = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.setsockopt(zmq.SNDHWM, _MAX_QUEUED_ANSWERS)
        self._router.setsockopt(zmq.RCVHWM, _MAX_QUEUED_REQUESTS)
        self._router.setsockopt(zmq.MAXMSGSIZE, MAX_REQUEST_BYTES)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a failed send raises an error, which is counted
        secure_server_socket(self._router, key)
        self._authenticator.monitor_handshakes(self._router)
        try:
            self._router.bind(f"tcp://{host}:{port}")
        except zmq.ZMQError as error:
            self.close()
            raise UnusableInput(f"weights cannot be served at {host}:{port}: {error.strerror}") from error
        self.port = int(self._router.get_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self._loop.add_reader(self._router.fileno(), self._readable.set)
        self._readable.set()

    async def run(self) -> None:
        """Run until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._report_periodically())
            for _ in range(_READERS):
                group.create_task(self._serve_requests())

    def close(self) -> None:
        self._loop.remove_reader(self._router.fileno())
        self._authenticator.close()
        self._router.close()
        self._context.term()

    def _count_refused(self) -> None:
        self.counts.refused += 1

    async def _serve_requests(self) -> None:
        while True:
            route, *frames = await self._receive()
            try:
                (frame,) = frames
                request = decode_request(frame)
            except ValueError:  # includes msgspec.DecodeError
                self.counts.malformed += 1
                continue
            chunk = await asyncio.to_thread(read_chunk, self._folder, request)
            self._send_answer([route, frame] if chunk is None else [route, frame, chunk])

    async def _receive(self) -> list[bytes]:
        """Receive a message, then wake the next receiver, because the descriptor reports a change only once."""
        while True:
            try:
                parts = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                self._readable.clear()
                await self._readable.wait()
            else:
                self._readable.set()
                return parts

    def _send_answer(self, frames: list[bytes]) -> None:
        try:
            self._router.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.ZMQError:
            self.counts.unanswered += 1
        else:
            if len(frames) == 2:
                self.counts.absent += 1
            else:
                self.counts.chunks += 1
                self.counts.bytes += len(frames[2])
        self._readable.set()  # the descriptor does not report a request that arrived during the send

    async def _report_periodically(self) -> None:
        """Log the counts periodically, and once after cancellation."""
        last_logged = WeightServerCounts()
        try:
            while True:
                await asyncio.sleep(REPORT_S)
                last_logged = self._log_counts(last_logged)
        finally:
            self._log_counts(last_logged)

    def _log_counts(self, last_logged: WeightServerCounts) -> WeightServerCounts:
        if self.counts == last_logged:
            return last_logged
        self._logger.info("weights.served", **msgspec.structs.asdict(self.counts))
        return msgspec.structs.replace(self.counts)


async def serve(run: RunConfig, folder: RunFolder, host: str, port: int, key: ClusterKey, incarnation: int) -> None:
    """Serve until SIGTERM."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    server = WeightServer(folder.shared_memory, host, port, key)
    structlog.get_logger().info("weight_server.started", host=host, port=server.port, chunk_bytes=CHUNK_BYTES)
    try:
        async with sending_heartbeats(
            PROCESS_NAME, incarnation, run.supervision.heartbeat_s, folder.sockets, lambda: None
        ):
            await wait_for_first(server.run(), stop.wait())
    finally:
        server.close()


def main() -> int:
    parser = make_process_parser(
        "asterism.engine.weight_transfer.weight_server", "Serves a run's weights to other nodes."
    )
    parser.add_argument("--host", required=True, help="address of this machine to listen on")
    parser.add_argument("--port", type=int, required=True, help="port to listen on (0: any free port)")
    parser.add_argument("--key", type=Path, required=True, help="file of the cluster key (see asterism keys)")
    arguments = parser.parse_args()

    def run_process(folder: RunFolder) -> None:
        run = load_run(folder.config)
        configure_logging(folder, PROCESS_NAME, run.log.level)
        key = load_key(arguments.key)
        uvloop.run(serve(run, folder, arguments.host, arguments.port, key, arguments.incarnation))

    return run_process_main(PROCESS_NAME, arguments, run_process)


if __name__ == "__main__":
    sys.exit(main())
