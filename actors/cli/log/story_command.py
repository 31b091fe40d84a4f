"""`asterism log story`: prints every event of one trajectory."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape

from analysis.event_logs.describe import TextContext, describe
from analysis.event_logs.merged_events import EventFilter, MergedEvent, merge_events
from configs.errors import UnusableInput
from configs.load import load_resolved
from configs.run_folder import RunFolder
from engine.model.tokenizer import load_tokenizer


def load_text_context(folder: RunFolder) -> TextContext:
    """Raises UnusableInput if the run's tokenizer is missing."""
    run = load_resolved(folder.config)
    return TextContext(load_tokenizer(folder.expand_path(run.model.checkpoint)), run.dialogue)


def print_story(folder: RunFolder, trajectory: int, console: Console) -> None:
    """Raises UnusableInput if no log has an event of the trajectory."""
    for line in format_story(folder, trajectory, load_text_context(folder)):
        console.print(line, soft_wrap=True)


def format_story(folder: RunFolder, trajectory: int, context: TextContext) -> list[str]:
    """One line per event, in rich markup.

    Raises UnusableInput if no log has an event of the trajectory.
    """
    events = list(merge_events(folder, EventFilter(trajectory=trajectory)))
    if not events:
        raise UnusableInput(f"{folder.events}: no event of trajectory {trajectory}")
    start_time = events[0].event.time
    return [_format_line(logged, start_time, context) for logged in events]


def _format_line(logged: MergedEvent, start_time: float, context: TextContext) -> str:
    event = logged.event
    description = escape(describe(logged.envelope.message, context))
    return f"[dim]{event.time - start_time:9.4f} s[/]  {event.actor:<10} [bold]{event.kind}[/]  {description}"
