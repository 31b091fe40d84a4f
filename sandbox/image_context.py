"""What goes into the sandbox image from our side: the folder that `docker build` is given.

The packages come in here, on the host, so that nothing is fetched while the image is built.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from tarfile import TarInfo

from configs.errors import UnusableInput
from sandbox.image_tar import write_tar

_PLACE = "opt/asterism"  # in the image
# Which wheels fit: the architecture by the engine's name for it; each manylinux up to glibc 2.28.
_MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
_MANYLINUX = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_17", "manylinux2014")
_PYTHON = "3.11"
# What nobody imports: commands, tests, headers, static libraries, type stubs, pip's own list of files.
_DROPPED = ("bin", "share", "**/tests", "**/include", "**/*.a", "**/*.pyi", "**/*.pxd", "**/*.dist-info/RECORD")


def write_context(folder: Path, files: dict[str, bytes], architecture: str) -> None:
    """Fills the empty `folder`: the Dockerfile and the two tar files that it adds. The same `files` give the same.

    Tar files, because what Docker copies otherwise lies in folders with the time of the build.
    """
    (folder / "Dockerfile").write_bytes(files["Dockerfile"])
    with tempfile.TemporaryDirectory(prefix="asterism-image-") as parent:
        packages, own = Path(parent, "packages"), Path(parent, "own")
        first = {name: files[name] for name in ("requirements.txt", "image_finish.py")}
        _write_files(packages / _PLACE, first)
        install_packages(packages / _PLACE / "requirements.txt", packages / _PLACE / "packages", architecture)
        _write_files(own / _PLACE / "sandbox", {name: files[name] for name in files if _runs_inside(name)})
        for tree in (packages, own):
            with (folder / f"{tree.name}.tar").open("wb") as stream:
                write_tar(tree, stream, _owned_by_root)


def _runs_inside(name: str) -> bool:
    return name == "__init__.py" or name.startswith("inside/")


def _write_files(root: Path, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


def _owned_by_root(entry: TarInfo) -> TarInfo:
    entry.uid = entry.gid = 0
    entry.mode = 0o755 if entry.isdir() else 0o644
    return entry


def install_packages(requirements: Path, folder: Path, architecture: str) -> None:
    """For the image's Python, whatever this one is. Raises UnusableInput with pip's error."""
    if architecture not in _MACHINES:
        raise UnusableInput(f"the engine runs on {architecture}; the sandbox image is made for {', '.join(_MACHINES)}")
    platforms = [f"--platform={tag}_{_MACHINES[architecture]}" for tag in _MANYLINUX]
    interpreter = ["--implementation=cp", f"--python-version={_PYTHON}", "--only-binary=:all:"]
    wanted = ["--no-deps", "--no-compile", "--requirement", str(requirements)]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(folder)]
    done = subprocess.run([*command, *interpreter, *platforms, *wanted], capture_output=True, text=True)
    if done.returncode != 0:
        raise UnusableInput(f"pip cannot install the sandbox's packages:\n{done.stderr.strip()}")
    for pattern in _DROPPED:
        for path in list(folder.glob(pattern)):
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
