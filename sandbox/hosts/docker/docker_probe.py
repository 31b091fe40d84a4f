"""Checks whether a Docker engine is available, by a request for its version."""

import socket
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec


class DockerProbeResult(NamedTuple):
    description: str  # the engine's version, or the reason that no engine can be used
    remedy: str  # empty if the engine can be used


class _VersionAnswer(msgspec.Struct, rename="pascal"):
    version: str
    api_version: str


def get_engine_address(environ: Mapping[str, str]) -> str:
    return environ.get("DOCKER_HOST") or f"unix://{_get_default_socket(environ)}"


def probe_docker(environ: Mapping[str, str]) -> DockerProbeResult:
    """Distinguish absent, forbidden, stopped and broken engines, with a remedy for each."""
    address = get_engine_address(environ)
    url = urlsplit(address)
    if url.scheme not in ("unix", "tcp", "http") or environ.get("DOCKER_TLS_VERIFY"):
        remedy = "Set DOCKER_HOST to a unix:// or plain tcp:// address."
        return DockerProbeResult(f"{address} is not supported", remedy)
    try:
        version = query_version(url.path if url.scheme == "unix" else (url.hostname or "", url.port or 2375))
    except FileNotFoundError:
        remedy = (
            "Install Docker Engine (Debian: docker.io) and start it: `sudo systemctl start docker`, or `sudo dockerd`."
        )
        return DockerProbeResult(f"no engine at {address}", remedy)
    except PermissionError:
        return DockerProbeResult(
            f"no permission for {address}", "Run `sudo usermod -aG docker $USER` and log in again."
        )
    except ConnectionRefusedError:
        remedy = "Start the engine: `sudo systemctl start docker`, or `sudo dockerd`."
        return DockerProbeResult(f"no process listens at {address}", remedy)
    except (OSError, msgspec.MsgspecError) as error:
        return DockerProbeResult(f"{address} gave no usable answer: {error}", "Restart the engine and read its log.")
    return DockerProbeResult(f"{version} at {address}", "")


def query_version(address: str | tuple[str, int]) -> str:
    """Return the engine's version. Raises OSError, and msgspec.MsgspecError for an unexpected answer."""
    with socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET) as connection:
        connection.settimeout(2.0)
        connection.connect(address)
        connection.sendall(b"GET /version HTTP/1.0\r\nHost: docker\r\n\r\n")
        with connection.makefile("rb") as stream:
            answer = stream.read(1_000_000)
    version = msgspec.json.decode(answer.partition(b"\r\n\r\n")[2], type=_VersionAnswer)
    return f"{version.version}, API {version.api_version}"


def _get_default_socket(environ: Mapping[str, str]) -> str:
    rootless = Path(environ.get("XDG_RUNTIME_DIR", "/nonexistent"), "docker.sock")
    return str(rootless) if rootless.exists() else "/var/run/docker.sock"
