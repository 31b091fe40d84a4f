"""A run over hosts: begun on the first one, joined by the others, each of which may be killed, switched off, or cut off."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from bus.curve import make_key
from configs.run_folder import RunFolder
from tests.actors.running import command_line, from_cold_start_of
from tests.chaos.plans import HOST, LAUNCHER, SILENT_S, Fault
from tests.chaos.play import GONE_WITHIN_S, SETTINGS, signalled
from tests.cluster.hosts import Host, Hosts, Started

PORT = 29_700
OVER = 0, 130  # exit codes of those who joined: the run is over, or they were told to end
NODE_ENDS_WITHIN_S = 2 * SILENT_S  # after the run; then it is told to
NODE_OBEYS_WITHIN_S = 60.0
_CACHE = "tmp/torchinductor_"  # that torch keeps for a user
_RANK, _AGENT, _WEIGHTS = "engine.learner", "torch.distributed.run", "engine.weight_server"


class Due(NamedTuple):
    """The end of a fault that lasts."""

    at: float
    host: Host
    target: str
    undo: Callable[[], None]


class OverHosts:
    def __init__(self, cold_start: RunFolder, runs: Path, num_hosts: int) -> None:
        runs.mkdir(exist_ok=True)
        self.folder = RunFolder(runs / "demo")
        self.where = f"{num_hosts} hosts"
        self._runs = runs
        self._stack = contextlib.ExitStack()
        self._hosts = self._stack.enter_context(Hosts(num_hosts))
        self._places = list(self._hosts)  # the host that is there, by the number in the plan
        self._key = make_key(runs / "keys")
        cluster = (f"cluster.key={self._key}", f"cluster.host={self._places[0].address}", f"cluster.nodes={num_hosts}")
        per_node = ("engine.num_engines=1", "sandbox.executors=1")
        self._settings = (*SETTINGS, *from_cold_start_of(cold_start), *per_node, *cluster)
        self._output = runs / "run.txt"
        self._joined: dict[int, Started] = {}  # the latest of each place
        self._due: list[Due] = []
        self._wrong: list[str] = []

    def start(self, *, resume: bool) -> None:
        words = command_line(self._runs, *self._settings, *(["--resume"] if resume else []))
        self._run = self._on(self._places[0], self._output, words)
        for place in range(1, len(self._places)):
            if place not in self._joined or self._joined[place].poll() is not None:
                self._join(place)

    def ended(self) -> bool:
        for due in [due for due in self._due if due.at <= time.monotonic()]:
            self._due.remove(due)
            due.undo()
        if self._run.poll() is not None:
            return True
        for place, process in self._joined.items():
            if process.poll() not in (None, 0):  # 0: it was told that the run is over, which is still being summed up
                self._complain(place, f"ended with exit code {process.returncode}, and the run goes on")
                self._join(place)
        return False

    # ---------------------------------------------------------------- faults

    def hit(self, fault: Fault) -> str:
        host = self._places[fault.host]
        match fault.target, fault.action:
            case "host", "partition":
                self._hosts.partition(host)
                self._later(fault, host, lambda: self._hosts.heal(host))
                return host.address
            case "host", "switch off":
                self._hosts.power_off(host)
                self._due = [due for due in self._due if due.host is not host]
                _wake(self._joined[fault.host])
                self._joined[fault.host].wait()
                self._places[fault.host] = self._hosts.add()
                self._join(fault.host)
                return f"{host.address}, {self._places[fault.host].address} took its place"
            case "host", _:
                host.kill_all()
                met = host.address
            case "launcher", _:
                process = self._joined[fault.host] if fault.host else self._run
                inner = process.inner
                met = signalled(inner or None, fault)
                if fault.action == "stop":
                    self._later(fault, host, lambda: _wake(process))
            case target, _:
                met = signalled(_found(host, target), fault)
        if fault.host and fault.action == "kill" and fault.target in (HOST, LAUNCHER):
            _wake(self._joined[fault.host])
            self._joined[fault.host].wait()
            self._join(fault.host)
        if fault.ends_the_run:
            _wake(self._run)
        return met

    def _later(self, fault: Fault, host: Host, undo: Callable[[], None]) -> None:
        """Of two faults of one kind the later one says when both end."""
        others = [due for due in self._due if (due.host, due.target) != (host, fault.target)]
        self._due = [*others, Due(time.monotonic() + fault.lasts_s, host, fault.target, undo)]

    # ---------------------------------------------------------------- processes

    def _join(self, place: int) -> None:
        at = f"tcp://{self._places[0].address}:{PORT}"
        words = [sys.executable, "-m", "actors.cli", "join", at, "--key", str(self._key)]
        self._joined[place] = self._on(self._places[place], self._output_of(place), words)

    def _output_of(self, place: int) -> Path:
        return self._runs / f"join-{place}.txt"

    def _on(self, host: Host, output: Path, words: list[str]) -> Started:
        with output.open("a") as file:
            return host.popen(words, stdout=file, stderr=subprocess.STDOUT)

    def _complain(self, place: int, what: str) -> None:
        told = self._output_of(place).read_text()[-2000:]
        self._wrong.append(f"the node on host {place} {what}: {told}")

    # ---------------------------------------------------------------- the end

    def finish(self) -> tuple[int, str, list[str]]:
        for due in self._due:
            due.undo()
        self._run.kill()
        _wake(self._run)
        self._run.wait()
        for place, process in self._joined.items():
            self._end(place, process)
        self._wrong += _left_on(self._places)
        firsts = [host.first for host in self._places]
        self._stack.close()
        self._wrong += [f"the namespaces of process {pid} are left" for pid in firsts if Path(f"/proc/{pid}").exists()]
        return self._run.returncode, self._output.read_text(), self._wrong

    def _end(self, place: int, process: Started) -> None:
        """It ends by itself, or it was cut off, has not heard of the run's end, and is told to."""
        try:
            process.wait(NODE_ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:
            process.terminate()
            try:
                process.wait(NODE_OBEYS_WITHIN_S)
            except subprocess.TimeoutExpired:
                self._complain(place, "does not end")
                return
        if process.returncode not in OVER:
            self._complain(place, f"ended with exit code {process.returncode}")


def _wake(process: Started) -> None:
    """With nsenter, which stops when what it has started is stopped."""
    process.send_signal(signal.SIGCONT)
    if process.poll() is None:
        os.kill(process.pid, signal.SIGCONT)


def _found(host: Host, target: str) -> int | None:
    for pid, line in host.processes().items():
        words = line.split()
        match target:
            case "learner rank":
                is_it = _RANK in words and _AGENT not in words
            case "learner":
                is_it = _AGENT in words
            case "weights":
                is_it = _WEIGHTS in words
            case name:
                is_it = "actors.process" in words and any(word.partition("@")[0] == name for word in words)
        if is_it:
            return pid
    return None


def _left_on(hosts: list[Host]) -> Iterator[str]:
    """Once all had a while to go."""
    deadline = time.monotonic() + GONE_WITHIN_S
    while any(host.processes() for host in hosts) and time.monotonic() < deadline:
        time.sleep(0.05)
    for host in hosts:
        if processes := host.processes():
            yield f"processes are left on {host.name}: {processes}"
        if files := [file for file in host.own_files() if not file.startswith(_CACHE)]:
            yield f"files are left on {host.name}: {files}"
