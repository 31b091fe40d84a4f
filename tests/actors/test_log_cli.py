"""`asterism log ...` as it is typed, on the log of a simulated run: what is printed, and what is refused."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sqlite3
from pathlib import Path

import polars as pl
import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from actors import log_cli, log_commands, log_diff, log_replay, log_show, replay, waits
from actors.wiring import HEAD, ROLLOUT
from analysis.event_logs.merging import merged
from analysis.event_logs.telling import Words
from bus.codec import decode
from bus.event_reading import read_events
from bus.messages import BatchReady, CodeFinished
from configs.errors import UnusableInput
from configs.run_folder import RunFolder
from configs.schema import Dialogue, Run
from policies.decider import Decider
from tests.actors.test_logged_groups import logged
from tests.fakes import TOKENIZER
from tests.simulation.test_faults import live
from tests.simulation.world import World
from tests.traces import checked_slices

SEED = 0  # whose step is synchronous


@pytest.fixture(scope="module")
def world() -> World:
    return live(SEED)


@pytest.fixture(scope="module")
def recorded(world: World, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    path = tmp_path_factory.mktemp("run")
    logged(world, path, process=ROLLOUT)
    return logged(world, path)


@pytest.fixture
def folder(recorded: RunFolder, world: World, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """Its processes decide with the world's tokenizer and questions, and what is printed is as wide as it needs."""

    def deciders_of(process: str, run: Run, folder: RunFolder) -> dict[str, Decider]:
        return dict(world.deciders()[process])

    for module in (replay, waits, log_replay):
        monkeypatch.setattr(module, "deciders_of", deciders_of)
    for module in (log_commands, log_show, log_diff):
        monkeypatch.setattr(module, "words_of", lambda folder: Words(TOKENIZER, Dialogue()))
    monkeypatch.setattr(log_cli, "_console", lambda: Console(width=200, emoji=False))
    return recorded


def asked(*arguments: object) -> Result:
    return CliRunner().invoke(log_cli.log_app, [*map(str, arguments)], env={**os.environ, "COLUMNS": "200"})


