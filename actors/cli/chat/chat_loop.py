"""A conversation in a terminal reads messages and commands, and prints the answers.

The main thread waits for the terminal; engine, sandbox and tasks run on the event loop of another thread.
"""

import os
import secrets
import signal
import sys
from collections.abc import Generator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from types import FrameType
from typing import NoReturn

from msgspec.structs import replace
from rich.console import Console

from asterism.actors.cli.chat.background_loop import BackgroundLoop
from asterism.actors.cli.chat.chat_display import ChatDisplay
from asterism.actors.cli.chat.chat_input import MessageReader, clean_text
from asterism.actors.cli.chat.chat_session import FAILED, INTERRUPTED, ChatRefused, ChatSampling, ChatSession
from asterism.actors.cli.chat.chat_setup import (
    ChatOptions,
    ChatParts,
    OpenedChat,
    build_services,
    load_parts,
    open_chat,
)
from asterism.actors.cli.chat.chat_transcript import TranscriptFile, build_row
from asterism.actors.cli.join_command import EXIT_INTERRUPTED
from asterism.actors.engines.checkpoint_argument import parse_checkpoint_argument
from asterism.configs.errors import UnusableInput
from asterism.tasks.solo_driver import SoloTask

EXIT_FAILED = 1
_STDIN = "-"
_HELP = """\
/reset       start another conversation
/save FILE   append this conversation to FILE, as a row of chat messages
/help        show this text
A line that ends in \\ continues in the next line; \"\"\" begins and ends a text of several lines.
A space before / sends the line to the model. Several lines are never a command.
Ctrl-C stops a call or an answer, Ctrl-D exits."""


def run_chat(
    checkpoint: str, options: ChatOptions, prompt: str | None, transcript: Path | None, console: Console
) -> int:
    """Return 0 or, with `prompt`, 1 if the answer failed and 130 if it was interrupted. Raises UnusableInput."""
    sys.stdin = sys.stdin or Path(os.devnull).open(encoding="utf-8")  # noqa: SIM115 - open until the end
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # replaces bytes that are not UTF-8
    text = None if prompt is None else _read_prompt(prompt)
    parts = load_parts(parse_checkpoint_argument(checkpoint), options)
    file = None if transcript is None else TranscriptFile(transcript, "--transcript")
    display = ChatDisplay(console, parts.tokenizer, parts.rules.stop_token_ids)
    with _ending_on_signals(), BackgroundLoop() as loop:
        opened = loop.run(open_chat(parts, options))
        try:
            session = _build_session(parts, options, opened, display)
            talk = Talk(loop, session, display, file, parts)
            return talk.converse(MessageReader()) if text is None else talk.answer_once(text)
        finally:
            loop.run(opened.stack.aclose(), on_interrupt=lambda: None)
            if file is not None:
                file.close()


def _build_session(parts: ChatParts, options: ChatOptions, opened: OpenedChat, display: ChatDisplay) -> ChatSession:
    services = build_services(parts, opened.sandbox)
    opened.stack.push_async_callback(services.close)
    task = SoloTask(
        parts.task.name,
        parts.rules,
        parts.tokenizer,
        services,
        opened.sandbox,
        scrubs_outcomes=parts.run.determinism == "strict",
    )
    chosen = {key: value for key, value in options.sampling.items() if value is not None}
    sampling = ChatSampling(
        replace(parts.run.sampling, **chosen), parts.run.seed if options.seed is None else options.seed
    )
    first = 0 if options.sandbox is None else secrets.randbits(61)  # other clients may use the same sandbox
    return ChatSession(task, parts.row, opened.engine, sampling, opened.context_tokens, display, first)


def _read_prompt(prompt: str) -> str:
    text = clean_text(sys.stdin.read() if prompt == _STDIN else prompt)
    if not text.strip():
        raise UnusableInput("--prompt: the text is empty")
    return text.strip()


@contextmanager
def _ending_on_signals() -> Generator[None]:
    """Let SIGTERM and SIGHUP exit the process; ^C only interrupts an answer."""

    def end(number: int, _: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Talk:
    """A conversation of one user: it dispatches messages and commands."""

    def __init__(
        self,
        loop: BackgroundLoop,
        session: ChatSession,
        display: ChatDisplay,
        transcript: TranscriptFile | None,
        parts: ChatParts,
    ) -> None:
        self._loop, self._session, self._display, self._transcript = loop, session, display, transcript
        self._system, self._task_name = parts.rules.dialogue.system, parts.task.name
        self._name = parts.argument.text

    def answer_once(self, text: str) -> int:
        return {FAILED: EXIT_FAILED, INTERRUPTED: EXIT_INTERRUPTED}.get(self._answer(text), 0)

    def converse(self, reader: MessageReader) -> int:
        """Answer messages until the end of the input, and return the exit code."""
        if reader.is_interactive:
            self._display.show_note(f"{self._name}; /help lists the commands")
        is_open = True
        while is_open:
            try:
                is_open = self._handle_message(reader.read())
            except KeyboardInterrupt:
                if not reader.is_interactive:
                    return EXIT_INTERRUPTED
                self._display.show_note("")  # starts a new line after ^C
        return 0

    def _handle_message(self, text: str | None) -> bool:
        """Return False at the end of the input."""
        if text is None:
            return False
        if text.startswith("/") and "\n" not in text:
            self._run_command(text.strip())
        else:
            self._answer(text.strip())
        return True

    def _answer(self, text: str) -> str:
        """Answer the text and return how the answer ended."""
        try:
            end = self._loop.run(self._session.answer(text), self._session.interrupt)
        except ChatRefused as refusal:
            remedy = "; /reset starts another conversation" if self._session.messages else ""
            self._display.show_problem(f"{refusal}{remedy}")
            return FAILED
        self._display.show_end(end)
        if self._transcript is not None:
            self._keep(self._transcript)
        return end.ending

    def _keep(self, transcript: TranscriptFile) -> None:
        """Save the conversation. A full disk does not end the conversation."""
        try:
            transcript.save(self._build_row())
        except UnusableInput as error:
            self._display.show_problem(str(error))

    def _run_command(self, line: str) -> None:
        command, _, argument = line.partition(" ")
        match command:
            case "/help":
                self._display.show_note(_HELP)
            case "/reset":
                self._loop.run(self._session.reset(), on_interrupt=lambda: None)
                if self._transcript is not None:
                    self._transcript.end_conversation()
                self._display.show_note("(another conversation)")
            case "/save":
                self._save(argument.strip())
            case _:
                self._display.show_problem(f"unknown command {command}; /help lists the commands")

    def _save(self, name: str) -> None:
        row = self._build_row()
        if not name or row is None:
            self._display.show_problem("/save: name a file" if row else "/save: there is no answer yet")
            return
        try:
            file = TranscriptFile(Path(name).expanduser(), "/save")
            file.save(row)
            file.close()
        except UnusableInput as error:
            self._display.show_problem(str(error))
        else:
            self._display.show_note(f"(saved to {name})")

    def _build_row(self) -> dict[str, object] | None:
        return build_row(self._session.messages, self._system, self._task_name)
