"""`asterism log show`: prints the events of all processes, merged by time, one per line."""

from __future__ import annotations

import time
from collections.abc import Iterator
from difflib import get_close_matches
from itertools import islice
from typing import get_args

from rich.console import Console
from rich.markup import escape

from actors.cli.log.story_command import load_text_context
from analysis.event_logs.describe import TextContext, describe, extract_texts, make_excerpt
from analysis.event_logs.merged_events import EventFilter, MergedEvent, merge_events, read_start_time
from bus.messages import AnyMessage
from configs.errors import UnusableInput
from configs.run_folder import RunFolder

_POLL_INTERVAL_S = 0.2  # for new events
_KINDS = tuple(kind.__name__ for family in get_args(AnyMessage) for kind in get_args(family) or (family,))


def check_kind(kind: str) -> str:
    """Raises UnusableInput if no message class has this name."""
    if kind not in _KINDS:
        near = " or ".join(get_close_matches(kind, _KINDS))
        raise UnusableInput(f"--kind {kind}: unknown event kind{f'; did you mean {near}?' if near else ''}")
    return kind


def show_log(
    folder: RunFolder, event_filter: EventFilter, text: str, limit: int | None, follow: bool, console: Console
) -> None:
    """`follow`: runs until ^C or until it has printed `limit` lines.

    Raises UnusableInput if there is no log.
    """
    context = load_text_context(folder)
    start_time = read_start_time(folder)
    events = follow_events(folder, event_filter) if follow else merge_events(folder, event_filter)
    try:
        for line in islice(format_lines(events, context, text, start_time), limit):
            console.print(line, soft_wrap=True, highlight=False)
    except KeyboardInterrupt:
        if not follow:
            raise


def follow_events(
    folder: RunFolder, event_filter: EventFilter, poll_interval_s: float = _POLL_INTERVAL_S
) -> Iterator[MergedEvent]:
    """Yields the logged events, then new ones, ordered by time within each poll."""
    seen: dict[str, int] = {}
    while True:
        for logged in merge_events(folder, event_filter, seen):
            seen[logged.process] = logged.event.seq
            yield logged
        time.sleep(poll_interval_s)


def format_lines(events: Iterator[MergedEvent], context: TextContext, text: str, start_time: float) -> Iterator[str]:
    """Lines, in rich markup, of the events that contain `text`.

    `start_time` 0 means the time of the first event.
    """
    for logged in events:
        start_time = start_time or logged.event.time
        message = logged.envelope.message
        found = _find_text(text, message, context) if text else ""
        if found is None:
            continue
        event = logged.event
        about = "" if event.trajectory is None else f"trajectory {event.trajectory}: "
        description = make_excerpt(describe(message, context), text)
        if text and text.casefold() not in description.casefold():
            description += f" ({make_excerpt(found, text)})"
        yield (
            f"[dim]{event.time - start_time:9.4f} s  {logged.name:<18}[/] {event.actor:<10} [bold]{event.kind}[/]  "
            f"[dim]from {event.sender}[/]  {escape(about + description)}"
        )


def _find_text(text: str, message: object, context: TextContext) -> str | None:
    """The message's first text that contains `text`, ignoring case."""
    return next((each for each in extract_texts(message, context) if text.casefold() in each.casefold()), None)