def log(*arguments: object) -> str:
    result = asked(*arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def refusal(*arguments: object) -> str:
    result = asked(*arguments)
    assert isinstance(result.exception, UnusableInput), result.output
    return str(result.exception)


def copy(folder: RunFolder, path: Path, *sql: str, process: str = HEAD) -> RunFolder:
    """Another folder with the same logs, one of them changed."""
    other = RunFolder(path / "copy")
    other.events.mkdir(parents=True)
    other.config.write_bytes(folder.config.read_bytes())
    for log in folder.events.glob("*.sqlite"):
        (other.events / log.name).write_bytes(log.read_bytes())
    with contextlib.closing(sqlite3.connect(other.events / f"{process}.sqlite")) as connection, connection:
        for statement in sql:
            connection.execute(statement)
    return other


def a_trajectory_that_called(folder: RunFolder) -> int:
    events = read_events(folder.events / f"{ROLLOUT}.sqlite", kinds=["CodeFinished"])
    return next(event.trajectory for event, _ in events if event.trajectory is not None)


# ---------------------------------------------------------------- show, story


def test_show_has_a_line_for_every_event_and_stops_at_a_limit(folder: RunFolder) -> None:
    assert len(log("show", folder.path).splitlines()) == sum(1 for _ in merged(folder))
    shown = log("show", folder.path, "--kind", "CodeFinished", "--actor", ROLLOUT, "--limit", 3).splitlines()
    assert len(shown) == 3
    assert all(" CodeFinished  from executor-" in line for line in shown)


def test_show_takes_times_in_seconds_since_the_beginning(folder: RunFolder) -> None:
    seconds = [
        float(line.split()[0]) for line in log("show", folder.path, "--since", "0.5", "--until", "1").splitlines()
    ]
    assert seconds
    assert 0.5 <= min(seconds) <= max(seconds) < 1


def test_a_reader_who_follows_ends_it_with_an_interrupt(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(log_show.time, "sleep", interrupted)
    shown = log("show", folder.path, "--follow", "--kind", "StepCollected").splitlines()
    assert len(shown) == len(log("show", folder.path, "--kind", "StepCollected").splitlines())


def test_a_story_is_told_in_the_order_of_time(folder: RunFolder) -> None:
    story = log("story", folder.path, a_trajectory_that_called(folder))
    told = re.findall(r"^ *(\d+\.\d{4}) s  \S+ +(\w+)", story, re.MULTILINE)
    kinds = [kind for _, kind in told]
    assert [float(second) for second, _ in told] == sorted(float(second) for second, _ in told)
    assert kinds[0] == "StartGroup"
    assert {"LeaseGranted", "TurnGenerated", "CodeFinished"} < set(kinds)


def test_a_slice_in_a_models_code_is_no_emoji() -> None:
    console = log_cli._console()  # pyright: ignore[reportPrivateUsage]
    with console.capture() as captured:
        console.print(r"x\[:100:2]")
    assert captured.get() == "x[:100:2]\n"


# ---------------------------------------------------------------- replay


def test_a_replay_says_that_all_is_identical(folder: RunFolder) -> None:
    events = sum(1 for _ in merged(folder))
    assert log("replay", folder.path, "--verify") == f"{events:,} events replayed: states and effects are identical\n"


def test_a_difference_is_shown_and_is_an_error_for_who_verifies(folder: RunFolder, tmp_path: Path) -> None:
    last = "(SELECT max(seq) FROM decisions WHERE state IS NOT NULL)"
    changed = copy(folder, tmp_path, f"UPDATE decisions SET state = x'00' WHERE seq = {last}")
    verified = asked("replay", changed.path, "--verify")
    assert verified.exit_code == 1
    assert re.match(r"event \d+ of head .*: the state differ", verified.output.replace("\n", " "))
    assert asked("replay", changed.path).exit_code == 0


def test_a_log_without_its_beginning_is_said_not_to_be_replayed(folder: RunFolder, tmp_path: Path) -> None:
    changed = copy(folder, tmp_path, "INSERT INTO gone VALUES (6, 9, 'LeaseRequested', 4)")
    head = sum(1 for _ in read_events(folder.events / f"{HEAD}.sqlite"))
    assert f"{head:,} kept events not replayed: log.keep_steps" in log("replay", changed.path)


def test_a_replay_needs_its_logs(folder: RunFolder, tmp_path: Path) -> None:
    changed = copy(folder, tmp_path)
    (changed.events / f"{ROLLOUT}.sqlite").unlink()
    assert "log.events = false" in refusal("replay", changed.path)


def test_a_state_is_that_of_who_received_the_event_unless_another_is_named(folder: RunFolder) -> None:
    trajectory = a_trajectory_that_called(folder)
    event = next(
        event
        for event, _ in read_events(folder.events / f"{ROLLOUT}.sqlite", kinds=["CodeFinished"], trajectory=trajectory)
    )
    where = f"{ROLLOUT}:{event.seq}"
    own = log("replay", folder.path, "--until", where, "--trajectory", trajectory)
    assert own.startswith(f"{ROLLOUT} after {where}, CodeFinished to {ROLLOUT} from executor-")
    assert f"trajectory_id {trajectory}" in own
    other = log("replay", folder.path, "--until", where, "--state", "buffer")
    assert other.startswith(f"buffer after {where}, ")
    assert "BufferState" in other


def test_a_state_that_nobody_has_is_refused(folder: RunFolder) -> None:
    assert "--state bufer: there is no such actor in this run; there are " in refusal(
        "replay", folder.path, "--until", "head:3", "--state", "bufer"
    )
    assert "only a rollout process has trajectories" in refusal(
        "replay", folder.path, "--until", "head:3", "--trajectory", 1
    )
    assert "--state and --trajectory need --until" in refusal("replay", folder.path, "--state", "buffer")


def test_a_state_of_which_the_events_are_gone_is_not_made_up(folder: RunFolder, tmp_path: Path) -> None:
    """At the time of an event of another process, whose own log is whole."""
    changed = copy(folder, tmp_path, "INSERT INTO gone VALUES (6, 9, 'LeaseRequested', 4)")
    asked_for = ("replay", changed.path, "--until", f"{ROLLOUT}:9", "--state", "buffer")
    assert "log.keep_steps has removed events up to number 9" in refusal(*asked_for)


# ---------------------------------------------------------------- waits


def test_each_wait_is_told_with_whom_it_is_for(folder: RunFolder, tmp_path: Path) -> None:
    """All stands still while a tool call of the first step is under way."""
    requested = next(event.time for event, _ in read_events(folder.events / f"{HEAD}.sqlite", kinds=["StepRequested"]))
    calls = read_events(folder.events / f"{ROLLOUT}.sqlite", kinds=["CodeFinished"])
    end = next(event for event, _ in calls if event.time > requested)
    later = f"DELETE FROM events WHERE time >= {end.time!r}"
    stopped = copy(copy(folder, tmp_path / "head", later), tmp_path, later, process=ROLLOUT)
    called = decode(end.frame).message
    assert isinstance(called, CodeFinished)
    told = log_waits(stopped)
    (calling,) = [line for line in told if f" wait for {called.executor}: a tool call, since " in line]
    assert str(called.trajectory_id) in re.findall(r"\d+", calling.partition(" wait")[0])
    (buffer,) = [line for line in told if line.startswith("head/buffer")]
    assert re.match(r"head/buffer waits for rollout-0: \d+ groups of step 1, \d+ trajectories, since ", buffer)


def log_waits(folder: RunFolder) -> list[str]:
    """The lines of `asterism log waits`, which writes them to the process's own output."""
    return log("waits", folder.path).splitlines()


def test_a_batch_that_was_not_trained_on_is_the_learners(folder: RunFolder, tmp_path: Path) -> None:
    sent = next(
        event.time
        for event, _, done in replay.decide_all_again(
            folder.events / f"{HEAD}.sqlite", replay.deciders_of(HEAD, Run("x"), folder), since=1
        )
        if any(isinstance(batch, BatchReady) for batch in replay.batches_of(done))
    )
    stopped = copy(folder, tmp_path, f"DELETE FROM events WHERE time > {sent!r}")
    (learner,) = [line for line in log_waits(stopped) if line.startswith("head/recipe waits for learner")]
    assert "step 1, since " in learner


def test_before_a_generator_and_the_weights_are_there_the_recipe_waits_for_both(
    folder: RunFolder, tmp_path: Path
) -> None:
    stopped = copy(folder, tmp_path, "DELETE FROM events WHERE kind IN ('EngineJoined', 'WeightsPublished')")
    told = [line.partition(", since")[0] for line in log_waits(stopped)]
    assert "head/recipe waits for a generator: none is there" in told
    assert "head/recipe waits for learner: the cold start, or its checkpoint" in told


def test_who_waits_is_not_made_up_where_events_are_gone(folder: RunFolder, tmp_path: Path) -> None:
    changed = copy(folder, tmp_path, "INSERT INTO gone VALUES (6, 9, 'LeaseRequested', 4)")
    assert "log.keep_steps has removed events up to number 9" in refusal("waits", changed.path)


def test_waits_need_an_event_log(folder: RunFolder, tmp_path: Path) -> None:
    changed = copy(folder, tmp_path)
    (changed.events / f"{ROLLOUT}.sqlite").unlink()
    assert "log.events = false" in refusal("waits", changed.path)


# ---------------------------------------------------------------- diff, export, roc


def test_a_run_does_not_part_from_itself(folder: RunFolder, tmp_path: Path) -> None:
    same = copy(folder, tmp_path)
    assert "every trajectory and every step is the same" in log("diff", folder.path, same.path)
    assert "every event of every process is the same" in log("diff", folder.path, same.path, "--exact")


@pytest.mark.slow
def test_runs_that_part_are_an_error_and_both_sides_are_shown(folder: RunFolder, tmp_path: Path) -> None:
    other = logged(live(SEED + 1), tmp_path / "other")
    logged(live(SEED + 1), tmp_path / "other", process=ROLLOUT)
    parted = asked("diff", folder.path, other.path)
    assert parted.exit_code == 1
    assert "the runs part at " in parted.output
    assert asked("diff", folder.path, other.path, "--exact").exit_code == 1


@pytest.mark.slow
def test_export_writes_what_is_asked_for_and_refuses_to_write_nothing(folder: RunFolder, tmp_path: Path) -> None:
    tables, trace = tmp_path / "tables", tmp_path / "trace.json"
    said = log("export", folder.path, "--parquet", tables, "--chrome", trace)
    events = pl.read_parquet(tables / "events").height
    assert events == sum(1 for _ in merged(folder))
    assert f"{tables / 'events'}: {events:,} rows" in said
    whole = sum(map(len, checked_slices(trace).values()))
    log("export", folder.path, "--chrome", trace, "--step", 1)
    assert 0 < sum(map(len, checked_slices(trace).values())) < whole
    assert "the logs have no step 99" in refusal("export", folder.path, "--chrome", trace, "--step", 99)
    assert refusal("export", folder.path) == "give --parquet FOLDER, --chrome FILE, or both"


def test_where_an_export_cannot_be_written_it_is_named(folder: RunFolder, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    missing = tmp_path / "none" / "trace.json"
    assert refusal("export", folder.path, "--chrome", missing) == f"{missing}: No such file or directory"
    told = refusal("export", folder.path, "--parquet", tmp_path / "file")
    assert told == f"{tmp_path / 'file' / 'events'}: Not a directory"


def test_roc_tells_what_other_settings_would_have_kept(folder: RunFolder, tmp_path: Path) -> None:
    file = tmp_path / "roc.json"
    printed = log("roc", folder.path, "--json", file)
    told = json.loads(file.read_text())
    assert "filtered again by its own settings" in printed
    assert told["all_steps"]["run"] == told["all_steps"]["other"]
    log("roc", folder.path, "--set", "roc.enabled=false", "--json", file)
    told = json.loads(file.read_text())
    assert told["settings"] == ["roc.enabled: true -> false"]
    assert told["all_steps"]["other"]["trajectories"] > told["all_steps"]["run"]["trajectories"]


def test_roc_names_whom_a_step_would_have_lost_and_won(folder: RunFolder, tmp_path: Path) -> None:
    file = tmp_path / "roc.json"
    printed = log("roc", folder.path, "--set", "roc.enabled=false", "--step", 1, "--json", file)
    (step,) = json.loads(file.read_text())["steps"]
    members = step["trajectories"]
    come = {e["trajectory_id"] for e in members if e["advantage"] is None and e["other_advantage"] is not None}
    gone = {e["trajectory_id"] for e in members if e["advantage"] is not None and e["other_advantage"] is None}
    assert come
    named = re.findall(r"^group \d+: (?:without ([\d, ]+))?(?:, )?(?:with ([\d, ]+))?$", printed, re.MULTILINE)
    assert {int(number) for without, _ in named for number in re.findall(r"\d+", without)} == gone
    assert {int(number) for _, with_ in named for number in re.findall(r"\d+", with_)} == come


def test_roc_refuses_what_it_cannot_filter(folder: RunFolder, tmp_path: Path) -> None:
    assert "expected a step's number, or all" in refusal("roc", folder.path, "--step", "first")
    assert "only roc.* can be set here" in refusal("roc", folder.path, "--set", "rl.prompts=9")
    assert "there is no folder" in refusal("roc", folder.path, "--json", tmp_path / "none" / "roc.json")
    assert re.search(r"--step 99: .* has steps 1 to \d", refusal("roc", folder.path, "--step", 99))
    assert refusal("roc", folder.path, "--json", tmp_path) == f"--json {tmp_path}: Is a directory"


def test_flags_that_mean_nothing_are_refused_by_their_name(folder: RunFolder, tmp_path: Path) -> None:
    assert refusal("show", folder.path, "--kind", "TurnGenerate").startswith(
        "--kind TurnGenerate: no message is of this"
    )
    assert refusal("show", folder.path, "--since", "2", "--until", "1") == "--since 2: this is not before --until 1"
    assert refusal("export", folder.path, "--parquet", tmp_path / "t", "--step", 1).startswith("--step 1: ")
    assert refusal("replay", folder.path, "--until", "head:1", "--verify").startswith("--verify and --until: ")


@pytest.mark.parametrize("number", ["-1", str(2**63)])
def test_a_number_that_no_trajectory_can_have_is_refused(folder: RunFolder, number: str) -> None:
    for command in (("show", folder.path, "--trajectory", number), ("story", folder.path, "--", number)):
        result = asked(*command)
        assert result.exit_code == 2
        assert "Invalid value for" in result.output


def test_a_line_of_metrics_that_is_damaged_is_named(folder: RunFolder, tmp_path: Path) -> None:
    changed = copy(folder, tmp_path)
    changed.metrics.write_bytes(b"{bad\n")
    assert refusal("diff", changed.path, folder.path).startswith(f"{changed.metrics}, line 1: JSON is malformed")


def test_a_damaged_log_is_named(folder: RunFolder, tmp_path: Path) -> None:
    changed = copy(folder, tmp_path)
    log = changed.events / f"{HEAD}.sqlite"
    log.write_bytes(b"this was an event log, " * 1000)
    for command in (("show",), ("story", 1), ("replay",), ("waits",), ("roc",), ("diff", folder.path)):
        name, *arguments = command
        assert refusal(name, changed.path, *arguments).startswith(f"{log}: cannot be read as an event log: ")


@pytest.mark.parametrize("frame", ["x'00'", "x'01ff'", "substr(frame, 1, length(frame) / 2)"])
def test_an_event_whose_bytes_are_damaged_is_named(folder: RunFolder, tmp_path: Path, frame: str) -> None:
    trajectory = a_trajectory_that_called(folder)
    change = f"UPDATE events SET frame = {frame} WHERE kind = 'CodeFinished' AND trajectory = {trajectory}"
    changed = copy(folder, tmp_path, change, process=ROLLOUT)
    event = next(read_events(folder.events / f"{ROLLOUT}.sqlite", kinds=["CodeFinished"], trajectory=trajectory))[0]
    for command in (
        ("show",),
        ("story", trajectory),
        ("replay",),
        ("waits",),
        ("diff", folder.path),
        ("diff", folder.path, "--exact"),
        ("export", "--parquet", tmp_path / "tables"),
        ("export", "--chrome", tmp_path / "trace.json"),
    ):
        name, *arguments = command
        said = refusal(name, changed.path, *arguments)
        assert said.startswith(f"{changed.events / ROLLOUT}.sqlite: event {event.seq} is damaged: "), said


@pytest.mark.parametrize("command", [("show",), ("story", 1), ("replay",), ("waits",), ("export",), ("roc",)])
def test_a_folder_that_holds_no_run_is_refused(tmp_path: Path, command: tuple[object, ...]) -> None:
    name, *arguments = command
    assert refusal(name, tmp_path, *arguments) == f"{tmp_path}: this is no run's folder (it has no config.toml)"
