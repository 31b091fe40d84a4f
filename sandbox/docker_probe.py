"""Whether a Docker engine is here and may be used: asked for its version, as any client would."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec


class DockerTrial(NamedTuple):
    found: str  # the engine's version, or why there is none to use
    remedy: str  # empty where the engine can be used


class _Version(msgspec.Struct, rename="pascal"):
    version: str
    api_version: str


def engine_address(environ: Mapping[str, str]) -> str:
    return environ.get("DOCKER_HOST") or f"unix://{_default_socket(environ)}"


def try_docker(environ: Mapping[str, str]) -> DockerTrial:
    """Absent, forbidden, stopped and broken engines are told apart; each has another remedy."""
    address = engine_address(environ)
    where = urlsplit(address)
    if where.scheme not in ("unix", "tcp", "http") or environ.get("DOCKER_TLS_VERIFY"):
        return DockerTrial(f"{address} was not asked", "Set DOCKER_HOST to a unix:// or plain tcp:// address.")
    try:
        version = ask_version(where.path if where.scheme == "unix" else (where.hostname or "", where.port or 2375))
    except FileNotFoundError:
        remedy = (
            "Install Docker Engine (Debian: docker.io) and start it: `sudo systemctl start docker`, or `sudo dockerd`."
        )
        return DockerTrial(f"no engine at {address}", remedy)
    except PermissionError:
        return DockerTrial(f"no right to use {address}", "Run `sudo usermod -aG docker $USER` and log in again.")
    except ConnectionRefusedError:
        remedy = "Start the engine: `sudo systemctl start docker`, or `sudo dockerd`."
        return DockerTrial(f"nobody listens at {address}", remedy)
    except (OSError, msgspec.MsgspecError) as error:
        return DockerTrial(f"{address} gave no usable answer: {error}", "Restart the engine and read its log.")
    return DockerTrial(f"{version} at {address}", "")


def ask_version(address: str | tuple[str, int]) -> str:
    """Raises OSError, and msgspec.MsgspecError where something else than a Docker engine answers."""
    with socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET) as connection:
        connection.settimeout(2.0)
        connection.connect(address)
        connection.sendall(b"GET /version HTTP/1.0\r\nHost: docker\r\n\r\n")
        with connection.makefile("rb") as stream:
            answer = stream.read(1_000_000)
    version = msgspec.json.decode(answer.partition(b"\r\n\r\n")[2], type=_Version)
    return f"{version.version}, API {version.api_version}"


def _default_socket(environ: Mapping[str, str]) -> str:
    rootless = Path(environ.get("XDG_RUNTIME_DIR", "/nonexistent"), "docker.sock")
    return str(rootless) if rootless.exists() else "/var/run/docker.sock"
