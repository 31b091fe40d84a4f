"""Exported Parquet tables are complete, and exported traces are valid for Perfetto."""

import math
from pathlib import Path

import msgspec
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asterism.analysis.event_logs import parquet_tables
from asterism.analysis.event_logs.merged_events import merge_events
from asterism.analysis.event_logs.parquet_tables import write_parquet
from asterism.analysis.event_logs.perfetto import write_chrome_trace
from asterism.analysis.event_logs.spans import LEARNER, STEPS, TRAJECTORIES, TraceSpan, build_spans, select_step
from asterism.bus import messages as msg
from asterism.bus.messages.run import BufferCursor
from asterism.configs.errors import UnusableInput
from asterism.configs.run_folder import RunFolder
from tests.fakes import CALL, start_group
from tests.recorded import Recording, small_run
from tests.traces import checked_slices


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return small_run(RunFolder(tmp_path_factory.mktemp("run") / "small"))


@pytest.fixture(scope="module")
def stepped(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """Record two steps of one group each. The log ends before the trajectories of the second step end."""
    folder = RunFolder(tmp_path_factory.mktemp("run") / "stepped")
    recording = Recording(folder)
    recording.begin()
    for step in (1, 2):
        recording.tell("head/buffer", msg.StepRequested(step, step - 1), "head/recipe")
        start = start_group(2, 10 * step, group_id=step, problem=f"q:{step}")
        recording.tell("rollout-0", start, "head/buffer")
        if step == 1:
            recording.work({(10, 0): CALL, (11, 0): CALL})
            collected = msg.StepCollected(1, 2, msg.StepCounts(), {}, BufferCursor())
            recording.tell("head/recipe", collected, "head/buffer")
            recording.tell("head/recipe", msg.StepTrained(1, {}), "learner")
            recording.tell("head/recipe", msg.WeightsLoaded("generator-0", 1, 0.1), "generator-0")
    recording.close()
    return folder


def test_the_events_table_has_a_row_per_event(
    folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet_tables, "EVENTS_PER_PART", 7)
    rows = write_parquet(folder, tmp_path)
    assert len(list((tmp_path / "events").glob("*.parquet"))) > 1
    events = pl.read_parquet(tmp_path / "events")
    logged = list(merge_events(folder))
    assert rows["events"] == events.height == len(logged)
    assert events["seq"].to_list() == [each.event.seq for each in logged]
    assert events["process"].to_list() == [each.process for each in logged]
    (called,) = events.filter(pl.col("kind") == "CodeFinished").iter_rows(named=True)
    message = msgspec.json.decode(called["message"])
    assert (called["trajectory"], message["call"], message["executor"]) == (7, 0, "executor-0/1")
    assert message["outcome"]["is"] == msg.CodeOk.__name__
    assert message["outcome"]["output"]["stdout"] == "4"
    assert "token_ids" not in "".join(events["message"])


def test_the_trajectories_table_has_tokens_and_ends(folder: RunFolder, tmp_path: Path) -> None:
    write_parquet(folder, tmp_path)
    rows = {row["trajectory_id"]: row for row in pl.read_parquet(tmp_path / "trajectories").iter_rows(named=True)}
    ends = [each.envelope.message for each in merge_events(folder) if each.event.kind == "TrajectoryFinished"]
    assert sorted(rows) == [7, 8]
    for end in ends:
        assert isinstance(end, msg.TrajectoryFinished)
        row = rows[end.trajectory_id]
        assert row["token_ids"] == msg.bytes_to_ids(end.record.token_ids)
        assert row["loss_mask"] == list(end.record.loss_mask)
        assert set(row["logprobs"]) == {0.0, -1.0}
        assert set(row["versions"]) == {-1, 3}
        assert (row["ended"], row["reward"], row["ending"], row["problem"]) == ("finished", 1.0, "answered", "q:1")
        assert row["tools_s"] == end.tools_s
    assert (rows[7]["calls"], rows[8]["calls"]) == (1, 0)


def test_a_failed_trajectory_has_a_cause_and_no_tokens(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    recording = Recording(folder)
    recording.tell("head/buffer", msg.TrajectoryFailed(7, 0, "sandbox: gone"), "rollout-0")
    recording.close()
    write_parquet(folder, tmp_path / "out")
    (row,) = pl.read_parquet(tmp_path / "out" / "trajectories").iter_rows(named=True)
    assert (row["ended"], row["cause"], row["token_ids"], row["reward"]) == ("failed", "sandbox: gone", None, None)


def test_existing_tables_are_replaced(folder: RunFolder, tmp_path: Path) -> None:
    (tmp_path / "events").mkdir()
    pl.DataFrame({"other": [1]}).write_parquet(tmp_path / "events" / "00007.parquet")
    rows = write_parquet(folder, tmp_path)
    assert pl.read_parquet(tmp_path / "events").height == rows["events"]


def test_a_track_contains_the_phases_of_a_trajectory(folder: RunFolder, tmp_path: Path) -> None:
    write_chrome_trace(build_spans(folder), tmp_path / "trace.json")
    tracks = checked_slices(tmp_path / "trace.json")
    lanes = [each for name, each in tracks.items() if name.startswith("trajectories/")]
    (track,) = [each for each in lanes if any(name.startswith("trajectory 7 ") for name, *_ in each)]
    track = sorted(track, key=lambda each: each[1:])
    phases = [name for name, _, _, depth in track if depth == 1]
    assert phases == ["leasing", "generating turn 0", "calling in turn 0", "leasing", "generating turn 1", "grading"]
    (whole,) = [each for each in track if each[3] == 0]
    assert whole[0] == "trajectory 7 on q:1: answered, reward 1"
    inside = [each for each in track if each[3] == 1]
    assert [end for _, _, end, _ in inside[:-1]] == [begin for _, begin, _, _ in inside[1:]]  # no gaps
    assert inside[0][1] == whole[1]


@pytest.mark.parametrize("live", [1, 3, 8])
def test_a_trace_has_a_track_for_each_concurrent_trajectory(tmp_path: Path, live: int) -> None:
    """There are 400 trajectories with two phases each; `live` trajectories exist at the same time."""
    spans: list[TraceSpan] = []
    for number in range(400):
        start_s = 2.0 * (number // live)
        spans += [
            TraceSpan(TRAJECTORIES, start_s, start_s + 2, f"trajectory {number}", number),
            TraceSpan(TRAJECTORIES, start_s, start_s + 1, "leasing", number),
            TraceSpan(TRAJECTORIES, start_s + 1, start_s + 2, "generating", number),
        ]
    write_chrome_trace(spans, tmp_path / "trace.json")
    tracks = checked_slices(tmp_path / "trace.json")
    assert len(tracks) == live
    shown = [name for each in tracks.values() for name, *_ in each if name.startswith("trajectory")]
    assert sorted(shown) == sorted(f"trajectory {number}" for number in range(400))
    for each in tracks.values():
        assert {name: depth for name, _, _, depth in each if not name.startswith("t")} == {
            "leasing": 1,
            "generating": 1,
        }


def test_tables_can_be_limited_to_a_time(folder: RunFolder, tmp_path: Path) -> None:
    whole = write_parquet(folder, tmp_path / "whole")
    events = pl.read_parquet(tmp_path / "whole" / "events")
    half_s = events["since_start_s"].max() / 2  # pyright: ignore
    first = write_parquet(folder, tmp_path / "first", (0.0, half_s))
    second = write_parquet(folder, tmp_path / "second", (half_s, math.inf))
    assert first["events"] + second["events"] == whole["events"]
    assert first["trajectories"] + second["trajectories"] == whole["trajectories"]
    assert pl.read_parquet(tmp_path / "first" / "events")["since_start_s"].max() < half_s  # pyright: ignore
    assert 0 < first["events"] < whole["events"]


def test_turns_and_calls_are_on_the_tracks_of_their_workers(folder: RunFolder, tmp_path: Path) -> None:
    write_chrome_trace(build_spans(folder), tmp_path / "trace.json")
    tracks = checked_slices(tmp_path / "trace.json")
    turns = [name for track, each in tracks.items() if track.startswith("generator-0/") for name, *_ in each]
    assert sorted(turns) == ["trajectory 7, turn 0", "trajectory 7, turn 1", "trajectory 8, turn 0"]
    calls = [name for track, each in tracks.items() if track.startswith("executor-0/1/") for name, *_ in each]
    assert sorted(calls) == ["trajectory 7, call 0", "trajectory 7, grading", "trajectory 8, grading"]


def test_a_trace_can_be_limited_to_one_step(stepped: RunFolder, tmp_path: Path) -> None:
    slices = build_spans(stepped)
    (step,) = [each for each in slices if each.track == STEPS]
    (learner,) = [each for each in slices if each.track == LEARNER]
    assert (step.name, learner.name) == ("step 1", "step 1")
    assert step.start_s < learner.start_s < learner.end_s < step.end_s
    cut = select_step(slices, 1)
    assert {each.trajectory for each in cut} == {None, 10, 11}
    assert {each.trajectory for each in slices} == {None, 10, 11, 20, 21}
    write_chrome_trace(cut, tmp_path / "trace.json")
    assert "steps/steps #0" in checked_slices(tmp_path / "trace.json")
    with pytest.raises(UnusableInput, match="no completed step 2"):
        select_step(slices, 2)


def test_unfinished_trajectories_end_with_the_log(stepped: RunFolder) -> None:
    last = max(each.end_s for each in build_spans(stepped))
    unfinished = [each for each in build_spans(stepped) if each.name.endswith("unfinished")]
    assert {each.trajectory for each in unfinished} == {20, 21}
    assert all(each.end_s == last for each in unfinished)


slices = st.lists(
    st.builds(lambda a, long, n: TraceSpan("generator-0", a, a + long, f"s{n}"), *[st.integers(1, 30)] * 3)
)


@given(slices)
def test_overlapping_spans_have_separate_tracks(
    tmp_path_factory: pytest.TempPathFactory, slices: list[TraceSpan]
) -> None:
    file = tmp_path_factory.mktemp("trace") / "trace.json"
    write_chrome_trace(slices, file)
    drawn = [each for track in checked_slices(file).values() for each in track]
    assert sorted(drawn) == sorted((each.name, each.start_s * 1e6, each.end_s * 1e6, 0) for each in slices)
