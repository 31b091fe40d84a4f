"""Measure the transfer of weights to an engine on this machine and to other nodes. Prints a JSON line last.

    python -m benchmarks.weights [--quick] [--mib MIB] [--nodes N] [--rounds N]

Part one measures the learner's publisher and an embedded engine on this machine, in CPU seconds per GB of
float32, which do not depend on other load. Part two compares the transfer to other nodes, over loopback with CURVE,
with a plain file copy. The server is the process of a real run. Each round publishes a new version, copies its file,
fetches it with one node, and fetches it with several nodes at once, all in memory. Ratios are
medians of the rounds' ratios. The lag is the longest delay of a fetching process's event loop; the
server's memory is its maximum. All nodes and the server share the cores of this machine, unlike
the nodes of a cluster; the CPU seconds per GB do not depend on other load.
"""

import asyncio
import json
import shutil
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median

import torch

from asterism.bus.messages import WeightsPublished
from asterism.bus.transport.curve_auth import generate_key, load_key
from asterism.configs.load import write_resolved
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.run_config import RunConfig
from asterism.engine.learner.weight_publisher import WeightPublisher
from asterism.engine.weight_transfer.weight_client import WeightsFetcher
from benchmarks.support.benchmark_main import Flag, Options, benchmark_main
from benchmarks.support.local_transfer import measure_local_transfer
from benchmarks.support.process_usage import read_peak_resident_mib, read_process_cpu_s

LOOPBACK = "127.0.0.1"
_LAG_INTERVAL_S = 0.005


class LoopLag:
    """Measures the longest delay of the event loop's timers so far."""

    longest_s = 0.0

    async def measure(self) -> None:
        """Measure until the task is cancelled."""
        while True:
            due = time.monotonic() + _LAG_INTERVAL_S
            await asyncio.sleep(_LAG_INTERVAL_S)
            self.longest_s = max(self.longest_s, time.monotonic() - due)


class FetchingNodes:
    """Receivers, each with its own folder in memory."""

    def __init__(self, memory: Path, port: int, key: Path) -> None:
        self._memory, self._port, self._key = memory, port, load_key(key)

    async def fetch(self, published: WeightsPublished, nodes: int) -> float:
        """Fetch the weights. Return the seconds."""
        folders = [self._memory / f"node_{number}" for number in range(nodes)]
        fetchers = [WeightsFetcher(folder, LOOPBACK, self._port, self._key) for folder in folders]
        began = time.perf_counter()
        await asyncio.gather(*(fetcher.fetch(published) for fetcher in fetchers))
        took = time.perf_counter() - began
        for folder in folders:
            shutil.rmtree(folder)
        return took

    def copy(self, published: WeightsPublished) -> float:
        """Copy the file. Return the seconds."""
        began = time.perf_counter()
        shutil.copyfile(published.path, self._memory / "copy")
        took = time.perf_counter() - began
        (self._memory / "copy").unlink()
        return took


@asynccontextmanager
async def running_server(folder: RunFolder, key: Path) -> AsyncGenerator[tuple[int, int]]:
    """Yield the server's process id and port."""
    argv = ("--run-folder", str(folder.path), "--host", LOOPBACK, "--port", "0", "--key", str(key))
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "asterism.engine.weight_transfer.weight_server", *argv, stdin=PIPE
    )
    log = folder.logs / "weights.jsonl"
    while not log.exists() or b"weight_server.started" not in log.read_bytes():  # noqa: ASYNC110 - no event to wait for
        await asyncio.sleep(0.01)
    try:
        yield process.pid, json.loads(log.read_text().splitlines()[0])["port"]
    finally:
        process.terminate()
        await process.wait()


async def run_rounds(options: Options, folder: RunFolder, key: Path) -> dict[str, float]:
    num_bytes = options.mib * 2**20
    weights = {"a": torch.rand(num_bytes // 4)}
    publisher = WeightPublisher(folder.shared_memory, weights, torch.float32)
    taken: list[tuple[float, float, float]] = []
    server_cpu_s = node_cpu_s = 0.0
    lag = LoopLag()
    async with running_server(folder, key) as (pid, port):
        nodes = FetchingNodes(folder.shared_memory, port, key)
        for version in range(options.rounds):
            published = publisher.publish(version)
            assert published is not None
            copy_s = nodes.copy(published)
            before = read_process_cpu_s(pid), time.process_time()
            measuring = asyncio.create_task(lag.measure())
            one_s = await nodes.fetch(published, 1)
            measuring.cancel()
            server_cpu_s += read_process_cpu_s(pid) - before[0]
            node_cpu_s += time.process_time() - before[1]
            taken.append((copy_s, one_s, await nodes.fetch(published, options.nodes)))
        server_mib = read_peak_resident_mib(pid)
    fetched_gb = options.rounds * num_bytes / 1e9
    return {
        "mib": options.mib,
        "copied_bytes_per_s": median(num_bytes / copy_s for copy_s, _, _ in taken),
        "fetched_bytes_per_s": median(num_bytes / one_s for _, one_s, _ in taken),
        "ratio_to_copy": median(copy_s / one_s for copy_s, one_s, _ in taken),
        "nodes": options.nodes,
        "nodes_bytes_per_s": median(options.nodes * num_bytes / several_s for _, _, several_s in taken),
        "nodes_ratio_to_one": median(options.nodes * one_s / several_s for _, one_s, several_s in taken),
        "server_cpu_s_per_gb": server_cpu_s / fetched_gb,
        "node_cpu_s_per_gb": node_cpu_s / fetched_gb,
        "worst_lag_ms": 1000 * lag.longest_s,
        "server_peak_mib": server_mib,
    }


async def measure(options: Options) -> dict[str, float]:
    folder = RunFolder(options.scratch / "run")
    folder.path.mkdir()
    folder.shared_memory.mkdir(mode=0o700)
    write_resolved(RunConfig(name="weights"), folder.config)
    try:
        local = measure_local_transfer(folder.shared_memory, quick=options.quick, rounds=options.rounds)
        return local | await run_rounds(options, folder, generate_key(options.scratch))
    finally:
        shutil.rmtree(folder.shared_memory)


if __name__ == "__main__":
    benchmark_main(
        __doc__,
        measure,
        *(Flag("--mib", 512, quick=16), Flag("--nodes", 4, quick=2), Flag("--rounds", 5, quick=1)),
        quick="16 MiB, two nodes, one round",
        shows_table=True,
    )
