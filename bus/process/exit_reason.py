"""The exit reason of a process: the error that ended it, for the launcher.

The process writes the reason to shared memory, where the launcher reads it: a full disk cannot
store the printed output, and torchrun prints its own lines after the lines of a rank.
"""

import contextlib
import os
import sys
from pathlib import Path
from typing import Literal

import msgspec

from asterism.configs.errors import EXIT_UNUSABLE
from asterism.configs.run_folder import RunFolder


class ExitReason(msgspec.Struct, frozen=True):
    """The reason for an exit: unusable input (a file, a setting, the disk), an unexpected exception, or an outage.

    A restart fails again on unusable input, and probably on the same exception. An outage (of the
    operating system, another rank, an engine) can pass.
    """

    text: str
    kind: Literal["unusable_input", "exception", "outage"] = "unusable_input"


def exit_reason_path(folder: RunFolder, process: str) -> Path:
    """Return the path of the exit reason, on a tmpfs. The launcher deletes the file before it starts the process."""
    return folder.shared_memory / f"{process}.exit"


def write_exit_reason(folder: RunFolder, process: str, reason: ExitReason) -> None:
    """Write the first reason of a process or its ranks; later reasons are consequences of the first and are ignored."""
    with contextlib.suppress(OSError), exit_reason_path(folder, process).open("xb") as file:
        file.write(msgspec.json.encode(reason))
    if reason.kind == "unusable_input":  # Python prints the text of other exceptions
        with contextlib.suppress(OSError):
            sys.stderr.write(f"{reason.text}\n")
            sys.stderr.flush()


def exit_now(folder: RunFolder, process: str, error: BaseException) -> None:
    """Write the exit reason and exit like a killed process; unlogged events are lost."""
    write_exit_reason(folder, process, ExitReason(str(error)))
    os._exit(EXIT_UNUSABLE)


def load_exit_reason(path: Path) -> ExitReason | None:
    """Return the content of the file at `exit_reason_path`; None if there is no complete file."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=ExitReason)
    except (FileNotFoundError, msgspec.DecodeError):
        return None


def read_exit_reason(output_path: Path, reason_path: Path, max_lines: int = 12) -> str:
    """Return the last `max_lines` of the process's output, or its exit reason if these lines lack the reason."""
    output = output_path.read_text(errors="replace").rstrip() if output_path.exists() else ""
    printed = "\n".join(output.splitlines()[-max_lines:])
    reason = load_exit_reason(reason_path)
    if reason is not None and reason.text not in printed:
        return reason.text
    return printed
