"""What a sandbox leaves on the machine, to be compared before and after: processes, descriptors, files, sockets."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any, NamedTuple

from sandbox.inside.keeper import SECRET
from tests.processes import family, is_running
from tests.sandbox.conftest import Client

_FOLDERS = ("tmp", "var/tmp", "dev/shm", "run/lock", "scratch")
_NOBODY = 65534
_OWN_USERS = 2_000_000_000  # the first that calls get where root has no namespaces
_MARK = "hostile"  # the name, up to a dot, of whatever a hostile program makes outside its folder
_GROWTH_MIB = 48  # that a server's memory may grow without being a leak: buffers of calls that were large


class Footprint(NamedTuple):
    servers: tuple[int, ...]  # fork servers, grader, keepers: the same processes as before
    calls: int  # processes that descend from them: waiting for a call, or notebooks
    descriptors_here: int
    descriptors_of_servers: tuple[int, ...]
    resident_mib: tuple[int, ...]  # of the servers
    files: frozenset[str]
    own_folders: int  # of calls that cannot mount one
    sockets: frozenset[str]


def left_over(before: Footprint, after: Footprint) -> dict[str, Any]:
    """What there is after that was not there before; empty: nothing."""
    left: dict[str, Any] = {}
    if after.servers != before.servers:
        left["servers that died"] = set(before.servers) - set(after.servers)
    for name in ("calls", "descriptors_here", "descriptors_of_servers", "own_folders"):
        if getattr(after, name) > getattr(before, name):
            left[name] = (getattr(before, name), getattr(after, name))
    grown = [now - then for then, now in zip(before.resident_mib, after.resident_mib, strict=False)]
    if grown and max(grown) > _GROWTH_MIB:
        left["resident_mib"] = grown
    for name in ("files", "sockets"):
        if new := getattr(after, name) - getattr(before, name):
            left[name] = new
    return left


def take(client: Client) -> Footprint:
    started = [*client.sandbox.server_pids, *container_pids(client)]
    servers = sorted({pid for start in started for pid in _serving(start)})
    descendants = {pid for pid in family(*started) if is_running(pid)}
    return Footprint(
        servers=tuple(servers),
        calls=len(descendants - set(servers)),
        descriptors_here=_count("/proc/self/fd"),
        descriptors_of_servers=tuple(_count(f"/proc/{pid}/fd") for pid in servers),
        resident_mib=tuple(_resident_mib(pid) for pid in servers),
        files=frozenset(path for root in ["", *(f"/proc/{pid}/root" for pid in servers)] for path in _files(root)),
        own_folders=sum(_count(str(folder)) for folder in _private_folders()),
        sockets=frozenset(name for pid in ["self", *servers] for name in _sockets(pid)),
    )


def container_pids(client: Client) -> list[int]:
    """Of the keepers of the sandbox's containers, as this machine numbers them."""
    host: Any = client.sandbox._host  # pyright: ignore[reportPrivateUsage]
    return [container.pid for container in getattr(host, "containers", ())]


def container_secrets(client: Client) -> list[str]:
    """By which the processes in the containers prove to the executor who they are."""
    found: list[str] = []
    for pid in container_pids(client):
        for variable in Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0"):
            name, _, value = variable.partition("=")
            if name == SECRET:
                found.append(value)
    return found


def owners_of(client: Client, name: str) -> list[int]:
    """The processes that have a file of this name in their folder."""
    descendants = family(*client.sandbox.server_pids)
    return [pid for pid in descendants if is_running(pid) and Path(f"/proc/{pid}/cwd/{name}").exists()]


def _serving(started: int) -> list[int]:
    """The process and, in namespaces, its only child, which serves."""
    children = [pid for pid in family(started)[1:] if _parent(pid) == started]
    return [started, *children] if len(children) == 1 else [started]


def _parent(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0


def _count(folder: str) -> int:
    with contextlib.suppress(OSError):
        return sum(1 for _ in Path(folder).iterdir())
    return 0


def _resident_mib(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 >> 20
    return 0


def _private_folders() -> list[Path]:
    return list(Path("/tmp").glob(f"asterism-sandbox-{os.getpid()}-*"))


def _files(root: str) -> list[str]:
    """In the folders that everybody may write to: what calls own, and what has the mark of a hostile program."""
    found: list[str] = []
    for folder in _FOLDERS:
        with contextlib.suppress(OSError), os.scandir(f"{root}/{folder}") as entries:
            for entry in entries:
                with contextlib.suppress(OSError):
                    user = entry.stat(follow_symlinks=False).st_uid
                    if user == _NOBODY or user >= _OWN_USERS or entry.name.split(".")[0] == _MARK:
                        found.append(entry.path)
    return found


def _sockets(pid: int | str) -> list[str]:
    """Names of Unix sockets: all in a server's own network, here those that a hostile program made."""
    with contextlib.suppress(OSError):
        own = Path(f"/proc/{pid}/ns/net").readlink() != Path("/proc/self/ns/net").readlink()
        lines = [line.split() for line in Path(f"/proc/{pid}/net/unix").read_text().splitlines()[1:]]
        return [line[7] for line in lines if len(line) > 7 and (own or _MARK in line[7])]
    return []
