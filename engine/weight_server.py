"""`python -m engine.weight_server --run-folder FOLDER --host HOST --port PORT --key FILE`: the process `weights`.

It gives the nodes of a cluster the weights that the learner has left in this machine's shared memory. It consumes
questions for chunks and answers each; it waits for the disk alone, never for who asked: a node has as many answers on
their way as it asked for at once, and what it does not take stays within that. SIGTERM ends it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
from pathlib import Path

import msgspec
import structlog
import uvloop
import zmq

from bus.curve import ClusterKey, Doorkeeper, guard, load_key
from bus.heartbeat import beating
from bus.last_words import end_with
from bus.structured_log import configure
from configs.errors import UnusableInput
from configs.load import load_resolved
from configs.run_folder import RunFolder
from configs.schema import Run
from engine.weight_chunks import CHUNK_BYTES, QUESTION_BYTES, WINDOW_CHUNKS, decode_question, read_chunk

NAME = "weights"
REPORT_S = 10.0  # between two lines of the log, if there is anything to say
_READERS = 4  # chunks that are read from the slots at once
_THREADS = 4  # of ZeroMQ: they encrypt, each for connections of its own
_QUEUED_ANSWERS = 2 * WINDOW_CHUNKS  # for one connection; ZeroMQ learns late, by half of it, what has been sent
_QUEUED_QUESTIONS = 64  # from one connection

Socket = zmq.Socket[bytes]


class Served(msgspec.Struct):
    """Since the start."""

    chunks: int = 0
    bytes: int = 0
    absent: int = 0  # chunks of weights that were not there, or no longer
    malformed: int = 0  # questions
    unanswered: int = 0  # the node was gone, or took no answers
    refused: int = 0  # connections of who does not hold the key


class WeightServer:
    def __init__(self, folder: Path, host: str, port: int, key: ClusterKey) -> None:
        """Serves the slots in `folder`; at any free port if it is 0. Within a running event loop. Raises UnusableInput if it
        cannot listen there."""
        self.served = Served()
        self._folder = folder
        self._logger = structlog.get_logger()
        self._loop = asyncio.get_running_loop()
        self._arrived = asyncio.Event()  # there may be questions
        self._context = zmq.Context[Socket](_THREADS)
        self._door = Doorkeeper(self._context, key, self._refuse)
        self._router: Socket = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.setsockopt(zmq.SNDHWM, _QUEUED_ANSWERS)
        self._router.setsockopt(zmq.RCVHWM, _QUEUED_QUESTIONS)
        self._router.setsockopt(zmq.MAXMSGSIZE, QUESTION_BYTES)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # an answer that nobody takes is an error, and counted
        guard(self._router, key)
        self._door.watch(self._router)
        try:
            self._router.bind(f"tcp://{host}:{port}")
        except zmq.ZMQError as error:
            self.close()
            raise UnusableInput(f"weights cannot be served at {host}:{port}: {error.strerror}") from error
        self.port = int(self._router.get_string(zmq.LAST_ENDPOINT).rpartition(":")[2])
        self._loop.add_reader(self._router.fileno(), self._arrived.set)
        self._arrived.set()

    async def run(self) -> None:
        """Until it is cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._report())
            for _ in range(_READERS):
                group.create_task(self._serve())

    def close(self) -> None:
        self._loop.remove_reader(self._router.fileno())
        self._door.close()
        self._router.close()
        self._context.term()

    def _refuse(self) -> None:
        self.served.refused += 1

    async def _serve(self) -> None:
        while True:
            route, *frames = await self._next()
            try:
                (question,) = frames
                wanted = decode_question(question)
            except ValueError:  # a msgspec.DecodeError is one
                self.served.malformed += 1
                continue
            chunk = await asyncio.to_thread(read_chunk, self._folder, wanted)
            self._answer([route, question] if chunk is None else [route, question, chunk])

    async def _next(self) -> list[bytes]:
        """The descriptor reports a change only once, so another reader is woken as long as there was something."""
        while True:
            try:
                parts = self._router.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                self._arrived.clear()
                await self._arrived.wait()
            else:
                self._arrived.set()
                return parts

    def _answer(self, frames: list[bytes]) -> None:
        try:
            self._router.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.ZMQError:
            self.served.unanswered += 1
        else:
            self._count(frames)
        self._arrived.set()  # the descriptor may not report what came while this was sent

    def _count(self, frames: list[bytes]) -> None:
        if len(frames) == 2:
            self.served.absent += 1
        else:
            self.served.chunks += 1
            self.served.bytes += len(frames[2])

    async def _report(self) -> None:
        """Until it is cancelled; what was served then is told once more."""
        told = Served()
        try:
            while True:
                await asyncio.sleep(REPORT_S)
                told = self._tell(told)
        finally:
            self._tell(told)

    def _tell(self, told: Served) -> Served:
        if self.served == told:
            return told
        self._logger.info("weights.served", **msgspec.structs.asdict(self.served))
        return msgspec.structs.replace(self.served)


async def serve(run: Run, folder: RunFolder, host: str, port: int, key: ClusterKey, life: int) -> None:
    """Until SIGTERM."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    server = WeightServer(folder.shared_memory, host, port, key)
    structlog.get_logger().info("weights.offered", host=host, port=server.port, chunk_bytes=CHUNK_BYTES)
    try:
        async with beating(NAME, life, run.supervision.heartbeat_s, folder.sockets, lambda: None):
            serving = asyncio.create_task(server.run())
            stopping = asyncio.create_task(stop.wait())
            await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
            for task in (serving, stopping):
                task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await serving
    finally:
        server.close()


def main() -> int:
    parser = argparse.ArgumentParser(prog="engine.weight_server", description="Gives other nodes a run's weights.")
    parser.add_argument("--run-folder", type=Path, required=True, help="the run's folder, with its config.toml")
    parser.add_argument("--host", required=True, help="the address of this machine to listen at")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--key", type=Path, required=True, help="the cluster's key, as asterism keys makes it")
    parser.add_argument("--life", type=int, default=1, help="counts the server's starts in one launch of the run")
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher ends its processes, in order
    folder = RunFolder(arguments.run_folder)
    try:
        run = load_resolved(folder.config)
        configure(folder, NAME, run.log.level)
        key = load_key(arguments.key)
        uvloop.run(serve(run, folder, arguments.host, arguments.port, key, arguments.life))
    except UnusableInput as error:
        return end_with(folder, NAME, error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
