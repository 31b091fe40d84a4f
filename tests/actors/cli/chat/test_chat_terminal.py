"""`asterism chat` runs in a pseudo-terminal, with a model trained on fixed answers and a real sandbox."""

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from asterism.configs.load import load_run
from asterism.configs.run_folder import RunFolder
from asterism.engine.data.sft_dialogues import iter_sft_dialogues
from asterism.engine.data.task_inputs import load_task_formats
from asterism.engine.hf.tokenizer import load_tokenizer
from tests.actors.cli.chat.terminals import CTRL_C, CTRL_D, Terminal, in_terminal
from tests.actors.cli.chat.trained_runs import ROOT, make_trained_run
from tests.actors.cli.invoking import invoke, read_output, read_refusal
from tests.actors.runs.running import ASTERISM
from tests.processes import family

pytestmark = pytest.mark.slow
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return make_trained_run(RunFolder(tmp_path_factory.mktemp("runs") / "runs" / "learned"))


def chatting(run: RunFolder, *arguments: str) -> AbstractContextManager[Terminal]:
    """Start a chat in the folder that contains runs/."""
    return in_terminal([*ASTERISM, "chat", *arguments], run.path.parent.parent, ENVIRONMENT)


def test_a_conversation_with_calls_continues_with_its_history(run: RunFolder, tmp_path: Path) -> None:
    transcript = tmp_path / "transcript.jsonl"
    with chatting(run, "learned:3", "--transcript", str(transcript)) as terminal:
        terminal.wait_for("/help lists the commands\n> ")
        shown = terminal.enter("What is 6 * 7?\n", "(answered; 2 turns")
        assert '<tool_call>\n{"name": "jupyter_code", "arguments": {"code": "print(6 * 7)"}}\n</tool_call>\n' in shown
        assert "[jupyter_code]\nTool call success\nstdout:\n42\n<reason>I have the result.</reason>\n" in shown
        assert "<answer>\\boxed{42}</answer>\n" in shown
        terminal.wait_for("> ")
        terminal.enter("And \\\n", ". ")
        terminal.interrupt_input()  # ^C clears the message
        terminal.wait_for("> ")
        assert "<answer>\\boxed{1}</answer>\n" in terminal.enter("And 1?\n", "(answered; 1 turn")
        terminal.wait_for("> ")
        terminal.enter("/reset\n", "(another conversation)")
        terminal.enter("/save nowhere\n", "/save: there is no answer yet")
        terminal.enter('"""What is\n6 * 7?"""\n', "tokens)\n> ")
        terminal.type(CTRL_D)
        assert terminal.wait_for_end() == 0
    rows = [json.loads(line) for line in transcript.read_text().splitlines()]
    roles = [message["role"] for message in rows[0]["messages"]]
    assert roles == ["system", "user", "assistant", "tool", "assistant", "user", "assistant"]
    assert rows[1]["messages"][1] == {"role": "user", "content": "What is\n6 * 7?"}
    formats = load_task_formats(load_run(run.config), run)
    learned, saved = (
        list(iter_sft_dialogues(path, load_tokenizer(run.data / "tokenizer"), formats))
        for path in (run.data / "sft.jsonl", transcript)
    )
    assert saved[0]._replace(name="sft.jsonl:2") == learned[1]


@pytest.fixture(scope="module")
def opened(run: RunFolder) -> Iterator[Terminal]:
    """Yield a chat for several tests. SIGTERM ends the chat."""
    with chatting(run, str(run.path), "--max-tokens", "16000") as terminal:
        terminal.wait_for("> ")
        yield terminal
        os.kill(terminal.process.pid, signal.SIGTERM)
        assert terminal.wait_for_end() == 128 + signal.SIGTERM


@pytest.fixture
def terminal(opened: Terminal) -> Terminal:
    """Return the chat of several tests with a new conversation."""
    opened.enter("/reset\n", "(another conversation)\n> ")
    return opened


