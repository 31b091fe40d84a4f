"""A base image without a container registry: Debian's own packages, by debootstrap and `docker import`."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from tarfile import TarInfo

from configs.errors import UnusableInput
from sandbox.docker_command import docker
from sandbox.image_tar import write_tar

REPOSITORY = "asterism-sandbox-base"
_SUITE = "bookworm"
_COMMANDS = {"debootstrap": "debootstrap", "chroot": "coreutils"}  # and the packages in which they are
# What no code needs, or what would differ between two runs: caches, logs, compiled modules (the Dockerfile makes
# them), the host's own name and servers, accounts' passwords with the date of their last change.
_DROPPED = re.compile(
    r"(dev|proc|run|sys|tmp)/.*"
    r"|usr/share/(man|info|locale|lintian|bug)/.*"
    r"|usr/share/doc/(?!.*/copyright$).*/.*"
    r"|var/(cache|log|tmp|lib/apt|lib/systemd)/.*"
    r"|var/lib/dpkg/.*-old|etc/[^/]+-|etc/g?shadow|etc/machine-id|etc/hostname|etc/resolv\.conf|etc/apt/.*"
    r"|.*/__pycache__(/.*)?"
)


def base_name() -> str:
    """Name and tag. The tag tells how the base is made, so that a change of this file makes another one."""
    made_by = hashlib.blake2b(Path(__file__).read_bytes(), digest_size=6).hexdigest()
    return f"{REPOSITORY}:{_SUITE}-{made_by}"


def import_base(architecture: str, mirror: str | None) -> None:
    """Makes `base_name()` from what the mirror has today (none: debootstrap's own). Raises UnusableInput if it cannot."""
    _refuse_what_cannot_work()
    with tempfile.TemporaryDirectory(prefix="asterism-debootstrap-") as parent:
        root = Path(parent) / "root"
        _debootstrap(root, architecture, mirror)
        import_folder(root, base_name())


def import_folder(root: Path, name: str) -> None:
    """The same files give the same layer, whenever they were unpacked."""
    with tempfile.TemporaryFile() as tar:
        write_tar(root, tar, stripped)
        tar.seek(0)
        docker("import", "-", name, stdin=tar)


def stripped(entry: TarInfo) -> TarInfo | None:
    entry.mode &= 0o1777  # no setuid, no setgid
    return None if _DROPPED.fullmatch(entry.name) else entry


def _refuse_what_cannot_work() -> None:
    for command, package in _COMMANDS.items():
        if shutil.which(command) is None:
            raise UnusableInput(f"there is no `{command}` command here. On Debian: apt-get install {package}")
    if os.geteuid() != 0:
        raise UnusableInput("debootstrap needs root, to unpack files of other users: sudo make sandbox-image-local")


def _debootstrap(root: Path, architecture: str, mirror: str | None) -> None:
    options = ["--variant=minbase", "--include=python3", f"--arch={architecture}"]
    command = ["debootstrap", *options, _SUITE, str(root), *([mirror] if mirror else [])]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode != 0:
        last = "\n".join(done.stdout.splitlines()[-10:])
        raise UnusableInput(f"debootstrap failed with status {done.returncode}:\n{last}")
