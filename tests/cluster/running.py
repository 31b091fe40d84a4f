"""Starts a run of the tiny recipe on the first host, lets other hosts join, and reads the outputs."""

import json
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from asterism.bus.codec import decode
from asterism.bus.event_log.reader import read_events
from asterism.bus.transport.curve_auth import generate_key
from asterism.configs.run_folder import RunFolder
from tests.actors.runs.running import ASTERISM, command_line, metrics, read_log_entries
from tests.cluster.hosts import Host, Hosts, Started

PORT = 29_700
SETTINGS = (
    *("rl.prompts=4", "rl.rollouts=8", "engine.num_engines=1", "sandbox.executors=1", "engine.threads=1"),
    *("supervision.heartbeat_s=0.5", "supervision.heartbeat_timeout_s=6"),
)
TIMEOUT_S = 240.0


class ClusterRun:
    """`asterism run` on the first host."""

    def __init__(self, hosts: Hosts, runs: Path, *settings: str) -> None:
        self._hosts = hosts
        self._key = generate_key(runs / "keys")
        self._joined: list[tuple[Host, Started]] = []
        self.folder = RunFolder(runs / "demo")
        own = (f"cluster.key={self._key}", f"cluster.host={hosts[0].address}")
        self._run = self._start(hosts[0], runs / "run.txt", command_line(runs, *SETTINGS, *own, *settings))

    def _start(self, host: Host, output: Path, words: Sequence[str]) -> Started:
        with output.open("w") as file:
            return host.popen(words, stdout=file, stderr=subprocess.STDOUT)

    def join(self, host: Host, *options: str) -> Started:
        output = self.folder.path.with_name(f"join{len(self._joined)}.txt")
        at = f"tcp://{self._hosts[0].address}:{PORT}"
        process = self._start(host, output, [*ASTERISM, "join", at, "--key", str(self._key), *options])
        self._joined.append((host, process))
        return process

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not condition():
            assert self._run.poll() is None, self.read_output()
            assert time.monotonic() < deadline, self.read_output()
            time.sleep(0.05)  # interval of polling

    def finish(self, killed: Sequence[Host] = ()) -> dict[str, Any]:
        """Wait until the run and its nodes, except those on `killed` hosts, succeed. Return the summary."""
        self._run.wait(TIMEOUT_S)
        assert self._run.returncode == 0, self.read_output()
        for host, process in self._joined:
            if host not in killed:
                assert process.wait(TIMEOUT_S) == 0, self.read_output()
        return json.loads(self.folder.summary.read_bytes())

    def read_output(self) -> str:
        """Return the output of the run and of its nodes."""
        outputs = sorted(self.folder.path.parent.glob("*.txt"))
        return "\n".join(f"--- {output.name}\n{output.read_text()}" for output in outputs)

    def read_log_entries(self, event: str, process: str = "launcher") -> list[dict[str, Any]]:
        """Return the entries of one kind in a process's structured log."""
        return read_log_entries(self.folder, event, process)

    def list_nodes(self, event: str) -> list[int]:
        """Return the node numbers in the launcher's log entries of one kind."""
        return [entry["node"] for entry in self.read_log_entries(event)]

    def metrics(self) -> list[dict[str, float]]:
        """Return the metrics of the finished steps."""
        return metrics(self.folder, "step")

    def count_answers(self, kind: str) -> Counter[str]:
        """Count the messages of this kind that the rollout received, by sender."""
        log = self.folder.events / "rollout-0.sqlite"
        return Counter(decode(event.frame).sender for event, _ in read_events(log, kinds=[kind]))

    def list_leftovers(self) -> list[str]:
        """List processes, sockets and weights that are left on the hosts."""
        hosts = [host for host in self._hosts if host.is_on]
        processes = [f"{host.name}: {line}" for host in hosts for line in host.list_processes().values()]
        files = [f"{host.name}: {path}" for host in hosts for path in host.list_private_files() if "asterism" in path]
        return processes + files
