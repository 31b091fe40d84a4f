"""A command runs in a pseudo-terminal, in which a test types input and waits for output."""

import os
import pty
import re
import select
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.processes import process_state

PATIENCE_S = 120.0
CTRL_C, CTRL_D = "\x03", "\x04"
_STYLES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Terminal:
    def __init__(self, process: subprocess.Popen[bytes], descriptor: int) -> None:
        self.process, self._descriptor = process, descriptor
        self.output = ""  # complete output, without styles
        self._seen = 0  # length of the output up to the end of the last awaited text

    def type(self, text: str) -> None:
        os.write(self._descriptor, text.encode())

    def enter(self, text: str, awaited: str) -> str:
        """Type a text, and return the output up to the awaited text."""
        self.type(text)
        return self.wait_for(awaited)

    def wait_for(self, text: str) -> str:
        """Return the output after the last awaited text, up to the end of `text`."""
        deadline = time.monotonic() + PATIENCE_S
        while (found := self.output.find(text, self._seen)) < 0:
            assert time.monotonic() < deadline, f"no {text!r} in {self.output[self._seen :]!r}"
            assert self._read(), f"the command ended without {text!r}: {self.output!r}"
        begin, self._seen = self._seen, found + len(text)
        return self.output[begin : self._seen]

    def interrupt_input(self) -> None:
        """Press ^C at a prompt. CPython's `input` defers a ^C that arrives between its prompt and its `select`."""
        deadline = time.monotonic() + PATIENCE_S
        while process_state(self.process.pid) != "S":
            assert time.monotonic() < deadline, f"no wait for input after {self.output!r}"
            time.sleep(0.01)
        self.type(CTRL_C)

    def wait_for_end(self) -> int:
        """Wait until the command exits, and return its exit code."""
        while self._read():
            pass
        return self.process.wait(PATIENCE_S)

    def _read(self) -> bool:
        """Append new output to `output`; return False at the end of the output."""
        if not select.select([self._descriptor], [], [], PATIENCE_S)[0]:
            raise AssertionError(f"no output for {PATIENCE_S} s after {self.output!r}")
        try:
            content = os.read(self._descriptor, 65_536)
        except OSError:  # the command has closed the terminal
            return False
        self.output += _STYLES.sub("", content.decode(errors="replace").replace("\r\n", "\n"))
        return bool(content)


@contextmanager
def in_terminal(command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> Iterator[Terminal]:
    """Start the command in a new terminal session; kill the command at the end if it still runs."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        cwd=folder,
        env={**os.environ, "TERM": "dumb", **environment},
        start_new_session=True,
        preexec_fn=lambda: os.close(os.open(os.ttyname(0), os.O_RDWR)),  # make this the controlling terminal
    )
    os.close(theirs)
    try:
        yield Terminal(process, ours)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        os.close(ours)
