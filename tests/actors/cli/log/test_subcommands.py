"""The `asterism log` subcommands read the log of a simulated run, and refuse unusable arguments."""

import json
import re
import shutil
import time
from pathlib import Path

import polars as pl
import pytest
from rich.console import Console

from asterism.actors.cli.log import diff_command, replay_command, show_command, subcommands, waits_command
from asterism.actors.replay import replay
from asterism.analysis.event_logs.merged_events import merge_events
from asterism.bus.addresses import HEAD, ROLLOUT
from asterism.bus.codec import decode
from asterism.bus.event_log.reader import read_events
from asterism.bus.messages import BatchReady, CodeFinished
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.run_config import RunConfig
from asterism.policies.decider import Decider
from tests.actors.cli.invoking import invoke, read_output, read_refusal
from tests.edited_logs import editing_log
from tests.fakes import text_context
from tests.recorded import write_world_logs
from tests.simulation.test_faults import live
from tests.simulation.world import World
from tests.traces import checked_slices

SEED = 0  # with this seed the step is synchronous


@pytest.fixture(scope="module")
def world() -> World:
    return live(SEED)


@pytest.fixture(scope="module")
def recorded(world: World, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return write_world_logs(world, tmp_path_factory.mktemp("run"))


@pytest.fixture
def folder(recorded: RunFolder, world: World, monkeypatch: pytest.MonkeyPatch) -> RunFolder:
    """Return the recorded run. Commands on it use the deciders and tokenizer of `world`, and a wide console."""

    def build_world_deciders(process: str, run: RunConfig, folder: RunFolder) -> dict[str, Decider]:
        return dict(world.deciders()[process])

    for module in (replay, waits_command, replay_command):
        monkeypatch.setattr(module, "build_deciders", build_world_deciders)
    for module in (show_command, diff_command):
        monkeypatch.setattr(module, "load_text_context", lambda folder: text_context())
    monkeypatch.setattr(subcommands, "make_console", lambda: Console(width=200, emoji=False))
    return recorded


def log(*arguments: object) -> str:
    return read_output("log", *arguments)


def refusal(*arguments: object) -> str:
    return read_refusal("log", *arguments)


def copy(folder: RunFolder, path: Path, *sql: str, process: str = HEAD) -> RunFolder:
    """Copy the logs, and execute SQL statements in the log of `process`."""
    other = RunFolder(path / "copy")
    shutil.copytree(folder.events, other.events)
    shutil.copy(folder.config, other.config)
    with editing_log(other.events / f"{process}.sqlite") as connection:
        for statement in sql:
            connection.execute(statement)
    return other


UNFINISHED = "DELETE FROM events WHERE kind = 'RunFinished'"  # `log waits` does not replay a finished run


def find_calling_trajectory(folder: RunFolder) -> int:
    events = read_events(folder.events / f"{ROLLOUT}.sqlite", kinds=["CodeFinished"])
    return next(event.trajectory for event, _ in events if event.trajectory is not None)


# ---------------------------------------------------------------- show, story


@pytest.mark.slow
def test_show_prints_one_line_per_event_up_to_the_limit(folder: RunFolder) -> None:
    assert len(log("show", folder.path).splitlines()) == sum(1 for _ in merge_events(folder))
    shown = log("show", folder.path, "--kind", "CodeFinished", "--actor", ROLLOUT, "--limit", 3).splitlines()
    assert len(shown) == 3
    assert all(" CodeFinished  from executor-" in line for line in shown)


@pytest.mark.slow
def test_show_filters_by_seconds_since_the_start(folder: RunFolder) -> None:
    seconds = [
        float(line.split()[0]) for line in log("show", folder.path, "--since", "0.5", "--until", "1").splitlines()
    ]
    assert seconds
    assert 0.5 <= min(seconds) <= max(seconds) < 1


@pytest.mark.slow
def test_a_story_is_in_order_of_time(folder: RunFolder) -> None:
    story = log("story", folder.path, find_calling_trajectory(folder))
    lines = re.findall(r"^ *(\d+\.\d{4}) s  \S+ +(\w+)", story, re.MULTILINE)
    kinds = [kind for _, kind in lines]
    assert [float(second) for second, _ in lines] == sorted(float(second) for second, _ in lines)
    assert kinds[0] == "StartGroup"
    assert {"LeaseGranted", "TurnGenerated", "CodeFinished"} < set(kinds)


def test_the_console_does_not_replace_emoji_codes() -> None:
    console = subcommands.make_console()
    with console.capture() as captured:
        console.print(r"x\[:100:2]")
    assert captured.get() == "x[:100:2]\n"


# ---------------------------------------------------------------- replay


def test_an_identical_replay_is_reported(folder: RunFolder) -> None:
    events = sum(1 for _ in merge_events(folder))
    assert log("replay", folder.path, "--verify") == f"{events:,} events replayed: states and effects are identical\n"


@pytest.mark.parametrize(("process", "field"), [(HEAD, "state"), (ROLLOUT, "effects")])
def test_a_difference_is_an_error_only_with_verify(folder: RunFolder, tmp_path: Path, process: str, field: str) -> None:
    logged = list(read_events(folder.events / f"{process}.sqlite"))
    last = max(event.seq for event, decision in logged if decision and getattr(decision, field))
    change = f"UPDATE decisions SET {field} = x'00' WHERE seq = {last}"
    changed = copy(folder, tmp_path, change, process=process)
    verified = invoke("log", "replay", changed.path, "--verify")
    assert verified.exit_code == 1
    assert re.match(rf"event {last} of {process} .*: the {field} differ", verified.output.replace("\n", " "))
    assert invoke("log", "replay", changed.path).exit_code == 0


def test_a_log_without_its_beginning_is_not_replayed(folder: RunFolder, tmp_path: Path) -> None:
    changed = copy(folder, tmp_path, "INSERT INTO gone VALUES (6, 9, 'LeaseRequested', 4)")
    head = sum(1 for _ in read_events(folder.events / f"{HEAD}.sqlite"))
    assert f"{head:,} events not replayed: log.keep_steps" in log("replay", changed.path)


@pytest.mark.parametrize("command", ["replay", "waits"])
def test_a_run_without_one_of_its_event_logs_is_refused(folder: RunFolder, tmp_path: Path, command: str) -> None:
    changed = copy(folder, tmp_path, UNFINISHED)
    (changed.events / f"{ROLLOUT}.sqlite").unlink()
    assert "log.events = false" in refusal(command, changed.path)


@pytest.mark.parametrize("command", ["replay", "waits"])
def test_a_state_that_depends_on_removed_events_is_refused(folder: RunFolder, tmp_path: Path, command: str) -> None:
    changed = copy(folder, tmp_path, "INSERT INTO gone VALUES (6, 9, 'LeaseRequested', 4)", UNFINISHED)
    options = ("--until", f"{ROLLOUT}:9", "--state", "buffer") if command == "replay" else ()
    assert "log.keep_steps has removed events up to number 9" in refusal(command, changed.path, *options)


def test_the_state_of_the_receiver_is_printed_unless_another_actor_is_named(folder: RunFolder) -> None:
    trajectory = find_calling_trajectory(folder)
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


# ---------------------------------------------------------------- waits


def test_waits_name_the_process_that_an_actor_waits_for(folder: RunFolder, tmp_path: Path) -> None:
    """The logs end during a tool call of the first step."""
    requested = next(event.time for event, _ in read_events(folder.events / f"{HEAD}.sqlite", kinds=["StepRequested"]))
    calls = read_events(folder.events / f"{ROLLOUT}.sqlite", kinds=["CodeFinished"])
    end = next(event for event, _ in calls if event.time > requested)
    later = f"DELETE FROM events WHERE time >= {end.time!r}"
    stopped = copy(copy(folder, tmp_path / "head", later), tmp_path, later, process=ROLLOUT)
    called = decode(end.frame).message
    assert isinstance(called, CodeFinished)
    lines = log_waits(stopped)
    (calling,) = [line for line in lines if f" wait for {called.executor}: a tool call, since " in line]
    assert str(called.trajectory_id) in re.findall(r"\d+", calling.partition(" wait")[0])
    (buffer,) = [line for line in lines if line.startswith("head/buffer")]
    assert re.match(r"head/buffer waits for rollout-0: \d+ groups of step 1, \d+ trajectories, since ", buffer)


def log_waits(folder: RunFolder) -> list[str]:
    return log("waits", folder.path).splitlines()


def test_no_actor_waits_in_a_finished_run(folder: RunFolder) -> None:
    ended = next(event.time for event, _ in read_events(folder.events / f"{HEAD}.sqlite", kinds=["RunFinished"]))
    clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(ended))
    assert log_waits(folder) == [f"no actor waits; the run ended at {clock}"]


