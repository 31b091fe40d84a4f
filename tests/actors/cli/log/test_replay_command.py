"""`asterism log replay` shows the first difference side by side, and an actor's state at any event."""

from pathlib import Path

import pytest
from rich.console import Console

from asterism.actors.cli.log.replay_command import collect_later_messages, format_state, show_difference, show_state
from asterism.actors.replay.replay import ReplayDifference, replay_before, replay_process, replay_until
from asterism.analysis.event_logs.pretty import pretty_format
from asterism.bus.codec import encode
from asterism.bus.event_log.reader import read_events
from asterism.bus.messages import CodeFinished, CodeOk, Envelope, Output
from asterism.configs.errors import UnusableInput
from asterism.configs.run_folder import RunFolder
from tests.actors.cli.golden_text import assert_matches_golden
from tests.consoles import capture
from tests.edited_logs import editing_log
from tests.fakes import PROMPT, generated
from tests.recorded import EXECUTOR, Recording, deciders, small_run

pytestmark = pytest.mark.slow


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return small_run(RunFolder(tmp_path / "small"))


def rollout_log(folder: RunFolder) -> Path:
    return folder.events / "rollout-0.sqlite"


def first(folder: RunFolder, kind: str) -> int:
    return next(event.seq for event, _ in read_events(rollout_log(folder), kinds=[kind]))


def replayed(folder: RunFolder) -> ReplayDifference | None:
    return replay_process("rollout-0", rollout_log(folder), deciders()).difference


def state_after(folder: RunFolder, seq: int) -> str:
    actors = deciders()
    replay_until(rollout_log(folder), actors, seq)
    return format_state(actors["rollout-0"], 7)


def shown(folder: RunFolder, difference: ReplayDifference) -> str:
    return capture(lambda console: show_difference(folder, difference, console), width=200)


def change(folder: RunFolder, sql: str, *values: object) -> None:
    with editing_log(rollout_log(folder)) as connection:
        connection.execute(sql, values)


def test_a_recorded_run_replays_identically(folder: RunFolder) -> None:
    assert replayed(folder) is None


def encode_finished(call: int, output: str) -> bytes:
    return encode(Envelope(EXECUTOR, "rollout-0", CodeFinished(7, call, CodeOk(Output(output)), 0.01, EXECUTOR)))


@pytest.mark.parametrize(
    ("name", "kind", "what", "sql", "values"),
    [
        # The log has a longer tool output than the run, so the replay requests a larger lease.
        ("effects", "CodeFinished", "effects", "UPDATE events SET frame = ?", [encode_finished(0, "four hundred")]),
        ("refused", "CodeFinished", "effects", "UPDATE events SET frame = ?", [encode_finished(5, "4")]),
        ("without_receiver_log", "LeaseGranted", "effects", "UPDATE decisions SET effects = x'00'", []),
        ("without_fingerprint", "CodeFinished", "effects", "UPDATE decisions SET effects = x'00'", []),
        ("state", "CodeFinished", "state", "UPDATE decisions SET state = x'00'", []),
    ],
)
def test_the_first_difference_shows_the_logged_and_the_replayed_side(
    folder: RunFolder, name: str, kind: str, what: str, sql: str, values: list[bytes]
) -> None:
    seq = first(folder, kind)
    change(folder, f"{sql} WHERE seq = ?", *values, seq)
    difference = replayed(folder)
    assert difference is not None
    assert (difference.event.seq, difference.what) == (seq, what)
    assert_matches_golden(f"replay_{name}", shown(folder, difference))


def test_messages_before_the_event_are_not_compared(folder: RunFolder) -> None:
    seq = first(folder, "CodeFinished")
    change(folder, "UPDATE decisions SET effects = x'00' WHERE seq = ?", seq)
    difference = replayed(folder)
    assert difference is not None
    logged = collect_later_messages(folder, difference)["head/arbiter"]
    assert [each.envelope.message for each in logged[:1]] == [effect.message for effect in difference.effects]  # pyright: ignore
    assert all(each.event.time >= difference.event.time for each in logged)


def test_the_state_just_after_the_event_is_shown(folder: RunFolder) -> None:
    called = first(folder, "CodeFinished")
    assert "phase 'calling'" in state_after(folder, called - 1)
    text = state_after(folder, called)
    assert "phase 'leasing'" in text
    assert "calls 1" in text
    assert "problem 'q:1'" in text


def test_a_trajectory_that_is_not_live_is_refused(folder: RunFolder) -> None:
    with pytest.raises(UnusableInput, match="--trajectory 7: not live in this process"):
        state_after(folder, 2)
    with pytest.raises(UnusableInput, match="there is no event 9999"):
        state_after(folder, 9999)


def test_an_actor_of_another_process_is_shown_at_the_same_time(folder: RunFolder) -> None:
    granted = next(event for event, _ in read_events(rollout_log(folder), kinds=["LeaseGranted"]))
    actors = {"arbiter": deciders()["head/arbiter"], "buffer": deciders()["rollout-0"]}
    log = folder.events / "head.sqlite"
    replay_before(log, actors, granted.time)
    assert "running 1" in format_state(actors["arbiter"])


@pytest.mark.parametrize("until", ["nonsense", "launcher:5", "head:x"])
def test_a_malformed_event_name_is_refused(folder: RunFolder, until: str) -> None:
    with pytest.raises(UnusableInput, match=f"--until {until}: not an event; use head:SEQ or rollout-0:SEQ"):
        show_state(folder, until, None, None, Console())


def test_states_are_printed_with_array_lengths_instead_of_tokens() -> None:
    class Node:
        def __init__(self) -> None:
            self.numbers = list(range(100))
            self.me = self

    text = pretty_format(
        {"turn": generated(7, 0, "text"), "node": Node(), "none": [], "prompt_ids": PROMPT, "few": (1, 2)}
    )
    assert "token_ids 5 tokens" in text
    assert "prompt_ids 8 tokens" in text
    assert "numbers 100 numbers" in text
    assert "me Node (above)" in text
    assert "few 1, 2" in text
    many = pretty_format(dict.fromkeys(map(str, range(100)), "x"))
    assert many.splitlines()[-1] == "  ... 60 more"


def test_a_launch_with_removed_events_is_skipped(folder: RunFolder) -> None:
    kept = sum(1 for _ in read_events(rollout_log(folder)))
    change(folder, "INSERT INTO gone VALUES (2, 2, 'LeaseGranted', 1)")
    replay = replay_process("rollout-0", rollout_log(folder), deciders())
    assert (replay.num_events, replay.num_skipped, replay.identical) == (0, kept, None)
    with pytest.raises(UnusableInput, match=r"log\.keep_steps has removed events up to number 2"):
        replay_until(rollout_log(folder), deciders(), 5)


def test_a_complete_later_launch_is_replayed(folder: RunFolder, tmp_path: Path) -> None:
    twice = RunFolder(tmp_path / "twice")
    recording = Recording(twice)
    for _ in range(2):
        recording.begin()
    recording.close()
    change(twice, "INSERT INTO gone VALUES (2, 2, 'ExecutorJoined', 1)")
    replay = replay_process("rollout-0", rollout_log(twice), deciders())
    assert (replay.num_events, replay.num_skipped, replay.identical) == (2, 2, None)
