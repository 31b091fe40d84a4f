"""`asterism log replay`: whether every decider does the same again, and the state of one of them at any event."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import permutations
from math import inf

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from actors.decider_loop import encode_effects, fingerprint
from actors.replay import DECIDING_PROCESSES, Difference, replay_before, replay_run, replay_until
from actors.wiring import HEAD, ROLLOUT, deciders_of
from analysis.event_logs.merging import Choice, Logged, merged
from analysis.event_logs.readable import readable
from bus.codec import decode
from bus.event_reading import read_events
from bus.messages import RunStarted
from configs.errors import UnusableInput
from configs.load import load_resolved
from configs.run_folder import RunFolder
from policies.decider import Decider, Send
from policies.rollout import Rollout

_NEXT, _MOST_EFFECTS = 2, 4  # of each receiver; messages together: so many are tried for a fingerprint
_SETTINGS = ("_rules", "_tokenizer")  # of a decider that keeps its state in its attributes


def replay_log(folder: RunFolder, *, verify: bool, console: Console) -> int:
    """The exit code: 0 if nothing differs, or if nobody asked."""
    replay = replay_run(load_resolved(folder.config), folder)
    difference = replay.difference
    if difference is None:
        if replay.events:
            console.print(f"{replay.events:,} events replayed: states and effects are identical")
        if replay.left_out:
            console.print(
                f"{replay.left_out:,} kept events not replayed: log.keep_steps has removed others that they follow from"
            )
        return 0
    show_difference(folder, difference, console)
    return int(verify)


# ---------------------------------------------------------------- the first difference


def show_difference(folder: RunFolder, difference: Difference, console: Console) -> None:
    event = difference.event
    console.print(
        f"event {event.seq} of {difference.process} ({event.actor}, {event.kind} from {event.sender}): "
        f"the {difference.what} differ",
        soft_wrap=True,
    )
    console.print(escape(readable(decode(event.frame).message)), soft_wrap=True, highlight=False)
    if difference.what == "state":
        console.print("The effects are the same. The state of the run is known by its fingerprint; the replay has")
        console.print(escape(readable(difference.state)), soft_wrap=True, highlight=False)
        return
    if isinstance(difference.effects, str):
        console.print(f"The replay refuses the event: {escape(difference.effects)}", soft_wrap=True)
    sends = () if isinstance(difference.effects, str) else difference.effects
    logged = logged_next(folder, difference)
    known = known_effects(difference, sends, logged)
    console.print(_side_by_side(sends, logged if known is None else known, exact=known is not None))


def logged_next(folder: RunFolder, difference: Difference) -> dict[str, list[Logged]]:
    """By receiver: what came from the actor and is none of what the replay did before the event. So it is what the run did
    at the event, and after it."""
    event = difference.event
    sender = decode(event.frame).to
    lives = read_events(folder.events / f"{difference.process}.sqlite", kinds=[RunStarted.__name__], actor=event.actor)
    end = min((life.time for life, _ in lives if life.time > event.time), default=inf)
    before = Counter(difference.sent.messages)
    others: dict[str, list[Logged]] = {}
    for logged in merged(folder, Choice(since=difference.sent.since, until=end)):
        if logged.event.sender != sender or logged.event.kind == RunStarted.__name__:
            continue
        envelope = logged.envelope
        kind = envelope.to, logged.event.kind
        if before[kind]:
            before[kind] -= 1
        else:
            others.setdefault(envelope.to, []).append(logged)
    return others


def known_effects(
    difference: Difference, sends: Sequence[Send], logged: Mapping[str, Sequence[Logged]]
) -> dict[str, list[Logged]] | None:
    """Of what was logged next, that which has the fingerprint of the run's effects; what went to processes without an event
    log is taken from the replay. None if nothing has it."""
    sender = decode(difference.event.frame).to
    frames: dict[bytes, Logged | None] = {
        frame: None for send, frame in zip(sends, encode_effects(sender, sends), strict=True) if not _keeps_log(send.to)
    }
    for each in logged.values():
        frames |= {next_.event.frame: next_ for next_ in each[:_NEXT]}
    for count in range(min(len(frames), _MOST_EFFECTS) + 1):
        for chosen in permutations(frames, count):
            if fingerprint(chosen) == difference.fingerprint:
                known: dict[str, list[Logged]] = {}
                for each in (frames[frame] for frame in chosen):
                    if each is not None:
                        known.setdefault(each.envelope.to, []).append(each)
                return known
    return None


def _side_by_side(replayed: Sequence[Send], logged: Mapping[str, Sequence[Logged]], *, exact: bool) -> Table:
    then = "the run, as its receivers logged it" if exact else "the run: what its receivers logged next from this actor"
    table = Table("to", then, "the replay", show_lines=True)
    sends: dict[str, list[Send]] = {}
    for send in replayed:
        sends.setdefault(send.to, []).append(send)
    for to in {**sends, **logged}:
        ours, theirs = sends.get(to, []), logged.get(to, [])
        for place in range(max(len(ours), len(theirs) if exact else 1)):
            received = _received(theirs[place]) if place < len(theirs) else _unknown(to)
            sent = readable(ours[place].message) if place < len(ours) else "nothing"
            table.add_row(to, escape(received), escape(sent))
    return table


def _received(logged: Logged) -> str:
    return f"{readable(logged.envelope.message)}\nlogged as {logged.name} at {logged.event.time:.6f}"


def _unknown(to: str) -> str:
    return "nothing" if _keeps_log(to) else "it keeps no event log"


def _keeps_log(address: str) -> bool:
    return address.partition("/")[0] in DECIDING_PROCESSES


# ---------------------------------------------------------------- time travel


def show_state(folder: RunFolder, until: str, actor: str | None, trajectory: int | None, console: Console) -> None:
    """The actor's state after the event `PROCESS:SEQ`. Without an actor that of the one that received it; one of another
    process is shown as it was at that time. Raises UnusableInput."""
    process, _, number = until.partition(":")
    if process not in DECIDING_PROCESSES or not number.isdecimal():
        raise UnusableInput(
            f"--until {until}: names no event: give {' or '.join(f'{each}:SEQ' for each in DECIDING_PROCESSES)}"
        )
    run = load_resolved(folder.config)
    deciders = deciders_of(process, run, folder)
    event = replay_until(folder.events / f"{process}.sqlite", deciders, int(number))
    actor = actor or event.actor
    if actor not in deciders:
        others = [each for each in DECIDING_PROCESSES if each != process]
        deciders |= {name: decider for other in others for name, decider in deciders_of(other, run, folder).items()}
        if actor not in deciders:
            raise UnusableInput(f"--state {actor}: there is no such actor in this run; there are {', '.join(deciders)}")
        other = actor if actor in DECIDING_PROCESSES else HEAD
        replay_before(folder.events / f"{other}.sqlite", deciders, event.time)
    state = state_text(deciders[actor], trajectory)
    console.print(f"[bold]{actor}[/] after {until}, {event.kind} to {event.actor} from {event.sender}", highlight=False)
    console.print(escape(state), soft_wrap=True, highlight=False)


def state_text(decider: Decider, trajectory: int | None = None) -> str:
    """Raises UnusableInput if a trajectory is asked for that does not live there."""
    if trajectory is not None:
        if not isinstance(decider, Rollout):
            raise UnusableInput(
                f"--trajectory {trajectory}: only a rollout process has trajectories; leave it out, or add --state {ROLLOUT}"
            )
        if trajectory not in decider.trajectories:
            raise UnusableInput(f"--trajectory {trajectory}: it does not live there at that time")
        return readable(decider.trajectories[trajectory])
    state = getattr(decider, "state", None)
    if state is not None:
        return readable(state)
    parts = {name: part for name, part in vars(decider).items() if name not in _SETTINGS and not callable(part)}
    return readable({name.lstrip("_"): part for name, part in parts.items()})
