"""`asterism log show` and `log story` print the events of all processes, or of one trajectory, by time."""

import time
from collections.abc import Iterator
from difflib import get_close_matches
from itertools import islice
from typing import NamedTuple, get_args

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from asterism.actors.cli.console import escape_controls
from asterism.actors.cli.log.fork_points import format_forkable_turns, list_forkable_turns
from asterism.analysis.event_logs.describe import TaskTexts, TextContext, describe, extract_texts, make_excerpt
from asterism.analysis.event_logs.merged_events import EventFilter, MergedEvent, merge_events, read_start_time
from asterism.analysis.event_logs.story import tell_story
from asterism.bus.messages import AnyMessage
from asterism.configs.errors import UnusableInput
from asterism.configs.load import load_run
from asterism.configs.run_folder import RunFolder
from asterism.engine.data.task_inputs import load_task_renderers, read_task_descriptions
from asterism.engine.hf.tokenizer import load_tokenizer

_POLL_INTERVAL_S = 0.2  # interval at which --follow reads new events
_KINDS = tuple(kind.__name__ for kind in get_args(AnyMessage))


def load_text_context(folder: RunFolder) -> TextContext:
    """Load the tokenizer and the tasks' texts. Raises UnusableInput if the run's tokenizer is missing."""
    run, descriptions = load_run(folder.config), read_task_descriptions(folder)
    tokenizer = load_tokenizer(folder.expand_path(run.model.checkpoint))
    renderers = load_task_renderers(run, folder, tokenizer)
    tasks: dict[str, TaskTexts] = {}
    for task in run.resolved_tasks:
        dialogue = task.get_dialogue()
        tasks[task.name] = TaskTexts(dialogue, renderers[task.name], descriptions[task.name].kind)
    return TextContext(tokenizer, tasks, next(iter(tasks.values())))


def check_kind(kind: str) -> str:
    """Return the kind. Raises UnusableInput if no message class has this name."""
    if kind not in _KINDS:
        near = " or ".join(get_close_matches(kind, _KINDS))
        raise UnusableInput(f"--kind {kind}: unknown event kind{f'; did you mean {near}?' if near else ''}")
    return kind


def show_log(
    folder: RunFolder, event_filter: EventFilter, text: str, limit: int | None, follow: bool, console: Console
) -> None:
    """Print the matching events, with `follow` until ^C or `limit` lines. Raises UnusableInput without a log."""
    context = load_text_context(folder)
    start_time = read_start_time(folder)
    events = follow_events(folder, event_filter) if follow else merge_events(folder, event_filter)
    try:
        for line in islice(format_lines(events, context, text, start_time), limit):
            if console.is_terminal:
                console.print(line.style(), soft_wrap=True, highlight=False)
            else:  # writes without rich, which takes most of the time of a long log
                console.file.write(f"{line.plain}\n")
            if follow:
                console.file.flush()
    except KeyboardInterrupt:
        if not follow:
            raise


def follow_events(
    folder: RunFolder, event_filter: EventFilter, poll_interval_s: float = _POLL_INTERVAL_S
) -> Iterator[MergedEvent]:
    """Yield the logged events, then new ones, ordered by time within each poll."""
    seen: dict[str, int] = {}
    while True:
        for logged in merge_events(folder, event_filter, seen):
            seen[logged.process] = logged.event.seq
            yield logged
        time.sleep(poll_interval_s)


class EventLine(NamedTuple):
    time_and_name: str
    actor: str
    kind: str
    sender: str
    contents: str

    @property
    def plain(self) -> str:
        return f"{self.time_and_name} {self.actor:<10} {self.kind}  from {self.sender}  {self.contents}"

    def style(self) -> Text:
        return Text.assemble(
            (self.time_and_name, "dim"),
            f" {self.actor:<10} ",
            (self.kind, "bold"),
            (f"  from {self.sender}", "dim"),
            f"  {self.contents}",
        )


def format_lines(
    events: Iterator[MergedEvent], context: TextContext, text: str, start_time: float
) -> Iterator[EventLine]:
    """Yield the lines of events that contain `text`. `start_time` 0 stands for the time of the first event."""
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
        at_s = f"{event.time - start_time:9.4f} s  {logged.name:<18}"
        yield EventLine(at_s, event.actor, event.kind, event.sender, escape_controls(about + description))


def _find_text(text: str, message: object, context: TextContext) -> str | None:
    """Return the message's first text that contains `text`, ignoring case, or None if there is none."""
    return next((each for each in extract_texts(message, context) if text.casefold() in each.casefold()), None)


# ---------------------------------------------------------------- one trajectory


def print_story(folder: RunFolder, trajectory: int, console: Console) -> None:
    """Print the trajectory's events and forkable turns. Raises UnusableInput if no log has an event of it."""
    for line in format_story(folder, trajectory, load_text_context(folder)):
        console.print(line, soft_wrap=True, highlight=False)
    for line in format_forkable_turns(list_forkable_turns(folder, trajectory)):
        console.print(line, soft_wrap=True, highlight=False)


def format_story(folder: RunFolder, trajectory: int, context: TextContext) -> list[str]:
    """Return lines in rich markup. Raises UnusableInput if no log has an event of the trajectory."""
    events = list(merge_events(folder, EventFilter(trajectory=trajectory)))
    if not events:
        raise UnusableInput(f"{folder.events}: no event of trajectory {trajectory}")
    return [
        f"[dim]{line.at_s:9.4f} s[/]  {line.actor:<10} [bold]{line.kind}[/]  {escape(escape_controls(line.text))}"
        for line in tell_story(events, context)
    ]