def test_an_untrained_batch_is_reported_as_a_wait_for_the_learner(folder: RunFolder, tmp_path: Path) -> None:
    sent = next(
        event.time
        for event, _, done in replay.redecide_all(
            folder.events / f"{HEAD}.sqlite", replay.build_deciders(HEAD, RunConfig("x"), folder), since=1
        )
        if any(isinstance(batch, BatchReady) for batch in replay.list_batches(done))
    )
    stopped = copy(folder, tmp_path, f"DELETE FROM events WHERE time > {sent!r}")
    (learner,) = [line for line in log_waits(stopped) if line.startswith("head/recipe waits for learner")]
    assert "step 1, since " in learner


def test_the_recipe_first_waits_for_a_generator_and_the_weights(folder: RunFolder, tmp_path: Path) -> None:
    stopped = copy(
        folder, tmp_path, "DELETE FROM events WHERE kind IN ('EngineJoined', 'WeightsPublished')", UNFINISHED
    )
    waits = [line.partition(", since")[0] for line in log_waits(stopped)]
    assert "head/recipe waits for a generator: none has joined" in waits
    assert "head/recipe waits for learner: the cold start, or its checkpoint" in waits


# ---------------------------------------------------------------- diff, export, roc


@pytest.mark.slow
def test_a_run_does_not_diverge_from_itself(folder: RunFolder, tmp_path: Path) -> None:
    same = copy(folder, tmp_path)
    assert "identical, apart from times: every trajectory, step" in log("diff", folder.path, same.path)
    assert "identical, apart from times: every event of every process" in log("diff", folder.path, same.path, "--exact")


