"""Clones the repository, sets it up, and runs every printed command in order, in new shells of an 80 x 24 terminal."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import tempfile
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.newcomer.printed_commands import (
    NEEDS,
    REPLACED,
    ROOT,
    adapt,
    find_need,
    list_demo_lines,
    list_printed_commands,
)

_DEMO = re.compile(r"    make demo.*?\n```\n(.*?)```", re.DOTALL)
PAGES = [  # tests/newcomer/test_guide.py runs the commands of guide.md
    ROOT / "README.md",
    *(page for page in sorted((ROOT / "docs").glob("*.md")) if page.name != "guide.md"),
]


def run_in_terminal(command: str, folder: Path, home: Path) -> tuple[int, str]:
    """Run the command in a new shell with a terminal. Return the exit code and the output."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    path = os.pathsep.join(part for part in os.environ["PATH"].split(os.pathsep) if not part.startswith(str(ROOT)))
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL"))}
    environment |= {"HOME": str(home), "PATH": path, "TERM": "xterm-256color"}
    shown = bytearray()
    with subprocess.Popen(
        ["bash", "-c", command],
        cwd=folder,
        env=environment,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    ) as shell:
        os.close(theirs)
        try:
            while part := os.read(ours, 65_536):
                shown += part
        except OSError:  # EIO: no process has the terminal open
            pass
        finally:
            os.close(ours)
    return shell.returncode, shown.decode(errors="replace")


def test_every_replaced_command_is_printed() -> None:
    printed = [command for page in PAGES for command in list_printed_commands(page)]
    assert set(REPLACED) <= set(printed)
    assert [start for start in NEEDS if not any(command.startswith(start) for command in printed)] == []
    as_printed = [command for command in printed if command not in REPLACED and find_need(command) is None]
    assert [command for command in as_printed if any(word.isupper() for word in command.split())] == []


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """Yield a folder with a short path: paths of sockets below `tmp_path` would be too long."""
    with tempfile.TemporaryDirectory(prefix="walk-") as folder:
        yield Path(folder)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.docker
@pytest.mark.timeout(7200)
def test_every_printed_command_succeeds(short_folder: Path) -> None:
    home, clone = short_folder / "home", short_folder / "asterism"
    home.mkdir()
    failed: list[str] = []
    commands = [f"git clone --quiet {ROOT} {clone}"]
    commands += [
        "make setup",
        *(adapt(each) for page in PAGES for each in list_printed_commands(page) if not find_need(each)),
    ]
    for number, command in enumerate(commands):
        activation = ". .venv/bin/activate && " if not command.startswith(("make", "git")) else ""
        status, shown = run_in_terminal(activation + command, clone if number else short_folder, home)
        if command == "make demo":
            printed = _DEMO.search(PAGES[0].read_text())
            assert printed
            assert set(list_demo_lines(printed[1])) <= set(list_demo_lines(shown))
        if status != 0:
            failed.append(f"{command}: exit code {status}\n{shown[-2000:]}")
    assert failed == [], "\n".join(failed)
