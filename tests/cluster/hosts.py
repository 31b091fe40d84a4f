"""Hosts on one machine: network namespaces on one switch, for tests of runs over several machines.

Each host has a private address, loopback, name, process id namespace, /dev/shm and temporary folder; the rest of the file
system is shared, like a cluster's network file system. The switch is a bridge in a separate namespace, so that the
machine's interfaces, bridges and firewall do not change and tests do not interfere.

All namespaces belong to processes that die with their creator. The kernel then kills the processes on the hosts and
removes links, addresses and memory. Nothing has a name on the machine, so nothing can be left over or collide.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.processes import wait_for_end

ROOT = Path(__file__).parents[2]
_RELAY = Path(__file__).with_name("relay.py")
_MAX_HOSTS = 15
_PRIVATE = "/dev/shm"  # each host has its own shared memory
_NAMES = ("127.0.0.1 localhost", *(f"10.77.0.{number} host{number}" for number in range(1, _MAX_HOSTS + 1)))
# These commands bind a private, unlinked file over /etc/hosts.
_BIND_HOSTS_FILE = f"printf '%s\\n' {shlex.join(_NAMES)} > {_PRIVATE}/hosts; mount --bind {_PRIVATE}/hosts /etc/hosts; rm {_PRIVATE}/hosts"
_FORWARDING, _BLOCKED = 3, 0  # states of a bridge's port


def find_obstacle() -> str:
    """Return why hosts cannot be made on this machine, or an empty text."""
    if absent := [program for program in ("ip", "bridge", "nsenter", "unshare") if shutil.which(program) is None]:
        return f"missing programs: {', '.join(absent)}."
    if os.getuid() != 0:
        return "making them needs root."
    attempt = subprocess.run(["unshare", "--net", "--mount", "--pid", "--uts", "--fork", "true"], capture_output=True)
    return "" if attempt.returncode == 0 else attempt.stderr.decode().strip()


class Started(subprocess.Popen[str]):
    """A process on a host. Signals reach the process itself, not the nsenter that has started it."""

    @property
    def inner(self) -> int:
        """The process id outside of the host, or 0 after the end of the process."""
        while self.poll() is None:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if children := Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split():
                    return int(children[0])
        return 0

    def send_line(self, text: str) -> None:
        assert self.stdin is not None
        self.stdin.write(text + "\n")
        self.stdin.flush()

    def read_line(self) -> str:
        assert self.stdout is not None
        return self.stdout.readline().rstrip("\n")

    def send_signal(self, sig: int) -> None:
        if inner := self.inner:
            with contextlib.suppress(ProcessLookupError):
                os.kill(inner, sig)


class _Namespaces:
    """A set of namespaces, which an idle process keeps open."""

    def __init__(self, setup: str) -> None:
        # `cat` runs until its input ends. As the first process it inherits orphans, and reaps them by ignoring SIGCHLD.
        script = f"{setup}; echo; exec env --ignore-signal=CHLD cat"
        self._holder = subprocess.Popen(
            [
                "unshare",
                *("--net", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"),
                "sh",
                "-ec",
                script,
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == b"\n", "no namespaces; the reason is in the output"
        pid = self._holder.pid
        self.first = int(Path(f"/proc/{pid}/task/{pid}/children").read_text())  # process 1 of the namespace

    def build_enter_argv(self, folder: Path = ROOT) -> list[str]:
        return ["nsenter", f"--target={self.first}", "--net", "--mount", "--uts", "--pid", f"--wdns={folder}"]

    def ip(self, *commands: str) -> None:
        """Run commands of `ip`. Process ids in the commands are ids outside of the namespace."""
        self._batch("ip", commands)

    def bridge(self, command: str) -> None:
        self._batch("bridge", [command])

    def _batch(self, program: str, commands: Sequence[str]) -> None:
        words = ["nsenter", f"--target={self.first}", "--net", program, "-batch", "-"]
        subprocess.run(words, input="\n".join(commands), text=True, check=True)

    def end(self) -> None:
        """Kill all processes in the namespaces."""
        self._holder.communicate()


class Host:
    def __init__(self, number: int) -> None:
        self.number = number
        self.name = f"host{number}"
        self.address = f"10.77.0.{number}"
        self._namespaces = _Namespaces(
            f"hostname {self.name}; mount -t tmpfs private {_PRIVATE}; mkdir -m 1777 {_PRIVATE}/tmp; {_BIND_HOSTS_FILE}"
        )
        self._environment = {"TMPDIR": f"{_PRIVATE}/tmp", "PYTHONPATH": str(ROOT)}
        self._started: list[Started] = []
        self.is_on = True

    @property
    def first(self) -> int:
        return self._namespaces.first

    def plug_in(self) -> None:
        """Connect the host. Entries of its neighbour table are permanent, so that they do not expire in a partition."""
        neighbours = [
            f"neigh add 10.77.0.{other} lladdr {_format_mac(other)} dev eth0 nud permanent"
            for other in range(1, _MAX_HOSTS + 1)
            if other != self.number
        ]
        self._namespaces.ip("link set lo up", "link set eth0 up", f"addr add {self.address}/24 dev eth0", *neighbours)

    def popen(self, argv: Sequence[str], env: Mapping[str, str] | None = None, **options: Any) -> Started:
        """Start a process with text streams and `options` of subprocess.Popen."""
        environment = {**os.environ, **self._environment, **(env or {})}
        process = Started([*self._namespaces.build_enter_argv(), *argv], env=environment, text=True, **options)
        self._started.append(process)
        return process

    def run(self, argv: Sequence[str], timeout_s: float = 60.0) -> str:
        """Run a command. Return its output. Raises CalledProcessError."""
        with self.popen(argv, stdout=subprocess.PIPE) as process:
            try:
                output, _ = process.communicate(timeout=timeout_s)
            except BaseException:
                process.kill()
                raise
        if process.returncode:
            raise subprocess.CalledProcessError(process.returncode, list(argv), output)
        return output

    def path(self, path: Path) -> Path:
        """Return the path at which other hosts find a file of this host."""
        return Path(f"/proc/{self.first}/root") / path.relative_to("/")

    def list_private_files(self) -> list[str]:
        """List the files in the host's memory and temporary folder."""
        private = self.path(Path(_PRIVATE))
        return sorted(str(path.relative_to(private)) for path in private.rglob("*") if path != private / "tmp")

    def list_processes(self) -> dict[int, str]:
        """Return the command lines of the host's processes by process id outside of the host."""
        namespace = str(Path(f"/proc/{self.first}/ns/pid").readlink())
        return {pid: line for pid, line in _list_running(namespace) if pid != self.first}

    def list_connections(self) -> list[list[str]]:
        """List the fields of the established connections in /proc/net/tcp."""
        lines = map(str.split, self.run(["cat", "/proc/net/tcp"]).splitlines())
        return [fields for fields in lines if fields[3] == "01"]

    def kill_all(self) -> None:
        """Kill all processes of the host together. The host stays, and the kernel closes the processes' connections."""
        members: list[int] = []
        for pid in self.list_processes():
            with contextlib.suppress(ProcessLookupError):
                members.append(os.pidfd_open(pid))
        subprocess.run([*self._namespaces.build_enter_argv(), "sh", "-c", "kill -KILL -1"], check=True)
        for pidfd in members:
            wait_for_end(pidfd)

    def end(self) -> None:
        self.is_on = False
        self._namespaces.end()
        for process in self._started:
            process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()


