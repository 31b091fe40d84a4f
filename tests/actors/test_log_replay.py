"""`asterism log replay`: the first difference side by side, and an actor's state at any event."""

from __future__ import annotations

import contextlib
import re
import sqlite3
from pathlib import Path

import pytest
from rich.console import Console

from actors.log_replay import logged_next, show_difference, show_state, state_text
from actors.replay import Difference, replay_before, replay_process, replay_until
from analysis.event_logs.readable import readable
from bus.codec import encode
from bus.event_reading import read_events
from bus.messages import CodeFinished, CodeOk, Envelope, LeaseRequested, Output
from configs.errors import UnusableInput
from configs.run_folder import RunFolder
from tests.fakes import PROMPT, generated
from tests.recorded import EXECUTOR, Recording, deciders, small_run


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return small_run(RunFolder(tmp_path / "small"))


def rollout_log(folder: RunFolder) -> Path:
    return folder.events / "rollout-0.sqlite"


def first(folder: RunFolder, kind: str) -> int:
    return next(event.seq for event, _ in read_events(rollout_log(folder), kinds=[kind]))


def replayed(folder: RunFolder) -> Difference | None:
    return replay_process("rollout-0", rollout_log(folder), deciders()).difference


def shown(folder: RunFolder, difference: Difference) -> str:
    console = Console(width=200)
    with console.capture() as captured:
        show_difference(folder, difference, console)
    return captured.get()


def change(folder: RunFolder, sql: str, *values: object) -> None:
    with contextlib.closing(sqlite3.connect(rollout_log(folder))) as connection, connection:
        connection.execute(sql, values)


def test_a_run_that_was_recorded_replays_identically(folder: RunFolder) -> None:
    assert replayed(folder) is None


def test_the_first_difference_is_shown_with_what_the_receivers_logged_beside_what_the_replay_does(
    folder: RunFolder,
) -> None:
    """The log lies about what the tool printed: in the run it was shorter, so another lease was asked for."""
    seq = first(folder, "CodeFinished")
    lie = CodeFinished(7, 0, CodeOk(Output("four hundred")), 0.01, EXECUTOR)
    change(folder, "UPDATE events SET frame = ? WHERE seq = ?", encode(Envelope(EXECUTOR, "rollout-0", lie)), seq)
    difference = replayed(folder)
    assert difference is not None
    assert (difference.event.seq, difference.what) == (seq, "effects")
    text = shown(folder, difference)
    assert f"event {seq} of rollout-0 (rollout-0, CodeFinished from executor-0/1): the effects differ" in text
    assert "stdout 'four hundred'" in text  # the event itself, decoded
    (asked,) = [effect.message for effect in difference.effects if not isinstance(effect, str)]
    assert isinstance(asked, LeaseRequested)
    sizes = next(line for line in text.splitlines() if " tokens " in line)
    assert re.findall(r"tokens (\d+)", sizes) == [str(asked.tokens - len("our hundred")), str(asked.tokens)]
    assert "head:" in text
    assert "the run, as its receivers logged it" in text  # it has the fingerprint that the run's effects had
    assert "TrajectoryFinished" not in text  # which came later


def test_what_the_run_sent_before_is_not_taken_for_what_it_sent_then(folder: RunFolder) -> None:
    seq = first(folder, "CodeFinished")
    change(folder, "UPDATE decisions SET effects = x'00' WHERE seq = ?", seq)
    difference = replayed(folder)
    assert difference is not None
    logged = logged_next(folder, difference)["head/arbiter"]
    assert [each.envelope.message for each in logged[:1]] == [effect.message for effect in difference.effects]  # pyright: ignore
    assert all(each.event.time >= difference.event.time for each in logged)


def test_a_receiver_that_got_something_else_is_seen_beside_it(folder: RunFolder) -> None:
    """A lease that the run asked for with more tokens than the replay does."""
    seq = first(folder, "CodeFinished")
    change(folder, "UPDATE decisions SET effects = x'00' WHERE seq = ?", seq)
    difference = replayed(folder)
    assert difference is not None
    (logged,) = logged_next(folder, difference)["head/arbiter"][:1]
    with contextlib.closing(sqlite3.connect(folder.events / "head.sqlite")) as head, head:
        head.execute("DELETE FROM events WHERE seq = ?", (logged.event.seq,))
    text = shown(folder, difference)
    assert "LeaseReleased" in text  # the next that the arbiter logged from it
    assert "the run: what its receivers logged next from this actor" in text


def test_an_event_that_is_refused_today_is_shown_with_why(folder: RunFolder) -> None:
    seq = first(folder, "CodeFinished")
    twice = CodeFinished(7, 5, CodeOk(Output("4")), 0.01, EXECUTOR)
    change(folder, "UPDATE events SET frame = ? WHERE seq = ?", encode(Envelope(EXECUTOR, "rollout-0", twice)), seq)
    difference = replayed(folder)
    assert difference is not None
    assert isinstance(difference.effects, str)
    text = shown(folder, difference)
    assert f"The replay refuses the event: {difference.effects}" in text
    row = next(line for line in text.splitlines() if "head/arbiter" in line)
    assert row.split("│")[-2].strip() == "nothing"  # what the run did then is known by its receiver's log


