"""The `docker` command, for what is done by hand or once: building images. Calls at run time go to the engine itself."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from configs.errors import UnusableInput

_NO_COMMAND = (
    "there is no `docker` command here. On Debian: apt-get install docker.io (and docker-cli where that is a package)"
)
_NO_ENGINE = """no Docker engine answers: {reason}
Start one with `systemctl start docker`, or by hand, as root, with `dockerd &`; where another user's or machine's engine
is meant, name it in DOCKER_HOST. A user who is not root has to be in the group `docker`."""


def docker(*arguments: str, command: Sequence[str] = ("docker",)) -> str:
    """What `docker ARGUMENTS` prints. Raises UnusableInput with its error if it fails."""
    try:
        done = subprocess.run([*command, *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    except FileNotFoundError as error:
        raise UnusableInput(_NO_COMMAND) from error
    if done.returncode != 0:
        raise UnusableInput(f"docker {arguments[0]} failed:\n{done.stderr.strip() or done.stdout.strip()}")
    return done.stdout.strip()


def engine_architecture() -> str:
    """The engine's, such as amd64: it may run on another machine. Raises UnusableInput if none answers."""
    try:
        return docker("version", "--format", "{{.Server.Arch}}")
    except UnusableInput as error:
        if str(error) == _NO_COMMAND:
            raise
        raise UnusableInput(_NO_ENGINE.format(reason=str(error).splitlines()[-1])) from error


def image_exists(name: str) -> bool:
    return docker("image", "ls", "--quiet", name) != ""