class Hosts:
    """A context manager: `with Hosts(3) as hosts`. `hosts[0]` is the first host, with the address 10.77.0.1."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._hosts: list[Host] = []
        self._slow: dict[Host, Started] = {}

    def __enter__(self) -> Hosts:
        self._switch = _Namespaces("ip link add switch type bridge; ip link set switch up")
        try:
            for _ in range(self._count):
                self.add()
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def __getitem__(self, index: int) -> Host:
        return self._hosts[index]

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts)

    def add(self) -> Host:
        """Add a host with a new number."""
        number = len(self._hosts) + 1
        assert number <= _MAX_HOSTS
        host = Host(number)
        self._hosts.append(host)
        peer = f"peer name eth0 address {_format_mac(number)} netns {host.first}"
        self._switch.ip(
            f"link add {host.name} type veth {peer}", f"link set {host.name} master switch", f"link set {host.name} up"
        )
        host.plug_in()
        return host

    def partition(self, host: Host) -> None:
        """Let the switch silently drop all frames from and to the host until `heal`.

        The host's link stays up, so that connections stay and TCP retransmits lost segments, as in a broken network.
        With the link down, the kernel would remove the routes and fail each send immediately.
        """
        self._switch.bridge(f"link set dev {host.name} state {_BLOCKED}")

    def heal(self, host: Host) -> None:
        self._switch.bridge(f"link set dev {host.name} state {_FORWARDING}")

    def slow(self, host: Host, delay_ms: float, mbit_per_s: float) -> None:
        """Delay both directions between the host and the switch from now on. Connections stay.

        A relay between two bridges delays frames (tests/cluster/relay.py): some kernels have no queue with delay.
        """
        inner, outer, bridge = f"in{host.number}", f"out{host.number}", f"slow{host.number}"
        arguments = (inner, outer, str(delay_ms), str(mbit_per_s))
        relay = Started(
            [*self._switch.build_enter_argv(), sys.executable, str(_RELAY), *arguments],
            stdout=subprocess.PIPE,
            text=True,
        )
        self._slow[host] = relay
        assert relay.read_line() == "ready"
        self._switch.ip(
            f"link add {bridge} type bridge",
            f"link set {inner} master {bridge}",
            f"link set {outer} master switch",
            *(f"link set {each} up" for each in (bridge, inner, outer)),
            f"link set {host.name} master {bridge}",
        )

    def power_off(self, host: Host) -> None:
        """Remove the host without closing its connections."""
        self.partition(host)
        host.end()

    def end(self) -> None:
        for host in self._hosts:
            if host.is_on:
                host.end()
        self._switch.end()
        for relay in self._slow.values():
            relay.communicate()


def _format_mac(number: int) -> str:
    return f"02:00:0a:4d:00:{number:02x}"


def _list_running(namespace: str) -> Iterator[tuple[int, str]]:
    """Yield the running processes in a process id namespace."""
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            if state not in "ZX" and str((entry / "ns" / "pid").readlink()) == namespace:
                yield int(entry.name), (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
