"""`asterism log show`: the events of all processes, merged by time, a line each."""

from __future__ import annotations

import time
from collections.abc import Iterator
from difflib import get_close_matches
from itertools import islice
from typing import get_args

from rich.console import Console
from rich.markup import escape

from actors.log_commands import words_of
from analysis.event_logs.merging import Choice, Logged, began_at, merged
from analysis.event_logs.telling import Words, excerpt, texts, told
from bus.messages import AnyMessage
from configs.errors import UnusableInput
from configs.run_folder import RunFolder

_LOOKS_EVERY_S = 0.2  # for new events


_KINDS = tuple(kind.__name__ for family in get_args(AnyMessage) for kind in get_args(family) or (family,))


def known_kind(kind: str) -> str:
    """Raises UnusableInput if no message is of this kind."""
    if kind not in _KINDS:
        near = " or ".join(get_close_matches(kind, _KINDS))
        raise UnusableInput(f"--kind {kind}: no message is of this kind{f'; did you mean {near}?' if near else ''}")
    return kind


def show_log(folder: RunFolder, choice: Choice, text: str, limit: int | None, follow: bool, console: Console) -> None:
    """Raises UnusableInput if there is no log. With `follow` it goes on until ^C, or until `limit` lines are shown."""
    words = words_of(folder)
    began = began_at(folder)
    events = followed(folder, choice) if follow else merged(folder, choice)
    try:
        for line in islice(lines(events, words, text, began), limit):
            console.print(line, soft_wrap=True, highlight=False)
    except KeyboardInterrupt:
        if not follow:
            raise


def followed(folder: RunFolder, choice: Choice, looks_every_s: float = _LOOKS_EVERY_S) -> Iterator[Logged]:
    """What is there, then what comes; new events are in order among those that came since the last look."""
    seen: dict[str, int] = {}
    while True:
        for logged in merged(folder, choice, seen):
            seen[logged.process] = logged.event.seq
            yield logged
        time.sleep(looks_every_s)


def lines(events: Iterator[Logged], words: Words, text: str, began: float) -> Iterator[str]:
    """In rich's markup, those with the text in them. `began` 0: with the first event."""
    for logged in events:
        began = began or logged.event.time
        message = logged.envelope.message
        found = _found(text, message, words) if text else ""
        if found is None:
            continue
        event = logged.event
        about = "" if event.trajectory is None else f"trajectory {event.trajectory}: "
        said = excerpt(told(message, words), text)
        if text and text.casefold() not in said.casefold():
            said += f" ({excerpt(found, text)})"
        yield (
            f"[dim]{event.time - began:9.4f} s  {logged.name:<18}[/] {event.actor:<10} [bold]{event.kind}[/]  "
            f"[dim]from {event.sender}[/]  {escape(about + said)}"
        )


def _found(text: str, message: object, words: Words) -> str | None:
    """The first of the message's texts that has it."""
    return next((each for each in texts(message, words) if text.casefold() in each.casefold()), None)
