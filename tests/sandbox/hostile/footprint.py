"""Measure a sandbox's processes, descriptors, files and sockets, to compare them before and after a program."""

import contextlib
import os
from pathlib import Path
from typing import Any, NamedTuple

from asterism.sandbox.inside.container_init import SECRET_VARIABLE
from tests.processes import family, is_running, list_children
from tests.sandbox.conftest import Client

_FOLDERS = ("tmp", "var/tmp", "dev/shm", "run/lock", "scratch")
_NOBODY = 65534
_FIRST_CALL_UID = 2_000_000_000  # first uid of calls if root has no namespaces
_MARK = "hostile"  # name, up to its dot, of each file that a hostile program creates elsewhere
_MAX_GROWTH_MIB = 48  # allowed growth of a server's memory, for buffers of large calls


class Footprint(NamedTuple):
    servers: tuple[int, ...]  # pids of fork servers, grader and init processes of containers
    calls: int  # number of the servers' descendants that run calls
    descriptors_here: int
    descriptors_of_servers: tuple[int, ...]
    resident_mib: tuple[int, ...]  # resident memory of each server
    files: frozenset[str]
    own_folders: int  # folders of calls that cannot mount a folder
    sockets: frozenset[str]


def find_leftovers(before: Footprint, after: Footprint) -> dict[str, Any]:
    leftovers: dict[str, Any] = {}
    if after.servers != before.servers:
        leftovers["dead servers"] = set(before.servers) - set(after.servers)
    for name in ("calls", "descriptors_here", "descriptors_of_servers", "own_folders"):
        if getattr(after, name) > getattr(before, name):
            leftovers[name] = (getattr(before, name), getattr(after, name))
    growth_mib = [now - then for then, now in zip(before.resident_mib, after.resident_mib, strict=False)]
    if growth_mib and max(growth_mib) > _MAX_GROWTH_MIB:
        leftovers["resident_mib"] = growth_mib
    for name in ("files", "sockets"):
        if new := getattr(after, name) - getattr(before, name):
            leftovers[name] = new
    return leftovers


def take(client: Client) -> Footprint:
    started = [*client.sandbox.server_pids, *list_container_pids(client)]
    servers = sorted({pid for start in started for pid in _list_servers(start)})
    descendants = {pid for pid in family(*started) if is_running(pid)}
    return Footprint(
        servers=tuple(servers),
        calls=len(descendants - set(servers)),
        descriptors_here=_count("/proc/self/fd"),
        descriptors_of_servers=tuple(_count(f"/proc/{pid}/fd") for pid in servers),
        resident_mib=tuple(_measure_resident_mib(pid) for pid in servers),
        files=frozenset(path for root in ["", *(f"/proc/{pid}/root" for pid in servers)] for path in _list_files(root)),
        own_folders=sum(_count(str(folder)) for folder in list_private_folders()),
        sockets=frozenset(name for pid in ["self", *servers] for name in _list_sockets(pid)),
    )


def list_container_pids(client: Client) -> list[int]:
    """Return process 1 of each container, as a pid of this machine."""
    host: Any = client.sandbox._host  # pyright: ignore[reportPrivateUsage]
    return [container.pid for container in getattr(host, "live_containers", ())]


def read_container_secrets(client: Client) -> list[str]:
    found: list[str] = []
    for pid in list_container_pids(client):
        for variable in Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0"):
            name, _, value = variable.partition("=")
            if name == SECRET_VARIABLE:
                found.append(value)
    return found


def find_owners(client: Client, name: str) -> list[int]:
    """Return the pids of processes whose working folder contains a file of this name."""
    descendants = family(*client.sandbox.server_pids)
    return [pid for pid in descendants if is_running(pid) and Path(f"/proc/{pid}/cwd/{name}").exists()]


def _list_servers(started: int) -> list[int]:
    """Return the launched process and, with namespaces, its child in another namespace, which is the server."""
    own = _read_namespace(started)
    return [started, *(pid for pid in list_children(started) if _read_namespace(pid) != own)]


def _read_namespace(pid: int) -> str:
    """Return the pid namespace of a process; empty if the process has ended."""
    with contextlib.suppress(OSError):
        return str(Path(f"/proc/{pid}/ns/pid").readlink())
    return ""


def _count(folder: str) -> int:
    with contextlib.suppress(OSError):
        return sum(1 for _ in Path(folder).iterdir())
    return 0


def _measure_resident_mib(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 >> 20
    return 0


def list_private_folders() -> list[Path]:
    found: list[Path] = []
    for scratch in Path("/tmp").glob(f"asterism-{os.getuid()}-calls-*"):
        with contextlib.suppress(FileNotFoundError):  # another process can remove its folder in the meantime
            found += scratch.glob(f"*-{os.getpid()}-*")
    return found


def _list_files(root: str) -> list[str]:
    """Return the files in world-writable folders that belong to calls or have the name _MARK."""
    found: list[str] = []
    for folder in _FOLDERS:
        with contextlib.suppress(OSError), os.scandir(f"{root}/{folder}") as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    user = entry.stat(follow_symlinks=False).st_uid
                    if user == _NOBODY or user >= _FIRST_CALL_UID or entry.name.split(".")[0] == _MARK:
                        found.append(entry.path)
    return found


def _list_sockets(pid: int | str) -> list[str]:
    """Return the Unix sockets in a server's own network namespace, or with a shared one, sockets named _MARK."""
    with contextlib.suppress(OSError):
        own = Path(f"/proc/{pid}/ns/net").readlink() != Path("/proc/self/ns/net").readlink()
        lines = [line.split() for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]]
        return [line[7] for line in lines if len(line) > 7 and (own or _MARK in line[7])]
    return []
