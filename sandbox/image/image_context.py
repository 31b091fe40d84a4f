"""Writes the build context of the sandbox image: the Dockerfile, and tar files with the packages and the code.

pip installs the packages here, on the host, so that the build of the image needs no network.
"""

import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from tarfile import TarInfo
from typing import IO

from asterism.configs.errors import UnusableInput
from asterism.sandbox.image.finish_image import MODIFIED_AT

_INSTALL_FOLDER = "opt/asterism"  # path in the image
# Compatible wheels: pip's name of an architecture by the engine's name, and manylinux tags up to glibc 2.28.
_WHEEL_ARCHITECTURES = {"amd64": "x86_64", "arm64": "aarch64"}
_MANYLINUX = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014")
_PYTHON = "3.11"
# Files that no code imports: commands, tests, headers, static libraries, type stubs, and pip's list of files.
_EXCLUDED = ("bin", "share", "**/tests", "**/include", "**/*.a", "**/*.pyi", "**/*.pxd", "**/*.dist-info/RECORD")


def write_context(folder: Path, files: dict[str, bytes], architecture: str) -> None:
    """Write the Dockerfile and two tar files to `folder`. Tar files keep the times of their files, unlike COPY."""
    (folder / "Dockerfile").write_bytes(files["image/Dockerfile"])
    with tempfile.TemporaryDirectory(prefix="asterism-image-") as parent:
        packages, own = Path(parent, "packages"), Path(parent, "own")
        first = {name: files[f"image/{name}"] for name in ("requirements.txt", "finish_image.py")}
        _write_files(packages / _INSTALL_FOLDER, first)
        install_packages(
            packages / _INSTALL_FOLDER / "requirements.txt", packages / _INSTALL_FOLDER / "packages", architecture
        )
        _write_files(
            own / _INSTALL_FOLDER / "asterism/sandbox", {name: files[name] for name in files if _runs_inside(name)}
        )
        for tree in (packages, own):
            with (folder / f"{tree.name}.tar").open("wb") as stream:
                write_tar(tree, stream, _set_root_owner)


def _runs_inside(name: str) -> bool:
    return name == "__init__.py" or name.startswith("inside/")


def _write_files(root: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def _set_root_owner(entry: TarInfo) -> TarInfo:
    entry.uid = entry.gid = 0
    entry.mode = 0o755 if entry.isdir() else 0o644
    return entry


def install_packages(requirements: Path, folder: Path, architecture: str) -> None:
    """Install wheels with known hashes for the Python of the image. Raises UnusableInput with pip's error."""
    if architecture not in _WHEEL_ARCHITECTURES:
        raise UnusableInput(
            f"the engine runs on {architecture}; the sandbox image supports {', '.join(_WHEEL_ARCHITECTURES)}"
        )
    platforms = [f"--platform={tag}_{_WHEEL_ARCHITECTURES[architecture]}" for tag in _MANYLINUX]
    interpreter = ["--implementation=cp", f"--python-version={_PYTHON}", "--only-binary=:all:"]
    packages = ["--require-hashes", "--no-deps", "--no-compile", "--requirement", str(requirements)]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder)]
    done = subprocess.run([*command, *interpreter, *platforms, *packages], capture_output=True, text=True)
    if done.returncode != 0:
        raise UnusableInput(f"pip cannot install the sandbox's packages:\n{done.stderr.strip()}")
    for pattern in _EXCLUDED:
        for path in list(folder.glob(pattern)):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)


def write_tar(root: Path, stream: IO[bytes], adapt: Callable[[TarInfo], TarInfo | None]) -> None:
    """Write a tar file without times and user names: equal files give equal bytes. `adapt` can drop an entry."""

    def strip_metadata(entry: TarInfo) -> TarInfo | None:
        entry.mtime = MODIFIED_AT
        entry.uname = entry.gname = ""
        return adapt(entry)

    with tarfile.open(fileobj=stream, mode="w|", format=tarfile.GNU_FORMAT, bufsize=1 << 20) as tar:
        for path in sorted(root.iterdir()):
            tar.add(path, arcname=path.name, filter=strip_metadata)