@pytest.mark.slow
def test_diverging_runs_exit_with_1(folder: RunFolder, tmp_path: Path) -> None:
    other = write_world_logs(live(SEED + 1), tmp_path / "other")
    result = invoke("log", "diff", folder.path, other.path)
    assert result.exit_code == 1
    assert "the runs diverge at " in result.output
    assert invoke("log", "diff", folder.path, other.path, "--exact").exit_code == 1


@pytest.mark.slow
def test_export_writes_the_requested_files(folder: RunFolder, tmp_path: Path) -> None:
    tables, trace = tmp_path / "new" / "tables", tmp_path / "other" / "new" / "trace.json"
    output = log("export", folder.path, "--parquet", tables, "--chrome", trace)
    events = pl.read_parquet(tables / "events").height
    assert events == sum(1 for _ in merge_events(folder))
    assert f"{tables / 'events'}: {events:,} rows" in output
    whole = sum(map(len, checked_slices(trace).values()))
    log("export", folder.path, "--chrome", trace, "--step", 1)
    assert 0 < sum(map(len, checked_slices(trace).values())) < whole


def test_roc_counts_the_trajectories_kept_with_other_settings(folder: RunFolder, tmp_path: Path) -> None:
    file = tmp_path / "roc.json"
    printed = log("roc", folder.path, "--json", file)
    result = json.loads(file.read_text())
    assert "filtered again with the run's own settings" in printed
    kept = result["all_steps"]["run"]["trajectories"]
    assert printed.splitlines()[1:] == [
        f"nothing changes: 2 steps keep the same {kept} trajectories; use --set, such as --set roc.penalty=release"
    ]
    assert result["all_steps"]["run"] == result["all_steps"]["other"]
    log("roc", folder.path, "--set", "roc.enabled=false", "--json", file)
    result = json.loads(file.read_text())
    assert result["settings"] == ["roc.enabled: true -> false"]
    assert result["all_steps"]["other"]["trajectories"] > result["all_steps"]["run"]["trajectories"]


def test_roc_reads_the_later_of_two_launches(folder: RunFolder, world: World, tmp_path: Path) -> None:
    twice = write_world_logs(world, tmp_path / "twice", launches=2)
    results = [tmp_path / "once.json", tmp_path / "twice.json"]
    for run, file in zip((folder, twice), results, strict=True):
        log("roc", run.path, "--set", "roc.enabled=false", "--json", file)
    once, again = (json.loads(file.read_text()) for file in results)
    assert once["steps"] == again["steps"]
    assert [step["step"] for step in once["steps"]] == [batch.step for batch in world.batches]


def test_roc_lists_removed_and_added_trajectories_by_group(folder: RunFolder, tmp_path: Path) -> None:
    file = tmp_path / "roc.json"
    printed = log("roc", folder.path, "--set", "roc.enabled=false", "--step", 1, "--json", file)
    (step,) = json.loads(file.read_text())["steps"]
    members = step["trajectories"]
    added = {e["trajectory_id"] for e in members if e["advantage"] is None and e["other_advantage"] is not None}
    removed = {e["trajectory_id"] for e in members if e["advantage"] is not None and e["other_advantage"] is None}
    assert added
    named = re.findall(r"^group \d+: (?:without ([\d, ]+))?(?:, )?(?:with ([\d, ]+))?$", printed, re.MULTILINE)
    assert {int(number) for without, _ in named for number in re.findall(r"\d+", without)} == removed
    assert {int(number) for _, with_ in named for number in re.findall(r"\d+", with_)} == added


