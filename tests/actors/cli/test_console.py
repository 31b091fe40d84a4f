"""Displayed text has no control sequences; a command without a reader ends without a traceback."""

import asyncio
import contextlib
import io
import os
import re
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from asterism.actors.cli import main
from asterism.actors.cli.console import escape_controls, make_console
from asterism.actors.cli.log import diff_command
from asterism.actors.cli.log.diff_command import compare_runs
from asterism.actors.cli.log.replay_command import format_state, show_difference
from asterism.actors.cli.log.show_command import format_lines, format_story
from asterism.actors.cli.sandbox_commands import run_shell
from asterism.actors.launch.display import make_display
from asterism.actors.replay.replay import replay_process, replay_until
from asterism.analysis.event_logs.merged_events import merge_events
from asterism.bus.messages import CodeOk, CodeRequested, Output
from asterism.configs.errors import EXIT_UNUSABLE, UnusableInput
from asterism.configs.run_folder import RunFolder
from asterism.sandbox.contract import CodeResult, SandboxFailure
from tests.actors.runs.running import ASTERISM, ROOT
from tests.fakes import CALL, start_group, text_context
from tests.recorded import Recording, deciders

SEQUENCES = {
    "colour": "\x1b[31mred",
    "clear screen": "\x1b[2J\x1b[H",
    "title": "\x1b]0;title\x07",
    "clipboard": "\x1b]52;c;cm0gLXJm\x07",
    "hyperlink": "\x1b]8;;http://x\x1b\\text",
    "C1 CSI": "\x9b31m",
    "C1 OSC": "\x9d52;c;cm0=\x9c",
    "device control": "\x1bPq\x1b\\",
    "overwritten line": "wrong\rright",
    "backspaces": "wrong\b\b\b\b\bright",
    "vertical tab and form feed": "a\vb\fc",
    "delete": "a\x7fb",
    "NUL": "a\0b",
    "bidirectional override": "\u202eevil\u202c",
    "bidirectional isolate": "\u2066evil\u2069",
    "marks": "\u200e\u200f\u061c",
    "line separators": "a\u2028b\u2029c\x85d",
    "zero width": "a\u200bb\u200cc\u200dd\u2060e\ufefff\xadg",
    "tags": "a\U000e0001\U000e0048\U000e0069\U000e007fb",
    "invisible operators": "f\u2061x\u2062y\u2063z\u2064",
    "annotations": "\ufff9a\ufffab\ufffb",
    "deprecated format": "\u206aa\u206f\U0001d173\U0001bca0\u180e",
}
HOSTILE = "".join(SEQUENCES.values())
CONTEXT = text_context()
Show = Callable[[RunFolder, Console], None]


