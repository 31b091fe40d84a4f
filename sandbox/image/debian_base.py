"""Makes a base image without a container registry: Debian packages, with debootstrap and `docker import`."""

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from tarfile import TarInfo

from asterism.configs.errors import UnusableInput
from asterism.sandbox.image.docker_cli import run_docker
from asterism.sandbox.image.image_context import write_tar

BASE_REPOSITORY = "asterism-sandbox-base"
_SUITE = "bookworm"
_REQUIRED_COMMANDS = {"debootstrap": "debootstrap", "chroot": "coreutils"}  # Debian package by command
# Files that no code needs or that differ between two runs of debootstrap: caches, logs, compiled modules (the
# Dockerfile makes them), the host's name and servers, and passwords with the date of their last change.
_EXCLUDED = re.compile(
    r"(dev|proc|run|sys|tmp)/.*"
    r"|usr/share/(man|info|locale|lintian|bug)/.*"
    r"|usr/share/doc/(?!.*/copyright$).*/.*"
    r"|var/(cache|log|tmp|lib/apt|lib/systemd)/.*"
    r"|var/lib/dpkg/.*-old|etc/[^/]+-|etc/g?shadow|etc/machine-id|etc/hostname|etc/resolv\.conf|etc/apt/.*"
    r"|.*/__pycache__(/.*)?"
)


def compute_base_name() -> str:
    """Return name and tag. The tag contains a digest of this file: each change of the file gives a new name."""
    digest = hashlib.blake2b(Path(__file__).read_bytes(), digest_size=6).hexdigest()
    return f"{BASE_REPOSITORY}:{_SUITE}-{digest}"


def import_base(architecture: str, mirror: str | None) -> None:
    """Make the image `compute_base_name()` from the mirror (None: debootstrap's default). Raises UnusableInput."""
    _check_prerequisites()
    with tempfile.TemporaryDirectory(prefix="asterism-debootstrap-") as parent:
        root = Path(parent) / "root"
        _run_debootstrap(root, architecture, mirror)
        import_folder(root, compute_base_name())


def import_folder(root: Path, name: str) -> None:
    """Import a folder as an image. The same files give the same layer, independent of their times."""
    with tempfile.TemporaryFile() as tar:
        write_tar(root, tar, strip_entry)
        tar.seek(0)
        run_docker("import", "-", name, stdin=tar)


def strip_entry(entry: TarInfo) -> TarInfo | None:
    entry.mode &= 0o1777  # no setuid, no setgid
    return None if _EXCLUDED.fullmatch(entry.name) else entry


def _check_prerequisites() -> None:
    for command, package in _REQUIRED_COMMANDS.items():
        if shutil.which(command) is None:
            raise UnusableInput(f"the command `{command}` is not installed. On Debian: apt-get install {package}")
    if os.geteuid() != 0:
        raise UnusableInput("debootstrap needs root to unpack files of other users: sudo make sandbox-image-local")


def _run_debootstrap(root: Path, architecture: str, mirror: str | None) -> None:
    options = ["--variant=minbase", "--include=python3", f"--arch={architecture}"]
    command = ["debootstrap", *options, _SUITE, str(root), *([mirror] if mirror else [])]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode != 0:
        last = "\n".join(done.stdout.splitlines()[-10:])
        raise UnusableInput(f"debootstrap failed with status {done.returncode}:\n{last}")