REFUSALS = [
    (("replay", "--until", "head:3", "--state", "bufer"), "--state bufer: unknown actor; this run has "),
    (("replay", "--until", "head:3", "--trajectory", "1"), "--trajectory 1: only a rollout process has trajectories"),
    (("replay", "--state", "buffer"), "--state and --trajectory need --until"),
    (("replay", "--until", "head:1", "--verify"), "--verify and --until: "),
    (("show", "--kind", "TurnGenerate"), "--kind TurnGenerate: unknown event kind; did you mean"),
    (("show", "--since", "2", "--until", "1"), "--since 2: must be before --until 1"),
    (("export",), "nothing to export: use --parquet FOLDER, --chrome FILE, or both"),
    (("export", "--parquet", "{tmp}/tables", "--step", "99"), "--step 99: the logs have no completed step 99"),
    (("export", "--chrome", "{tmp}/trace.json", "--step", "99"), "--step 99: the logs have no completed step 99"),
    (("export", "--chrome", "{tmp}/file/trace.json"), "{tmp}/file: File exists"),
    (("export", "--parquet", "{tmp}/file"), "{tmp}/file/events: Not a directory"),
    (("roc", "--step", "first"), "--step first: must be a step number or"),
    (("roc", "--step", "99"), "--step 99: {run} has steps 1 to 2"),
    (("roc", "--set", "rl.prompts=9"), "--set rl.prompts: cannot be changed for a finished run; only roc.* can"),
    (("roc", "--json", "{tmp}/none/roc.json"), "--json {tmp}/none/roc.json: the folder {tmp}/none does not exist"),
    (("roc", "--json", "{tmp}"), "--json {tmp}: is a folder; name a file"),
]


@pytest.mark.parametrize(("arguments", "error"), REFUSALS)
def test_invalid_arguments_are_named(folder: RunFolder, tmp_path: Path, arguments: tuple[str, ...], error: str) -> None:
    (tmp_path / "file").touch()
    command, *options = (argument.format(tmp=tmp_path) for argument in arguments)
    assert refusal(command, folder.path, *options).startswith(error.format(tmp=tmp_path, run=folder.path))


@pytest.mark.parametrize("number", ["-1", str(2**63)])
def test_an_impossible_trajectory_id_is_refused(folder: RunFolder, number: str) -> None:
    for command in (("show", folder.path, "--trajectory", number), ("story", folder.path, "--", number)):
        result = invoke("log", *command)
        assert result.exit_code == 2
        assert "Invalid value for" in result.output


def test_a_damaged_metrics_line_is_named(folder: RunFolder, tmp_path: Path) -> None:
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


@pytest.mark.slow
@pytest.mark.parametrize("frame", ["x'00'", "x'01ff'", "substr(frame, 1, length(frame) / 2)"])
def test_a_damaged_event_is_named(folder: RunFolder, tmp_path: Path, frame: str) -> None:
    trajectory = find_calling_trajectory(folder)
    change = f"UPDATE events SET frame = {frame} WHERE kind = 'CodeFinished' AND trajectory = {trajectory}"
    changed = copy(folder, tmp_path, change, process=ROLLOUT)
    event = next(read_events(folder.events / f"{ROLLOUT}.sqlite", kinds=["CodeFinished"], trajectory=trajectory))[0]
    for command in (
        ("show",),
        ("story", trajectory),
        ("replay",),
        ("diff", folder.path),
        ("diff", folder.path, "--exact"),
        ("export", "--parquet", tmp_path / "tables"),
        ("export", "--chrome", tmp_path / "trace.json"),
    ):
        name, *arguments = command
        error = refusal(name, changed.path, *arguments)
        assert error.startswith(f"{changed.events / ROLLOUT}.sqlite: event {event.seq} is damaged: "), error
    unfinished = copy(changed, tmp_path / "unfinished", UNFINISHED)
    assert f"event {event.seq} is damaged: " in refusal("waits", unfinished.path)


@pytest.mark.parametrize("command", [("show",), ("story", 1), ("replay",), ("waits",), ("export",), ("roc",)])
def test_a_folder_without_a_run_is_refused(tmp_path: Path, command: tuple[object, ...]) -> None:
    name, *arguments = command
    assert refusal(name, tmp_path, *arguments) == f"{tmp_path}: not a run folder (it has no config.toml)"
    (tmp_path / "stages.json").write_text('{"stages": ["short"]}')
    expected = f"{tmp_path}: has several stages; name one of them: none has begun"
    assert refusal(name, tmp_path, *arguments) == expected
