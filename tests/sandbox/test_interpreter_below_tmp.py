"""If the interpreter is below /tmp, calls have a writable /tmp with the interpreter and no other foreign files."""

import errno
import os
import secrets
import shutil
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest

from asterism.bus.messages import CodeOk, CodeRaised, Output
from asterism.sandbox.hosts import local_host
from asterism.sandbox.inside.wire.command import list_standard_folders
from tests.sandbox.conftest import open_sandbox

pytestmark = [pytest.mark.slow, pytest.mark.real_clock]
_NOT_COPIED = ("test", "tests", "site-packages", "dist-packages", "config-*", "idlelib", "ensurepip", "__pycache__")
_IMPORT = "import decimal, json, os, below_tmp\n"  # below_tmp is a module of the packages


class BelowTmp(NamedTuple):
    """Folders in PARENT, a folder of /tmp."""

    prefix: Path  # PARENT/python: a copy of the interpreter and its standard library
    packages: Path  # PARENT/python/packages
    visible: Path  # `prefix` or `packages`; calls can read only files below it
    shown: list[str]  # content of a call's /tmp at its start

    @property
    def parent(self) -> Path:
        return self.prefix.parent


@pytest.fixture(scope="module")
def copied_prefix() -> Iterator[Path]:
    parent = Path(tempfile.mkdtemp(prefix="asterism-test-python-", dir="/tmp"))
    try:
        parent.chmod(0o755)
        prefix = parent / "python"
        (prefix / "bin").mkdir(parents=True)
        shutil.copy2(os.path.realpath(sys.executable), prefix / "bin")
        library = Path(sysconfig.get_path("stdlib"))
        shutil.copytree(library, _move(library, prefix), ignore=shutil.ignore_patterns(*_NOT_COPIED), symlinks=True)
        packages = prefix / "packages"
        packages.mkdir()
        packages.chmod(0o777)  # only the mounts now protect the folder
        (packages / "below_tmp.py").write_text("value = 5\n")
        (packages / "below_tmp.py").chmod(0o666)
        yield prefix
    finally:
        shutil.rmtree(parent)


def _move(path: Path, prefix: Path) -> Path:
    return prefix / path.relative_to(sys.base_prefix)


@pytest.fixture(params=["interpreter", "packages"])
def below_tmp(request: pytest.FixtureRequest, copied_prefix: Path, monkeypatch: pytest.MonkeyPatch) -> BelowTmp:
    """Let fork servers use the interpreter below /tmp, or only packages, as a virtual environment does."""
    folders = list_standard_folders()
    packages = copied_prefix / "packages"
    visible, base = packages, sys.base_prefix
    if request.param == "interpreter":
        visible, base = copied_prefix, str(copied_prefix)
        executable = copied_prefix / "bin" / Path(os.path.realpath(sys.executable)).name
        monkeypatch.setattr(local_host, "_PYTHON", str(executable))
        folders = tuple(str(_move(Path(folder), copied_prefix)) for folder in folders)
    folders = (*folders, str(packages))
    monkeypatch.setattr(local_host, "list_import_folders", lambda: folders)
    shown = {Path(each).parts[2] for each in (*folders, base) if each.startswith("/tmp/")}
    return BelowTmp(copied_prefix, packages, visible, sorted(shown))


_start = partial(open_sandbox, "process", namespaces="required", file_mib=4, fork_servers=1, spare_notebooks=1)


async def test_programs_and_cells_write_to_a_tmp_with_only_the_interpreter(below_tmp: BelowTmp) -> None:
    name = f"asterism-test-{secrets.token_hex(8)}"
    hidden = below_tmp.parent / "hidden"
    hidden.write_text("secret")
    code = (
        f"{_IMPORT}path = '/tmp/{name}'\nprint(open(path, 'x').write('mine'), open(path).read(), below_tmp.__file__)\n"
        f"print(sorted(os.listdir('/tmp')), os.listdir(), os.listdir({str(below_tmp.parent)!r}))"
    )
    module = below_tmp.packages / "below_tmp.py"
    expected = f"4 mine {module}\n{sorted([name, *below_tmp.shown])} [] ['python']\n"
    async with _start() as client:
        assert (await client.program(code)).outcome == CodeOk(Output(expected))
        for trajectory in (1, 2):  # each trajectory has its own /tmp
            assert await client.printed(code, trajectory) == expected
        later = f"import fractions, sqlite3\nopen(path).read(), os.path.exists({str(hidden)!r})"
        assert await client.printed(later, 1) == "('mine', False)\n"
    assert name not in os.listdir("/tmp")  # noqa: PTH208


_HARM = """
import shutil
def attempt(action, *arguments):
    try: return action(*arguments)
    except OSError as error: return error.strerror
module = below_tmp.__file__
print(attempt(open, VISIBLE + '/new', 'w'), attempt(open, module, 'r+'), attempt(os.remove, module))
print(attempt(os.chmod, module, 0o666), attempt(os.rename, VISIBLE, '/tmp/x'), attempt(os.rmdir, VISIBLE))
shutil.rmtree('/tmp', ignore_errors=True)
print(attempt(os.mkdir, '/usr/new'), attempt(os.mkdir, '/scratch/new'), sorted(os.listdir('/scratch')))
print(open(module).read())
"""
_READ_ONLY, _BUSY = os.strerror(errno.EROFS), os.strerror(errno.EBUSY)


async def test_programs_cannot_change_the_interpreter_below_tmp(below_tmp: BelowTmp) -> None:
    before = sorted(below_tmp.parent.rglob("*"))
    async with _start() as client:
        code = _IMPORT + _HARM.replace("VISIBLE", repr(str(below_tmp.visible)))
        outcome = (await client.program(code)).outcome
        assert isinstance(outcome, CodeOk), outcome
        assert outcome.output.stdout == (
            f"{_READ_ONLY} {_READ_ONLY} {_READ_ONLY}\n{_READ_ONLY} {_BUSY} {_BUSY}\n"
            f"{_READ_ONLY} {_READ_ONLY} ['own', 'own-tmp']\nvalue = 5\n\n"
        )
        assert (await client.program(f"{_IMPORT}print(below_tmp.value)")).outcome == CodeOk(Output("5\n"))
    assert sorted(below_tmp.parent.rglob("*")) == before


async def test_tmp_and_the_working_folder_share_one_limit(below_tmp: BelowTmp) -> None:
    write = "def write(path):\n    with open(path, 'wb') as file: file.write(bytes(5 << 19))\n"  # writes 2.5 MiB
    async with _start() as client:
        assert (await client.program(f"{write}write({str(below_tmp.parent)!r} + '/a')")).outcome == CodeOk(Output())
        outcome = (await client.program(f"{write}write('/tmp/a')\nwrite('b')")).outcome
        assert isinstance(outcome, CodeRaised)
        assert "No space left on device" in outcome.error


async def test_tmp_itself_is_never_shown_to_calls(below_tmp: BelowTmp, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = local_host.list_import_folders()
    monkeypatch.setattr(local_host, "list_import_folders", lambda: (*folders, "/tmp"))
    async with _start() as client:
        shown = f"{_IMPORT}sorted(os.listdir('/tmp')), os.listdir({str(below_tmp.parent)!r})"
        assert await client.printed(shown) == f"({below_tmp.shown}, ['python'])\n"