def record_hostile_run(path: Path, output: str) -> RunFolder:
    """Record a run in which names of questions and texts of model, tool and grader contain control sequences."""
    recording = Recording(RunFolder(path))
    recording.begin()
    recording.tell("rollout-0", start_group(problem=f"q{HOSTILE}", ground_truth=HOSTILE), "head/buffer")
    recording.work({(7, 0): HOSTILE + CALL, (7, 1): HOSTILE}, output)
    recording.close()
    return RunFolder(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return record_hostile_run(tmp_path_factory.mktemp("run") / "a", HOSTILE)


def show_events(folder: RunFolder, console: Console) -> None:
    for line in format_lines(merge_events(folder), CONTEXT, "", 100.0):
        console.print(line.style(), soft_wrap=True)
        console.file.write(line.plain)


def show_story(folder: RunFolder, console: Console) -> None:
    for line in format_story(folder, 7, CONTEXT):
        console.print(line, soft_wrap=True, highlight=False)


def show_replay(folder: RunFolder, console: Console) -> None:
    log = folder.events / "rollout-0.sqlite"
    with contextlib.closing(sqlite3.connect(log)) as connection, connection:
        connection.execute(
            "UPDATE decisions SET effects = x'00' WHERE seq = (SELECT seq FROM events WHERE kind = 'CodeFinished')"
        )
    difference = replay_process("rollout-0", log, deciders()).difference
    assert difference is not None
    show_difference(folder, difference, console)
    actors = deciders()
    replay_until(log, actors, difference.event.seq)
    console.print(format_state(actors["rollout-0"], 7), markup=False)


def show_divergence(folder: RunFolder, console: Console) -> None:
    path = folder.path.with_name("b")
    other = RunFolder(path) if path.exists() else record_hostile_run(path, HOSTILE + "!")
    assert compare_runs(folder, other, exact=False, console=console)


class HostileNotebook:
    async def run(self, call: CodeRequested) -> CodeResult:
        if call.code == "fail":
            raise SandboxFailure(HOSTILE)
        return CodeResult(CodeOk(Output(HOSTILE, HOSTILE)), 0.1)

    async def end_notebook(self, trajectory_id: int) -> None:
        pass


def show_shell(folder: RunFolder, console: Console) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdin", io.StringIO("1\nfail\n"))
        asyncio.run(run_shell(HostileNotebook(), console))


def show_progress(folder: RunFolder, console: Console) -> None:
    make_display(console).print_line(HOSTILE)


@pytest.mark.parametrize("terminal", [False, True])
@pytest.mark.parametrize("show", [show_events, show_story, show_replay, show_divergence, show_shell, show_progress])
def test_no_command_displays_control_sequences(
    folder: RunFolder, show: Show, terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diff_command, "load_text_context", lambda _: CONTEXT)  # pyright: ignore
    monkeypatch.setattr("sys.stdin", io.StringIO())
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
    console = make_console()
    console.file = io.StringIO()
    show(folder, console)
    shown = console.file.getvalue()
    assert "]52;c;cm0gLXJm" in shown or show is show_divergence
    for name, sequence in SEQUENCES.items():
        assert sequence not in shown, name
    assert terminal or escape_controls(shown) == shown  # on a terminal, rich writes sequences of its own


@pytest.mark.parametrize("kind", [UnusableInput, SandboxFailure])
def test_errors_are_displayed_without_control_sequences(
    kind: type[Exception], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise kind(HOSTILE)

    monkeypatch.setattr(main, "app", fail)
    with pytest.raises(SystemExit, match=f"^{EXIT_UNUSABLE}$"):
        main.main()
    assert capsys.readouterr().err == f"error: {escape_controls(HOSTILE)}\n"


@pytest.mark.parametrize("name", SEQUENCES)
def test_every_control_character_is_shown_as_in_source_code(name: str) -> None:
    shown = escape_controls(f"a\tb\n{SEQUENCES[name]}")
    assert shown.startswith("a\tb\n") and shown[4:].isprintable()
    assert re.sub(r"\\(x..|u....|U.{8}|r)", "", shown[4:]) == "".join(filter(str.isprintable, SEQUENCES[name]))


def test_invisible_letters_and_selectors_are_shown_and_ordinary_text_stays() -> None:
    invisible = "\u034f\u115f\u1160\u17b4\u3164\uffa0\ufe00\u180b\U000e0100\U000e01ef"
    assert escape_controls(invisible).isascii()
    assert escape_controls(invisible).encode().decode("unicode_escape") == invisible
    ordinary = "x² ≤ 5, naïve, 数学, שלום, ❤\ufe0f"
    assert escape_controls(ordinary) == ordinary


@pytest.mark.slow
def test_a_command_without_a_reader_or_with_a_full_disk_ends_without_a_traceback() -> None:
    command = [*ASTERISM, "sandbox", "--help"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "error: standard output: No space left on device\n")
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == ""


@pytest.mark.slow
def test_pictures_need_no_writable_home(tmp_path: Path) -> None:
    """A container may run as a user without a home."""
    (tmp_path / "home").write_text("")  # a file cannot be used as a folder
    program = (
        "import sys; sys.argv[1:] = ['--version']\n"
        "from asterism.actors.cli.main import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "import asterism.analysis.plotting"
    )
    environment = {"HOME": str(tmp_path / "home"), "PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    assert done.stderr == ""
