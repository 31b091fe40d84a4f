"""A chat loop handles a user's messages and commands, with a session that only records the messages."""

import io
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from asterism.actors.cli.chat.background_loop import BackgroundLoop
from asterism.actors.cli.chat.chat_display import ChatDisplay
from asterism.actors.cli.chat.chat_input import MessageReader
from asterism.actors.cli.chat.chat_loop import Talk, run_chat
from asterism.actors.cli.chat.chat_session import AnswerEnd, ChatRefused
from asterism.configs.errors import UnusableInput
from tests.actors.cli.chat.scripted_chats import ScriptedLines
from tests.fakes import END, TOKENIZER

TOO_LONG = "long"


class KeepingSession:
    def __init__(self) -> None:
        self.texts = self.messages = list[str]()

    async def answer(self, text: str) -> AnswerEnd:
        if text == TOO_LONG:
            raise ChatRefused("too many tokens")
        self.texts.append(text)
        return AnswerEnd("answered", 1, 1)

    def interrupt(self) -> None:
        raise AssertionError


def converse(*lines: str) -> tuple[list[str], str]:
    """Return the messages of the session, and the shown text."""
    shown = io.StringIO()
    parts: Any = SimpleNamespace(
        rules=SimpleNamespace(dialogue=SimpleNamespace(system="")),
        task=SimpleNamespace(name=""),
        argument=SimpleNamespace(text="model"),
    )
    session: Any = KeepingSession()
    with BackgroundLoop() as loop:
        talk = Talk(loop, session, ChatDisplay(Console(file=shown, width=200), TOKENIZER, (END,)), None, parts)
        assert talk.converse(MessageReader(ScriptedLines(lines), is_interactive=True)) == 0
    return session.texts, shown.getvalue()


def test_a_message_of_several_lines_is_not_a_command() -> None:
    texts, shown = converse("/nothing", '"""/etc/hosts has:', 'x"""', "/data/a.csv\\", "is a file", " /usr")
    assert texts == ["/etc/hosts has:\nx", "/data/a.csv\nis a file", "/usr"]
    assert shown.count("unknown command") == 1
    assert "unknown command /nothing" in shown


def test_a_prompt_may_contain_invalid_utf_8(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The chat reads the prompt before it loads the model."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9"), encoding="utf-8"))
    options: Any = None
    for prompt in ("caf\udce9", "-"):
        with pytest.raises(UnusableInput, match="no-model"):
            run_chat(str(tmp_path / "no-model"), options, prompt, None, Console())
    assert sys.stdin.errors == "replace"


def test_the_error_for_a_refused_first_message_does_not_suggest_reset() -> None:
    assert "too many tokens\n" in converse(TOO_LONG)[1]
    assert "too many tokens; /reset starts another conversation\n" in converse("a", TOO_LONG)[1]


def test_a_closed_standard_input_counts_as_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    options: Any = None
    with pytest.raises(UnusableInput, match="--prompt: the text is empty"):
        run_chat("model", options, "-", None, Console())
    sys.stdin.close()
