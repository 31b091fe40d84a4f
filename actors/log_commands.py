"""`asterism log`: reading event logs in the terminal."""

from __future__ import annotations

from typing import assert_never

from rich.console import Console
from rich.markup import escape

from actors.replay import replay_run
from bus.codec import decode
from bus.event_reading import read_events
from bus.messages import (
    AnyMessage,
    BatchReady,
    CodeFinished,
    LeaseDeferred,
    LeaseGranted,
    LeaseParked,
    LeaseReleased,
    LeaseRequested,
    StartGroup,
    TrajectoryFinished,
    TurnGenerated,
    TurnRequested,
)
from configs.errors import UnusableInput
from configs.load import load_resolved
from configs.run_folder import RunFolder
from configs.schema import Dialogue
from engine.tokenizer import load_tokenizer
from policies.dialogue import TextTokenizer
from policies.record import bytes_to_ids
from policies.tool_text import result_text

_TOKEN_FIELDS = ("token_ids", "loss_mask", "logprobs", "versions", "prompt_ids")


def replay_log(folder: RunFolder, *, verify: bool, console: Console) -> int:
    """The exit code: 0 if nothing differs, or if nobody asked."""
    replay = replay_run(load_resolved(folder.config), folder)
    difference = replay.difference
    if difference is None:
        console.print(f"{replay.events:,} events replayed: states and effects are identical")
        return 0
    console.print(
        f"event {difference.seq} of {difference.process} ({difference.actor}, {difference.kind}): "
        f"the {difference.what} differ. The replay did:\n{escape(difference.effects)}",
        soft_wrap=True,
    )
    return int(verify)


def tell_story(folder: RunFolder, trajectory: int, console: Console) -> None:
    """Raises UnusableInput if no log knows the trajectory."""
    run = load_resolved(folder.config)
    tokenizer = load_tokenizer(folder.expand(run.model.checkpoint))
    for line in story_lines(folder, trajectory, tokenizer, run.dialogue):
        console.print(line, soft_wrap=True)


def story_lines(folder: RunFolder, trajectory: int, tokenizer: TextTokenizer, dialogue: Dialogue) -> list[str]:
    """One for each event, in rich's markup. Raises UnusableInput if no log knows the trajectory."""
    logs = sorted(folder.events.glob("*.sqlite"))
    events = [event for path in logs for event, _ in read_events(path, trajectory=trajectory)]
    if not events:
        raise UnusableInput(f"{folder.events}: no log knows trajectory {trajectory}")
    events.sort(key=lambda event: event.time)
    return [
        f"[dim]{event.time - events[0].time:9.4f} s[/]  {event.actor:<10} [bold]{event.kind}[/]  "
        + escape(_told(decode(event.frame).message, tokenizer, dialogue))
        for event in events
    ]


def _told(message: AnyMessage, tokenizer: TextTokenizer, dialogue: Dialogue) -> str:
    match message:
        case LeaseRequested() | LeaseDeferred() | LeaseGranted() | LeaseParked() | LeaseReleased():
            return _told_of_lease(message)
        case StartGroup():
            return (
                f"group {message.group_id}, {message.problem}, truth {message.ground_truth!r}, {message.size} siblings"
            )
        case TurnGenerated():
            text = tokenizer.decode(bytes_to_ids(message.token_ids))
            return f"turn {message.turn}, {len(message.token_ids) // 4} tokens, {message.finish}: {text}"
        case CodeFinished():
            text = result_text(message.outcome, dialogue.result_characters, dialogue.result_format)
            return f"call {message.call}, {message.duration_s * 1000:.1f} ms: {text}"
        case TurnRequested() | BatchReady():
            return ""
        case TrajectoryFinished():
            return f"{message.ending}, reward {message.reward:g}, {message.calls_failed}/{message.calls} calls failed"
        case _:
            fields = ((name, getattr(message, name)) for name in message.__struct_fields__)
            return ", ".join(f"{name} {value}" for name, value in fields if name not in _TOKEN_FIELDS)


def _told_of_lease(message: LeaseRequested | LeaseDeferred | LeaseGranted | LeaseParked | LeaseReleased) -> str:
    """Why it waits, for what, and for how long it did."""
    match message:
        case LeaseRequested():
            return (
                f"lease {message.lease}, for turn {message.turn}: it has {message.tokens} tokens "
                f"and may get {message.max_new_tokens} more"
            )
        case LeaseDeferred():
            return f"it waits: {message.reason}"
        case LeaseGranted():
            waited = f"after {message.waited_s:.3f} s" if message.waited_s else "at once"
            return (
                f"lease {message.lease}, {waited}: up to {message.tokens} tokens on {message.engine}: {message.reason}"
            )
        case LeaseParked():
            return f"a tool works for it, and its {message.tokens} tokens stay cached while there is room"
        case LeaseReleased():
            return f"it has ended with {message.tokens} tokens"
        case _:
            assert_never(message)
