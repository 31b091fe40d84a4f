"""Runs the `docker` command to build images. At run time the sandbox calls the engine's API."""

import os
import subprocess
from typing import IO

from asterism.configs.errors import UnusableInput
from asterism.sandbox.hosts.docker.docker_probe import get_engine_address, probe_docker

_NO_COMMAND = (
    "the command `docker` is not installed. On Debian: apt-get install docker.io (and docker-cli if it is a package)"
)


def run_docker(*arguments: str, stdin: IO[bytes] | None = None) -> str:
    """Return the output of `docker ARGUMENTS`. Raises UnusableInput with the error of the command."""
    environment = os.environ | {"DOCKER_HOST": get_engine_address(os.environ)}
    try:
        done = subprocess.run(
            ["docker", *arguments],
            stdin=stdin or subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=environment,
        )
    except FileNotFoundError as error:
        raise UnusableInput(_NO_COMMAND) from error
    if done.returncode != 0:
        raise UnusableInput(f"docker {arguments[0]} failed:\n{done.stderr.strip() or done.stdout.strip()}")
    return done.stdout.strip()


def get_engine_architecture() -> str:
    """Return the engine's architecture, such as amd64. Raises UnusableInput if no engine can be used."""
    probe = probe_docker(os.environ)
    if probe.remedy:
        raise UnusableInput(f"no Docker engine can be used: {probe.description}. {probe.remedy}")
    return run_docker("version", "--format", "{{.Server.Arch}}")


def image_exists(name: str) -> bool:
    return run_docker("image", "ls", "--quiet", name) != ""


def remove_other_tags(repository: str, current: str) -> list[str]:
    """Remove all tags of the repository except `current` and those that containers use; return the removed tags."""
    removed: list[str] = []
    for name in run_docker("image", "ls", "--format", "{{.Repository}}:{{.Tag}}", repository).split():
        if name != current and not name.endswith(":<none>"):
            try:
                run_docker("image", "rm", name)
            except UnusableInput:
                continue
            removed.append(name)
    return removed