def test_what_would_have_gone_to_who_keeps_no_log_is_the_replays_word_alone(folder: RunFolder) -> None:
    """Of a turn that was asked for, the generator has no record; nor has the fingerprint been found."""
    seq = first(folder, "LeaseGranted")
    change(folder, "UPDATE decisions SET effects = x'00' WHERE seq = ?", seq)
    difference = replayed(folder)
    assert difference is not None
    row = next(line for line in shown(folder, difference).splitlines() if line.startswith("│ generator-0"))
    assert row.split("│")[2].strip() == "it keeps no event log"
    assert "TurnRequested" in row.split("│")[3]


def test_a_state_that_differs_is_shown_as_the_replay_has_it(folder: RunFolder) -> None:
    seq = first(folder, "CodeFinished")
    change(folder, "UPDATE decisions SET state = x'00' WHERE seq = ?", seq)
    difference = replayed(folder)
    assert difference is not None
    assert difference.what == "state"
    text = shown(folder, difference)
    assert "The effects are the same" in text
    assert "calls 1" in text


def test_a_state_is_that_just_after_the_event(folder: RunFolder) -> None:
    called = first(folder, "CodeFinished")
    actors = deciders()
    replay_until(rollout_log(folder), actors, called - 1)
    assert "phase 'calling'" in state_text(actors["rollout-0"], 7)
    actors = deciders()
    replay_until(rollout_log(folder), actors, called)
    text = state_text(actors["rollout-0"], 7)
    assert "phase 'leasing'" in text
    assert "calls 1" in text
    assert "problem 'q:1'" in text


def test_one_that_does_not_live_then_is_refused(folder: RunFolder) -> None:
    actors = deciders()
    replay_until(rollout_log(folder), actors, 2)
    with pytest.raises(UnusableInput, match="--trajectory 7: it does not live there"):
        state_text(actors["rollout-0"], 7)
    with pytest.raises(UnusableInput, match="there is no event 9999"):
        replay_until(rollout_log(folder), deciders(), 9999)


def test_an_actor_of_another_process_is_shown_as_it_was_at_that_time(folder: RunFolder) -> None:
    granted = next(event for event, _ in read_events(rollout_log(folder), kinds=["LeaseGranted"]))
    actors = {"arbiter": deciders()["head/arbiter"], "buffer": deciders()["rollout-0"]}
    log = folder.events / "head.sqlite"
    replay_before(log, actors, granted.time)
    assert "running 1" in state_text(actors["arbiter"])


@pytest.mark.parametrize("until", ["nonsense", "launcher:5", "head:x"])
def test_an_event_that_cannot_be_meant_is_refused(folder: RunFolder, until: str) -> None:
    with pytest.raises(UnusableInput, match=f"--until {until}: names no event: give head:SEQ or rollout-0:SEQ"):
        show_state(folder, until, None, None, Console())


def test_a_state_is_readable_without_its_tokens() -> None:
    class Node:
        def __init__(self) -> None:
            self.numbers = list(range(100))
            self.me = self

    text = readable({"turn": generated(7, 0, "text"), "node": Node(), "none": [], "prompt_ids": PROMPT, "few": (1, 2)})
    assert "token_ids 5 tokens" in text
    assert "prompt_ids 8 tokens" in text
    assert "numbers 100 numbers" in text
    assert "me Node (above)" in text
    assert "few 1, 2" in text
    many = readable(dict.fromkeys(map(str, range(100)), "x"))
    assert many.splitlines()[-1] == "  ... 60 more"


def test_a_life_of_which_events_are_gone_is_left_out_and_said_so(folder: RunFolder) -> None:
    kept = sum(1 for _ in read_events(rollout_log(folder)))
    change(folder, "INSERT INTO gone VALUES (2, 2, 'LeaseGranted', 1)")
    replay = replay_process("rollout-0", rollout_log(folder), deciders())
    assert (replay.events, replay.left_out, replay.identical) == (0, kept, None)
    with pytest.raises(UnusableInput, match=r"log\.keep_steps has removed events up to number 2"):
        replay_until(rollout_log(folder), deciders(), 5)


def test_a_later_life_is_replayed_whole(folder: RunFolder, tmp_path: Path) -> None:
    twice = RunFolder(tmp_path / "twice")
    recording = Recording(twice)
    for _ in range(2):
        recording.begin()
    recording.close()
    change(twice, "INSERT INTO gone VALUES (2, 2, 'ExecutorJoined', 1)")
    replay = replay_process("rollout-0", rollout_log(twice), deciders())
    assert (replay.events, replay.left_out, replay.identical) == (2, 2, None)
