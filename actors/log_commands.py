"""`asterism log story`: all that happened to one trajectory."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape

from analysis.event_logs.merging import Choice, Logged, merged
from analysis.event_logs.telling import Words, told
from configs.errors import UnusableInput
from configs.load import load_resolved
from configs.run_folder import RunFolder
from engine.tokenizer import load_tokenizer


def words_of(folder: RunFolder) -> Words:
    """Raises UnusableInput if the run's model is not there."""
    run = load_resolved(folder.config)
    return Words(load_tokenizer(folder.expand(run.model.checkpoint)), run.dialogue)


def tell_story(folder: RunFolder, trajectory: int, console: Console) -> None:
    """Raises UnusableInput if no log knows the trajectory."""
    for line in story_lines(folder, trajectory, words_of(folder)):
        console.print(line, soft_wrap=True)


def story_lines(folder: RunFolder, trajectory: int, words: Words) -> list[str]:
    """One for each event, in rich's markup. Raises UnusableInput if no log knows the trajectory."""
    events = list(merged(folder, Choice(trajectory=trajectory)))
    if not events:
        raise UnusableInput(f"{folder.events}: no log knows trajectory {trajectory}")
    began = events[0].event.time
    return [_line(logged, began, words) for logged in events]


def _line(logged: Logged, began: float, words: Words) -> str:
    event = logged.event
    said = escape(told(logged.envelope.message, words))
    return f"[dim]{event.time - began:9.4f} s[/]  {event.actor:<10} [bold]{event.kind}[/]  {said}"
