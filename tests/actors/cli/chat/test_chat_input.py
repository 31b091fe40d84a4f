"""A chat reads messages of several lines, and displays tokens and control characters."""

import io

import pytest
from rich.console import Console

from asterism.actors.cli.chat.chat_display import ChatDisplay
from asterism.actors.cli.chat.chat_input import MessageReader
from asterism.actors.cli.chat.chat_session import AnswerEnd
from tests.actors.cli.chat.scripted_chats import ScriptedLines
from tests.fakes import END, TOKENIZER


def read_messages(*lines: str) -> tuple[list[str], list[str]]:
    """Return the messages, and the prompt of each line."""
    scripted = ScriptedLines(lines)
    reader = MessageReader(scripted, is_interactive=True)
    return list(iter(reader.read, None)), scripted.prompts


@pytest.mark.parametrize(
    ("lines", "messages"),
    [
        (["a", "", "  ", "b"], ["a", "b"]),
        (["a \\", "b\\", "c", "d"], ["a \nb\nc", "d"]),
        (['"""', "a", "", "  b", '"""', "c"], ["a\n\n  b", "c"]),
        (['"""a', 'b"""', "c"], ["a\nb", "c"]),
        (['"""a"""'], ["a"]),
        (["a\\"], ["a"]),
        (['"""a', "b"], ["a\nb"]),
        (["\udcff"], ["?"]),
        ([], []),
    ],
)
def test_a_backslash_and_triple_quotes_continue_a_message(lines: list[str], messages: list[str]) -> None:
    assert read_messages(*lines)[0] == messages


def test_a_continued_message_has_another_prompt() -> None:
    assert read_messages("a\\", "b", "c")[1] == ["> ", ". ", "> ", "> "]


def test_control_characters_are_escaped_and_texts_are_shown_verbatim() -> None:
    file = io.StringIO()
    display = ChatDisplay(Console(file=file, width=20), TOKENIZER, (END,))
    display.begin_turn("<reason>")
    display.add_tokens([*TOKENIZER.encode("x[:100:2] [bold] \x1b[2J and longer\tthan a line", trusted=True), END])
    display.end_turn()
    display.show_result("jupyter_code", "a\rb")
    display.show_end(AnswerEnd("answered", 1, 7))
    assert file.getvalue() == (
        "<reason>x[:100:2] [bold] \\x1b[2J and longer\tthan a line\n[jupyter_code]\na\\rb\n(answered; 1 turn, 7 tokens)\n"
    )
