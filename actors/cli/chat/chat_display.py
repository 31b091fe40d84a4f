"""This view prints a conversation in a terminal while it happens, with escaped control characters."""

from collections.abc import Collection, Sequence

from rich.console import Console
from rich.segment import Segment, Segments

from asterism.actors.cli.chat.chat_session import CONTEXT_FULL, FAILED, INTERRUPTED, AnswerEnd
from asterism.actors.cli.console import escape_controls
from asterism.policies.dialogue.chat_format import TextTokenizer
from asterism.policies.dialogue.token_text import TokenText

_RESULT, _FRAME, _NOTE = "green", "dim", "dim italic"
_ENDINGS = {
    "answered": "answered",
    "no_answer": "ended without a final answer",
    "length": "stopped at the limit of tokens (--max-tokens)",
    "turns": "stopped at the limit of turns (--max-turns)",
    "done": "the environment has ended",
    INTERRUPTED: "interrupted",
    CONTEXT_FULL: "the context is full (--context-tokens); /reset starts another conversation",
}


class ChatDisplay:
    """A view that prints to the console. Implements asterism.actors.cli.chat.chat_session.ChatView."""

    def __init__(self, console: Console, tokenizer: TextTokenizer, stop_token_ids: Collection[int]) -> None:
        self._console, self._tokenizer, self._stops = console, tokenizer, stop_token_ids
        self._text = TokenText(tokenizer, stop_token_ids)
        self._is_within_line = False

    def begin_turn(self, prefill: str) -> None:
        self._text = TokenText(self._tokenizer, self._stops)
        self._write(prefill, _FRAME)

    def add_tokens(self, token_ids: Sequence[int]) -> None:
        self._write(self._text.add(token_ids))

    def end_turn(self) -> None:
        self._write(self._text.finish())
        self._end_line()

    def show_result(self, title: str, text: str) -> None:
        self._end_line()
        self._write(f"[{title}]\n", _FRAME)
        self._write(text, _RESULT)
        self._end_line()

    def show_problem(self, text: str) -> None:
        self._end_line()
        self._write(f"{text}\n", "bold red")

    def show_note(self, text: str) -> None:
        self._end_line()
        self._write(f"{text}\n", _NOTE)

    def show_end(self, end: AnswerEnd) -> None:
        if end.ending == FAILED:
            self.show_problem(f"failed: {end.cause}; the conversation is as before this message")
        else:
            turns = "1 turn" if end.turns == 1 else f"{end.turns} turns"
            self.show_note(f"({_ENDINGS[end.ending]}; {turns}, {end.tokens} tokens)")

    def _end_line(self) -> None:
        if self._is_within_line:
            self._write("\n")

    def _write(self, text: str, style: str | None = None) -> None:
        if text:
            self._is_within_line = not text.endswith("\n")
            segment = Segment(escape_controls(text), self._console.get_style(style) if style else None)
            self._console.print(Segments([segment]), end="", soft_wrap=True)  # soft_wrap keeps lines and tabs