def test_ctrl_c_ends_an_answer_and_its_tokens_stay_in_the_conversation(terminal: Terminal, tmp_path: Path) -> None:
    saved = tmp_path / "saved.jsonl"
    terminal.enter("Count.\n", "<reason>1 1 1")
    terminal.enter(CTRL_C, "(interrupted; 0 turns")
    terminal.wait_for("> ")
    terminal.enter(f"/save {saved}\n", "(saved to")
    terminal.wait_for("> ")
    messages = json.loads(saved.read_text())["messages"]
    assert [message["role"] for message in messages] == ["system", "user", "assistant"]
    assert messages[2]["content"].startswith("<reason>1 1 1")


def test_ctrl_c_stops_a_call_and_the_model_reads_an_error(terminal: Terminal) -> None:
    terminal.enter("Wait.\n", "while True: pass")
    terminal.wait_for("</tool_call>\n")
    shown = terminal.enter(CTRL_C, "(answered; 2 turns")
    assert "[jupyter_code]\nTool call failure\nKeyboardInterrupt: interrupted by the user\n" in shown
    assert "<answer>\\boxed{0}</answer>\n" in shown
    terminal.enter("What is 6 * 7?\n", "tokens)\n> ")


def test_ctrl_c_stops_a_call_of_a_hanging_sandbox_and_the_next_call_runs(terminal: Terminal) -> None:
    success, reset = "[jupyter_code]\nTool call success\n", "/reset\n"
    assert success in terminal.enter("What is 6 * 7?\n", "tokens)\n> ")
    terminal.enter(reset, "(another conversation)\n> ")
    sandbox = family(terminal.process.pid)[1:]
    signal_all(sandbox, signal.SIGSTOP)
    terminal.enter("What is 6 * 7?\n", "</tool_call>\n")
    terminal.enter(CTRL_C, "[jupyter_code]\nTool call failure\nKeyboardInterrupt: interrupted by the user\n")
    signal_all(sandbox, signal.SIGCONT)
    terminal.wait_for("tokens)\n> ")
    terminal.enter(reset, "(another conversation)\n> ")
    assert success in terminal.enter("What is 6 * 7?\n", "tokens)\n> ")


def signal_all(processes: list[int], number: signal.Signals) -> None:
    for pid in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def test_a_chat_with_a_prompt_answers_it_and_exits(run: RunFolder) -> None:
    found = invoke("chat", run.path, "--prompt", "-", typed="What is 6 * 7?\n")
    assert (found.exit_code, found.stderr) == (0, "")
    assert found.stdout.endswith("<answer>\\boxed{42}</answer>\n(answered; 2 turns, 33 tokens)\n")


def test_a_chat_without_a_reader_closes_engine_and_sandbox(run: RunFolder) -> None:
    """The reader of the output closes its pipe during the answer."""
    command = [*ASTERISM, "chat", str(run.path), "--prompt", "Count.", "--max-tokens", "16000"]
    environment = {**os.environ, **ENVIRONMENT}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.read(20)
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 1


def test_the_demos_checkpoint_answers_with_its_tool(finished: RunFolder) -> None:
    question = json.loads((finished.data / "test.jsonl").read_text().splitlines()[0])["question"]
    settings = ("--temperature", "0", "--set", "sandbox.backend=process")
    shown = read_output("chat", finished.path, "--prompt", question, *settings)
    assert "<reason>" in shown
    assert ("</tool_call>\n" in shown) == ("]\nTool call " in shown)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("learned:7",), "learned:7: no exported model of step 7; runs/learned has the steps 0, 3"),
        (("learned", "--task", "other"), "--task other: there is no such task"),
        (("http://127.0.0.1:9/v1",), "the tokenizer is needed; add --tokenizer FOLDER, or --config FILE"),
        (("learned", "--prompt", " "), "--prompt: the text is empty"),
        (("learned", "--transcript", "none/file"), "--transcript none/file: No such file or directory"),
    ],
)
def test_unusable_arguments_are_refused_by_name(
    arguments: tuple[str, ...], message: str, run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.path.parent.parent)
    assert message in read_refusal("chat", *arguments)
