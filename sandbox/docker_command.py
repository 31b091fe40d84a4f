"""The `docker` command, for what is done once or by hand: building images. Calls at run time go to the engine itself."""

from __future__ import annotations

import os
import subprocess
from typing import IO

from configs.errors import UnusableInput
from sandbox.docker_probe import engine_address, try_docker

_NO_COMMAND = (
    "there is no `docker` command here. On Debian: apt-get install docker.io (and docker-cli where that is a package)"
)


def docker(*arguments: str, stdin: IO[bytes] | None = None) -> str:
    """What `docker ARGUMENTS` prints, on the engine that the sandbox uses. Raises UnusableInput with its error."""
    environment = os.environ | {"DOCKER_HOST": engine_address(os.environ)}
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


def engine_architecture() -> str:
    """The engine's, such as amd64: it may run on another machine. Raises UnusableInput if none can be used."""
    trial = try_docker(os.environ)
    if trial.remedy:
        raise UnusableInput(f"no Docker engine can be used: {trial.found}. {trial.remedy}")
    return docker("version", "--format", "{{.Server.Arch}}")


def image_exists(name: str) -> bool:
    return docker("image", "ls", "--quiet", name) != ""


def remove_other_tags(repository: str, current: str) -> list[str]:
    """The names that were removed. Those of images that containers use stay."""
    removed: list[str] = []
    for name in docker("image", "ls", "--format", "{{.Repository}}:{{.Tag}}", repository).split():
        if name != current and not name.endswith(":<none>"):
            try:
                docker("image", "rm", name)
            except UnusableInput:
                continue
            removed.append(name)
    return removed
