"""^C interrupts a chat with the checkpoint of the demo's complete cold start, in a pseudo-terminal."""

import os
import signal
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from asterism.configs.run_folder import RunFolder
from tests.actors.cli.chat.terminals import CTRL_C, Terminal, in_terminal
from tests.actors.runs.running import ASTERISM, ROOT, asterism
from tests.processes import family

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(1200)]

QUESTION = "What is 36+3+9?\n"


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    runs = tmp_path_factory.mktemp("runs")
    settings = (f"runs_folder={runs}", "rl.steps=0", "evaluation.questions=0", "sandbox.backend=process")
    done = asterism("run", "configs/tiny.toml", *(flag for each in settings for flag in ("--set", each)))
    assert done.returncode == 0, done.stdout + done.stderr
    return RunFolder(runs / "demo")


def chat_with(demo: RunFolder, *flags: str) -> AbstractContextManager[Terminal]:
    return in_terminal([*ASTERISM, "chat", str(demo.path), "--set", "sandbox.backend=process", *flags], ROOT, {})


def test_ctrl_c_ends_an_answer(demo: RunFolder) -> None:
    with chat_with(demo, "--temperature", "50") as terminal:  # nearly uniform: answers have hundreds of tokens
        terminal.wait_for("> ")
        for _ in range(20):  # an answer can end before ^C
            terminal.type(QUESTION)
            terminal.wait_for("<reason>")
            terminal.type(CTRL_C)
            if "(interrupted; " in terminal.wait_for("tokens)\n"):
                break
        else:
            pytest.fail(f"no answer was interrupted: {terminal.output!r}")
        terminal.wait_for("> ")
        terminal.type("/reset\n")
        terminal.wait_for("(another conversation)")


def test_ctrl_c_stops_a_call_and_the_next_one_runs(demo: RunFolder) -> None:
    with chat_with(demo, "--temperature", "0") as terminal:
        terminal.wait_for("> ")
        terminal.type(QUESTION)
        assert "[jupyter_code]\nTool call success\n" in terminal.wait_for("tokens)\n> ")
        terminal.type("/reset\n")
        terminal.wait_for("(another conversation)\n> ")
        sandbox = family(terminal.process.pid)[1:]
        signal_all(sandbox, signal.SIGSTOP)  # the call hangs
        terminal.type(QUESTION)
        terminal.wait_for("</tool_call>\n")
        terminal.type(CTRL_C)
        terminal.wait_for("[jupyter_code]\nTool call failure\nKeyboardInterrupt: interrupted by the user\n")
        signal_all(sandbox, signal.SIGCONT)
        terminal.wait_for("tokens)\n> ")
        terminal.type("/reset\n")
        terminal.wait_for("(another conversation)\n> ")
        terminal.type(QUESTION)
        assert "[jupyter_code]\nTool call success\n" in terminal.wait_for("tokens)\n> ")


def signal_all(processes: list[int], number: signal.Signals) -> None:
    for pid in processes:
        if Path(f"/proc/{pid}").exists():
            os.kill(pid, number)
