"""Hosts on one machine: network namespaces on one switch, for tests of runs over several machines.

A host has an address, a loopback, a name, process ids, a /dev/shm and a folder for temporary files of its own; all else
of the file system is common to all, as a cluster's network file system is. The switch is a bridge in a namespace of its
own, so that the machine's own interfaces, bridges and firewall stay as they are, and two tests never meet.

All namespaces hang on processes that end with the one that made them, however it ends: the kernel then kills what runs on
the hosts and takes links, addresses and memory away. Nothing has a name on the machine, so nothing can be left or collide.
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

ROOT = Path(__file__).parents[2]
_RELAY = Path(__file__).with_name("relay.py")
_MAX_HOSTS = 15
_OWN = "/dev/shm"  # memory that is a host's own
_NAMES = ("127.0.0.1 localhost", *(f"10.77.0.{number} host{number}" for number in range(1, _MAX_HOSTS + 1)))
# A file of the host's own instead of /etc/hosts; without a name.
_KNOW_NAMES = (
    f"printf '%s\\n' {shlex.join(_NAMES)} > {_OWN}/hosts; mount --bind {_OWN}/hosts /etc/hosts; rm {_OWN}/hosts"
)
_FORWARDING, _SILENT = 3, 0  # states of a bridge's port


def why_not() -> str:
    """Why hosts cannot be made here; nothing if they can."""
    if absent := [program for program in ("ip", "bridge", "nsenter", "unshare") if shutil.which(program) is None]:
        return f"there is no {', no '.join(absent)}."
    if os.getuid() != 0:
        return "only root may make them."
    tried = subprocess.run(["unshare", "--net", "--mount", "--pid", "--uts", "--fork", "true"], capture_output=True)
    return "" if tried.returncode == 0 else tried.stderr.decode().strip()


class Started(subprocess.Popen[str]):
    """A process on a host. Signals go to it and not to the one that brought it there."""

    @property
    def inner(self) -> int:
        """Its process id, as it is outside of the host; 0 when it has ended."""
        while self.poll() is None:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                if children := Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split():
                    return int(children[0])
        return 0

    def send_signal(self, sig: int) -> None:
        if inner := self.inner:
            with contextlib.suppress(ProcessLookupError):
                os.kill(inner, sig)


class _Namespaces:
    """A process that does nothing but hold them."""

    def __init__(self, setting_up: str) -> None:
        # Until its input ends. The first process of a namespace is given its orphans, and ignoring SIGCHLD reaps them.
        script = f"{setting_up}; echo; exec env --ignore-signal=CHLD cat"
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
        assert self._holder.stdout.readline() == b"\n", "no namespaces; the reason is in what was printed"
        pid = self._holder.pid
        self.first = int(Path(f"/proc/{pid}/task/{pid}/children").read_text())  # process 1 of those in there

    def entering(self, folder: Path = ROOT) -> list[str]:
        return ["nsenter", f"--target={self.first}", "--net", "--mount", "--uts", "--pid", f"--wdns={folder}"]

    def ip(self, *commands: str) -> None:
        """Process ids in them are those of outside."""
        self._batch("ip", commands)

    def bridge(self, command: str) -> None:
        self._batch("bridge", [command])

    def _batch(self, program: str, commands: Sequence[str]) -> None:
        words = ["nsenter", f"--target={self.first}", "--net", program, "-batch", "-"]
        subprocess.run(words, input="\n".join(commands), text=True, check=True)

    def end(self) -> None:
        """With all processes in there, at once."""
        self._holder.communicate()


class Host:
    def __init__(self, number: int) -> None:
        self.number = number
        self.name = f"host{number}"
        self.address = f"10.77.0.{number}"
        self._namespaces = _Namespaces(
            f"hostname {self.name}; mount -t tmpfs own {_OWN}; mkdir -m 1777 {_OWN}/tmp; {_KNOW_NAMES}"
        )
        self._environment = {"TMPDIR": f"{_OWN}/tmp", "PYTHONPATH": str(ROOT)}
        self._started: list[Started] = []
        self.is_on = True

    @property
    def first(self) -> int:
        return self._namespaces.first

    def plug_in(self) -> None:
        """Whose address is whose is known for good: as behind a router, silence does not make a host unknown."""
        known = [
            f"neigh add 10.77.0.{other} lladdr {_mac(other)} dev eth0 nud permanent"
            for other in range(1, _MAX_HOSTS + 1)
            if other != self.number
        ]
        self._namespaces.ip("link set lo up", "link set eth0 up", f"addr add {self.address}/24 dev eth0", *known)

    def popen(self, argv: Sequence[str], env: Mapping[str, str] | None = None, **options: Any) -> Started:
        """Its output is text; `options` are those of subprocess.Popen."""
        environment = {**os.environ, **self._environment, **(env or {})}
        process = Started([*self._namespaces.entering(), *argv], env=environment, text=True, **options)
        self._started.append(process)
        return process

    def run(self, argv: Sequence[str], timeout_s: float = 60.0) -> str:
        """What it printed. Raises CalledProcessError if it failed."""
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
        """A file of the host's, from outside."""
        return Path(f"/proc/{self.first}/root") / path.relative_to("/")

    def own_files(self) -> list[str]:
        """What lies in its memory and in its folder for temporary files."""
        own = self.path(Path(_OWN))
        return sorted(str(path.relative_to(own)) for path in own.rglob("*") if path != own / "tmp")

    def processes(self) -> dict[int, str]:
        """The command lines of those that run on it, by their ids outside of it."""
        namespace = str(Path(f"/proc/{self.first}/ns/pid").readlink())
        return {pid: line for pid, line in _running(namespace) if pid != self.first}

    def kill_all(self) -> None:
        """All of its processes at the same moment. The host stays, and its kernel ends their connections."""
        subprocess.run([*self._namespaces.entering(), "sh", "-c", "kill -KILL -1"], check=True)

    def end(self) -> None:
        self.is_on = False
        self._namespaces.end()
        for process in self._started:
            process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()


