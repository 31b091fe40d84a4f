"""A run over several hosts with kills, power-offs and partitions. It starts on the first host; the others join."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from asterism.bus.transport.curve_auth import generate_key
from asterism.configs.run_folder import RunFolder
from tests.actors.runs.running import ASTERISM, command_line, from_cold_start_of
from tests.chaos.plans import HEARTBEAT_TIMEOUT_S, HOST, LAUNCHER, Fault
from tests.chaos.play import EXIT_TIMEOUT_S, SETTINGS, signal_process
from tests.cluster.hosts import Host, Hosts, Started

PORT = 29_700
EXPECTED_EXIT_CODES = 0, 130  # exit codes of a joined node after the end of the run, and after an interrupt
NODE_EXIT_TIMEOUT_S = 2 * HEARTBEAT_TIMEOUT_S  # seconds after the run's end until a node is terminated
NODE_TERMINATE_TIMEOUT_S = 60.0
_CACHE = "tmp/torchinductor_"  # folder of torch's cache, which is no leftover
_PROGRAMS = {"learner": "asterism.engine.learner", "weights": "asterism.engine.weight_transfer.weight_server"}


class PendingUndo(NamedTuple):
    """The scheduled end of a fault that has a duration."""

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
        self._places = list(self._hosts)  # present host of each host number in the plan
        self._key = generate_key(runs / "keys")
        cluster = (f"cluster.key={self._key}", f"cluster.host={self._places[0].address}", f"cluster.nodes={num_hosts}")
        per_node = ("engine.num_engines=1", "sandbox.executors=1")
        self._settings = (*SETTINGS, *from_cold_start_of(cold_start), *per_node, *cluster)
        self._output = runs / "run.txt"
        self._joined: dict[int, Started] = {}  # latest process by host number
        self._due: list[PendingUndo] = []
        self._violations: list[str] = []

    def start(self, *, resume: bool) -> None:
        words = command_line(self._runs, *self._settings, *(["--resume"] if resume else []))
        self._run = self._start_process(self._places[0], self._output, words)
        for place in range(1, len(self._places)):
            if place not in self._joined or self._joined[place].poll() is not None:
                self._join(place)

    def has_ended(self) -> bool:
        for due in [due for due in self._due if due.at <= time.monotonic()]:
            self._due.remove(due)
            due.undo()
        if self._run.poll() is not None:
            return True
        for place, process in self._joined.items():
            if process.poll() not in (None, 0):  # 0: the run is over, and its summary is being written
                self._record_violation(place, f"ended with exit code {process.returncode} during the run")
                self._join(place)
        return False

    def hit(self, fault: Fault) -> str:
        host = self._places[fault.host]
        match fault.target, fault.action:
            case "host", "partition":
                self._hosts.partition(host)
                self._schedule_undo(fault, host, lambda: self._hosts.heal(host))
                return host.address
            case "host", "switch off":
                self._hosts.power_off(host)
                self._due = [due for due in self._due if due.host is not host]
                _continue_process(self._joined[fault.host])
                self._joined[fault.host].wait()
                self._places[fault.host] = self._hosts.add()
                self._join(fault.host)
                return f"{host.address}, {self._places[fault.host].address} took its place"
            case "host", _:
                host.kill_all()
                description = host.address
            case "launcher", _:
                process = self._joined[fault.host] if fault.host else self._run
                inner = process.inner
                description = signal_process(inner or None, fault)
                if fault.action == "stop":
                    self._schedule_undo(fault, host, lambda: _continue_process(process))
            case target, _:
                description = signal_process(_find_target(host, target), fault)
        if fault.host and fault.action == "kill" and fault.target in (HOST, LAUNCHER):
            _continue_process(self._joined[fault.host])
            self._joined[fault.host].wait()
            self._join(fault.host)
        if fault.ends_the_run:
            _continue_process(self._run)
        return description

    def _schedule_undo(self, fault: Fault, host: Host, undo: Callable[[], None]) -> None:
        """Schedule the end of a fault. It replaces the scheduled end of an earlier fault of the same target."""
        others = [due for due in self._due if (due.host, due.target) != (host, fault.target)]
        self._due = [*others, PendingUndo(time.monotonic() + fault.lasts_s, host, fault.target, undo)]

    def _join(self, place: int) -> None:
        at = f"tcp://{self._places[0].address}:{PORT}"
        words = [*ASTERISM, "join", at, "--key", str(self._key)]
        self._joined[place] = self._start_process(self._places[place], self._get_output_path(place), words)

    def _get_output_path(self, place: int) -> Path:
        return self._runs / f"join-{place}.txt"

    def _start_process(self, host: Host, output: Path, words: list[str]) -> Started:
        with output.open("a") as file:
            return host.popen(words, stdout=file, stderr=subprocess.STDOUT)

    def _record_violation(self, place: int, what: str) -> None:
        output = self._get_output_path(place).read_text()[-2000:]
        self._violations.append(f"the node on host {place} {what}: {output}")

    def finish(self) -> tuple[int, str, list[str]]:
        for due in self._due:
            due.undo()
        self._run.kill()
        _continue_process(self._run)
        self._run.wait()
        for place, process in self._joined.items():
            self._end(place, process)
        self._violations += _find_leftovers(self._places)
        firsts = [host.first for host in self._places]
        self._stack.close()
        self._violations += [
            f"the namespaces of process {pid} are left" for pid in firsts if Path(f"/proc/{pid}").exists()
        ]
        return self._run.returncode, self._output.read_text(), self._violations

    def _end(self, place: int, process: Started) -> None:
        """Wait for the node. Terminate it after a timeout: a disconnected node misses the end of the run."""
        try:
            process.wait(NODE_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.terminate()
            try:
                process.wait(NODE_TERMINATE_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._record_violation(place, "does not end")
                return
        if process.returncode not in EXPECTED_EXIT_CODES:
            self._record_violation(place, f"ended with exit code {process.returncode}")


def _continue_process(process: Started) -> None:
    """Continue the process, and its nsenter, which stops whenever the process stops."""
    process.send_signal(signal.SIGCONT)
    if process.poll() is None:
        os.kill(process.pid, signal.SIGCONT)


def _find_target(host: Host, target: str) -> int | None:
    for pid, line in host.list_processes().items():
        words = line.split()
        if target in _PROGRAMS and _PROGRAMS[target] in words:
            return pid
        if "asterism.actors.process" in words and any(word.partition("@")[0] == target for word in words):
            return pid
    return None


def _find_leftovers(hosts: list[Host]) -> Iterator[str]:
    """Yield processes and files that are left after EXIT_TIMEOUT_S."""
    deadline = time.monotonic() + EXIT_TIMEOUT_S
    while any(host.list_processes() for host in hosts) and time.monotonic() < deadline:
        time.sleep(0.05)
    for host in hosts:
        if processes := host.list_processes():
            yield f"processes are left on {host.name}: {processes}"
        if files := [file for file in host.list_private_files() if not file.startswith(_CACHE)]:
            yield f"files are left on {host.name}: {files}"
