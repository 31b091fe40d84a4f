"""`asterism log replay` replays the deciders and prints the first difference, or a state."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import permutations
from math import inf

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from asterism.actors.replay.replay import (
    DECIDING_PROCESSES,
    ReplayDifference,
    find_log,
    replay_before,
    replay_run,
    replay_until,
)
from asterism.actors.runtime.decider_loop import compute_fingerprint, encode_effects
from asterism.actors.runtime.wiring import build_deciders
from asterism.analysis.event_logs.merged_events import EventFilter, MergedEvent, merge_events
from asterism.analysis.event_logs.pretty import pretty_format
from asterism.bus.addresses import HEAD, ROLLOUT
from asterism.bus.codec import decode
from asterism.bus.event_log.reader import read_events
from asterism.bus.messages import RunStarted
from asterism.configs.errors import UnusableInput
from asterism.configs.load import load_run
from asterism.configs.run_folder import RunFolder
from asterism.policies.decider import Decider, Send
from asterism.policies.rollout.rollout import Rollout

# These limits bound the search for the messages with a given fingerprint.
_CANDIDATES_PER_RECEIVER = 2
_MAX_EFFECTS = 4
_SETTING_ATTRIBUTES = ("_rules", "_tokenizer")  # attributes that are settings, not state of a decider


def replay_log(folder: RunFolder, *, verify: bool, console: Console) -> int:
    """Return the exit code: 1 if the replay differs and `verify` is set."""
    replay = replay_run(load_run(folder.config), folder)
    difference = replay.difference
    if difference is None:
        if replay.num_events:
            console.print(f"{replay.num_events:,} events replayed: states and effects are identical")
        if replay.num_skipped:
            console.print(f"{replay.num_skipped:,} events not replayed: log.keep_steps has removed events before them")
        return 0
    show_difference(folder, difference, console)
    return int(verify)


# ---------------------------------------------------------------- the first difference


def show_difference(folder: RunFolder, difference: ReplayDifference, console: Console) -> None:
    event = difference.event
    console.print(
        f"event {event.seq} of {difference.process} ({event.actor}, {event.kind} from {event.sender}): "
        f"the {difference.what} {'differ' if difference.what == 'effects' else 'differs'}",
        soft_wrap=True,
    )
    console.print(escape(pretty_format(decode(event.frame).message)), soft_wrap=True, highlight=False)
    if difference.what == "state":
        console.print("The effects are the same. The log has only a fingerprint of the run's state.")
        console.print("State in the replay:")
        console.print(escape(pretty_format(difference.state)), soft_wrap=True, highlight=False)
        return
    if isinstance(difference.effects, str):
        console.print(f"The replay refuses the event: {escape(difference.effects)}", soft_wrap=True)
    sends = () if isinstance(difference.effects, str) else difference.effects
    logged = collect_later_messages(folder, difference)
    identified = identify_effects(difference, sends, logged)
    shown = logged if identified is None else identified
    console.print(_build_comparison_table(sends, shown, exact=identified is not None))


def collect_later_messages(folder: RunFolder, difference: ReplayDifference) -> dict[str, list[MergedEvent]]:
    """Return, by receiver, the logged messages that the actor sent at the event or later.

    The replay's messages before the event are subtracted from all logged messages of the actor.
    """
    event = difference.event
    sender = decode(event.frame).to
    launches = read_events(
        folder.events / f"{difference.process}.sqlite", kinds=[RunStarted.__name__], actor=event.actor
    )
    end = min((life.time for life, _ in launches if life.time > event.time), default=inf)
    before = Counter(difference.sent.messages)
    others: dict[str, list[MergedEvent]] = {}
    for logged in merge_events(folder, EventFilter(since=difference.sent.since, until=end)):
        if logged.event.sender != sender or logged.event.kind == RunStarted.__name__:
            continue
        envelope = logged.envelope
        kind = envelope.to, logged.event.kind
        if before[kind]:
            before[kind] -= 1
        else:
            others.setdefault(envelope.to, []).append(logged)
    return others


def identify_effects(
    difference: ReplayDifference, sends: Sequence[Send], logged: Mapping[str, Sequence[MergedEvent]]
) -> dict[str, list[MergedEvent]] | None:
    """Return the messages with the fingerprint of the run's effects, or None if no combination has it.

    Messages to processes without an event log come from the replay.
    """
    sender = decode(difference.event.frame).to
    frames: dict[bytes, MergedEvent | None] = {
        frame: None
        for send, frame in zip(sends, encode_effects(sender, sends), strict=True)
        if not _has_event_log(send.to)
    }
    for each in logged.values():
        frames |= {next_.event.frame: next_ for next_ in each[:_CANDIDATES_PER_RECEIVER]}
    for count in range(min(len(frames), _MAX_EFFECTS) + 1):
        for chosen in permutations(frames, count):
            if compute_fingerprint(chosen) == difference.fingerprint:
                identified: dict[str, list[MergedEvent]] = {}
                for each in (frames[frame] for frame in chosen):
                    if each is not None:
                        identified.setdefault(each.envelope.to, []).append(each)
                return identified
    return None


def _build_comparison_table(
    replayed: Sequence[Send], logged: Mapping[str, Sequence[MergedEvent]], *, exact: bool
) -> Table:
    title = "run, as its receivers logged it" if exact else "run: next messages that its receivers logged"
    table = Table("to", title, "replay", show_lines=True)
    sends: dict[str, list[Send]] = {}
    for send in replayed:
        sends.setdefault(send.to, []).append(send)
    for to in {**sends, **logged}:
        ours, theirs = sends.get(to, []), logged.get(to, [])
        for place in range(max(len(ours), len(theirs) if exact else 1)):
            received = _format_received(theirs[place]) if place < len(theirs) else _format_missing(to)
            sent = pretty_format(ours[place].message) if place < len(ours) else "no message"
            table.add_row(to, escape(received), escape(sent))
    return table


def _format_received(logged: MergedEvent) -> str:
    return f"{pretty_format(logged.envelope.message)}\nlogged as {logged.name} at {logged.event.time:.6f}"


def _format_missing(to: str) -> str:
    return "no message" if _has_event_log(to) else "no event log"


def _has_event_log(address: str) -> bool:
    return address.partition("/")[0] in DECIDING_PROCESSES


# ---------------------------------------------------------------- state at an event


def show_state(folder: RunFolder, until: str, actor: str | None, trajectory: int | None, console: Console) -> None:
    """Print a state after the event `PROCESS:SEQ`; the default actor is the event's receiver.

    An actor of another process is shown in its state at the time of the event. Raises UnusableInput.
    """
    process, _, number = until.partition(":")
    if process not in DECIDING_PROCESSES or not number.isdecimal():
        raise UnusableInput(
            f"--until {until}: not an event; use {' or '.join(f'{each}:SEQ' for each in DECIDING_PROCESSES)}"
        )
    run = load_run(folder.config)
    deciders = build_deciders(process, run, folder)
    event = replay_until(find_log(folder, process), deciders, int(number))
    actor = actor or event.actor
    if actor not in deciders:
        others = [each for each in DECIDING_PROCESSES if each != process]
        deciders |= {name: decider for other in others for name, decider in build_deciders(other, run, folder).items()}
        if actor not in deciders:
            raise UnusableInput(f"--state {actor}: unknown actor; this run has {', '.join(deciders)}")
        other = actor if actor in DECIDING_PROCESSES else HEAD
        replay_before(find_log(folder, other), deciders, event.time)
    state = format_state(deciders[actor], trajectory)
    console.print(f"[bold]{actor}[/] after {until}, {event.kind} to {event.actor} from {event.sender}", highlight=False)
    console.print(escape(state), soft_wrap=True, highlight=False)


def format_state(decider: Decider, trajectory: int | None = None) -> str:
    """Format the decider's state, or one trajectory. Raises UnusableInput if the decider does not have it."""
    if trajectory is not None:
        if not isinstance(decider, Rollout):
            raise UnusableInput(
                f"--trajectory {trajectory}: only a rollout process has trajectories; remove it or add --state {ROLLOUT}"
            )
        if trajectory not in decider.trajectories:
            raise UnusableInput(f"--trajectory {trajectory}: not live in this process at that time")
        return pretty_format(decider.trajectories[trajectory])
    state = getattr(decider, "state", None)
    if state is not None:
        return pretty_format(state)
    parts = {
        name: part for name, part in vars(decider).items() if name not in _SETTING_ATTRIBUTES and not callable(part)
    }
    return pretty_format({name.lstrip("_"): part for name, part in parts.items()})