class Hosts:
    """A context manager: `with Hosts(3) as hosts`. `hosts[0]` is the first one, with the address 10.77.0.1."""

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
        """A further one, under a number that none had."""
        number = len(self._hosts) + 1
        assert number <= _MAX_HOSTS
        host = Host(number)
        self._hosts.append(host)
        peer = f"peer name eth0 address {_mac(number)} netns {host.first}"
        self._switch.ip(
            f"link add {host.name} type veth {peer}", f"link set {host.name} master switch", f"link set {host.name} up"
        )
        host.plug_in()
        return host

    def partition(self, host: Host) -> None:
        """The switch drops what the host sends and what is sent to it, in silence, until `heal`.

        The host's own link stays up: were it set down, the kernel would take its routes away and fail what is sent at
        once, which tells both ends what a broken network does not. So connections stay, and what they carry is sent again.
        """
        self._switch.bridge(f"link set dev {host.name} state {_SILENT}")

    def heal(self, host: Host) -> None:
        self._switch.bridge(f"link set dev {host.name} state {_FORWARDING}")

    def slow(self, host: Host, delay_ms: float, mbit_per_s: float) -> None:
        """From now on, each way between the host and the switch; connections stay.

        By a relay between two bridges (tests/cluster/relay.py): kernels need not have a queue that delays.
        """
        inner, outer, bridge = f"in{host.number}", f"out{host.number}", f"slow{host.number}"
        arguments = (inner, outer, str(delay_ms), str(mbit_per_s))
        relay = Started(
            [*self._switch.entering(), sys.executable, str(_RELAY), *arguments], stdout=subprocess.PIPE, text=True
        )
        self._slow[host] = relay
        assert relay.stdout is not None
        assert relay.stdout.readline() == "ready\n"
        self._switch.ip(
            f"link add {bridge} type bridge",
            f"link set {inner} master {bridge}",
            f"link set {outer} master switch",
            *(f"link set {each} up" for each in (bridge, inner, outer)),
            f"link set {host.name} master {bridge}",
        )

    def power_off(self, host: Host) -> None:
        """Nothing of it is left, and it says nothing to anybody: no connection of its is ended."""
        self.partition(host)
        host.end()

    def end(self) -> None:
        for host in self._hosts:
            if host.is_on:
                host.end()
        self._switch.end()
        for relay in self._slow.values():
            relay.communicate()


def _mac(number: int) -> str:
    return f"02:00:0a:4d:00:{number:02x}"


def _running(namespace: str) -> Iterator[tuple[int, str]]:
    """Those whose namespace of process ids it is, and that have not ended."""
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            if state not in "ZX" and str((entry / "ns" / "pid").readlink()) == namespace:
                yield int(entry.name), (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
