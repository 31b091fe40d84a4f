"""Runs over hosts: the tiny recipe, begun on the first host and joined by the others, and what is to be seen of it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bus.codec import decode
from bus.curve import make_key
from bus.event_reading import read_events
from configs.run_folder import RunFolder
from tests.actors.running import SMALL, metrics
from tests.cluster.hosts import Host, Hosts, Started

PORT = 29_700
SETTINGS = (
    *SMALL,
    *("rl.prompts=4", "rl.rollouts=8", "engine.num_engines=1", "sandbox.executors=1", "engine.threads=1"),
    *("supervision.heartbeat_s=0.5", "supervision.silent_s=6"),
)
PATIENCE_S = 240.0


class ClusterRun:
    """`asterism run` on the first host."""

    def __init__(self, hosts: Hosts, runs: Path, *settings: str) -> None:
        self._hosts = hosts
        self._key = make_key(runs / "keys")
        self._joined: list[tuple[Host, Started]] = []
        self.folder = RunFolder(runs / "demo")
        own = (f"cluster.key={self._key}", f"cluster.host={hosts[0].address}", f'runs_folder="{runs}"')
        arguments = [word for setting in (*SETTINGS, *own, *settings) for word in ("--set", setting)]
        self._run = self._start(hosts[0], runs / "run.txt", "run", "configs/tiny.toml", *arguments)

    def _start(self, host: Host, output: Path, *words: str) -> Started:
        with output.open("w") as file:
            return host.popen([sys.executable, "-m", "actors.cli", *words], stdout=file, stderr=subprocess.STDOUT)

    def join(self, host: Host, *options: str) -> Started:
        output = self.folder.path.with_name(f"join{len(self._joined)}.txt")
        at = f"tcp://{self._hosts[0].address}:{PORT}"
        process = self._start(host, output, "join", at, "--key", str(self._key), *options)
        self._joined.append((host, process))
        return process

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert self._run.poll() is None, self.told()
            assert time.monotonic() < deadline, self.told()
            time.sleep(0.05)  # other processes move, not this one

    def finish(self, killed: Sequence[Host] = ()) -> dict[str, Any]:
        """The summary of a run that ended well, as it did for all that had joined it but for those killed."""
        self._run.wait(PATIENCE_S)
        assert self._run.returncode == 0, self.told()
        for host, process in self._joined:
            if host not in killed:
                assert process.wait(PATIENCE_S) == 0, self.told()
        return json.loads(self.folder.summary.read_bytes())

    def told(self) -> str:
        """What the run and those who joined printed."""
        outputs = sorted(self.folder.path.parent.glob("*.txt"))
        return "\n".join(f"--- {output.name}\n{output.read_text()}" for output in outputs)

    # ---------------------------------------------------------------- what it writes

    def said(self, event: str, process: str = "launcher") -> list[dict[str, Any]]:
        """What that process's structured log has of one kind."""
        path = self.folder.logs / f"{process}.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        entries = [json.loads(line) for line in lines if line.endswith("\n")]
        return [entry for entry in entries if entry["event"] == event]

    def nodes(self, event: str) -> list[int]:
        """The numbers of those that have joined, or left."""
        return [entry["node"] for entry in self.said(event)]

    def metrics(self) -> list[dict[str, float]]:
        """Of the steps that are finished."""
        return metrics(self.folder, "step")

    def answers(self, kind: str) -> Counter[str]:
        """Messages of that kind which the rollout has received, by the process that sent them."""
        log = self.folder.events / "rollout-0.sqlite"
        return Counter(decode(event.frame).sender for event, _ in read_events(log, kinds=[kind]))

    def left_over(self) -> list[str]:
        """Processes, sockets and weights on the hosts."""
        hosts = [host for host in self._hosts if host.is_on]
        processes = [f"{host.name}: {line}" for host in hosts for line in host.processes().values()]
        files = [f"{host.name}: {path}" for host in hosts for path in host.own_files() if "asterism" in path]
        return processes + files
