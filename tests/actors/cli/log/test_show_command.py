"""`asterism log show` merges events by time, filters them, and follows a live log."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from asterism.actors.cli.log.show_command import follow_events, format_lines
from asterism.analysis.event_logs.describe import make_excerpt
from asterism.analysis.event_logs.merged_events import (
    ALL_EVENTS,
    EventFilter,
    MergedEvent,
    merge_events,
    parse_time,
    read_start_time,
)
from asterism.bus.event_log.writer import EventLog
from asterism.configs.errors import UnusableInput
from asterism.configs.run_folder import RunFolder
from tests.actors.cli.golden_text import assert_matches_golden
from tests.fakes import text_context
from tests.recorded import small_run

WORDS = text_context()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return small_run(RunFolder(tmp_path_factory.mktemp("run") / "small"), output="the sum is 4")


def shown(events: Iterator[MergedEvent], text: str = "") -> list[str]:
    return [line.plain for line in format_lines(events, WORDS, text, start_time=100.0)]


def test_events_of_all_processes_are_merged_by_time_one_per_line(folder: RunFolder) -> None:
    events = list(merge_events(folder))
    assert [event.event.time for event in events] == sorted(event.event.time for event in events)
    assert {event.process for event in events} == {"head", "rollout-0"}
    lines = shown(merge_events(folder))
    assert len(lines) == len(events)
    assert_matches_golden("show", "\n".join(lines))


def test_an_event_must_match_all_filters(folder: RunFolder) -> None:
    chosen = merge_events(
        folder, EventFilter(actor="rollout-0", kinds=("StartGroup", "TurnGenerated", "CodeFinished"), trajectory=7)
    )
    assert [each.event.kind for each in chosen] == ["StartGroup", "TurnGenerated", "CodeFinished", "TurnGenerated"]
    start = read_start_time(folder)
    early = list(merge_events(folder, EventFilter(since=start + 0.25, until=parse_time("1", start, "--until"))))
    assert [each.event.time - start for each in early] == [0.25, 0.5, 0.75]


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ('"code": "1"', {"TurnGenerated", "TrajectoryFinished"}),  # in generated text
        ("THE SUM IS", {"CodeFinished", "TrajectoryFinished"}),  # in tool output
        ("q:1", {"StartGroup"}),
        ("nowhere", set()),
    ],
)
def test_text_search_covers_generated_text_results_and_fields(folder: RunFolder, text: str, kinds: set[str]) -> None:
    found = shown(merge_events(folder), text)
    assert {line.split()[4] for line in found} == kinds
    assert all(text.casefold() in line.casefold() for line in found)


def test_an_excerpt_contains_the_search_text() -> None:
    text = "x" * 1000 + "needle" + "y" * 1000
    assert "needle" in make_excerpt(text, "Needle")
    assert len(make_excerpt(text, "needle")) < 250
    assert make_excerpt("a\nb") == "a⏎b"


def test_follow_yields_each_event_once_including_new_processes(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    logs = [EventLog(folder.events / "head.sqlite")]
    logs[0].append(1.0, "a", "b", "K", None, b"1")
    logs[0].close()
    events = follow_events(folder, ALL_EVENTS, poll_interval_s=0.0)
    assert next(events).name == "head:1"
    for name, number in (("head", 2), ("rollout-0", 1)):
        log = EventLog(folder.events / f"{name}.sqlite")
        log.append(float(number), "a", "b", "K", None, b"x")
        log.close()
    assert [each.name for each in islice(events, 2)] == ["rollout-0:1", "head:2"]


def test_times_are_seconds_since_the_start_or_dates() -> None:
    assert parse_time("12.5", 100.0, "--since") == 112.5
    assert parse_time("1970-01-02T00:00:00+00:00", 100.0, "--since") == 86_400.0
    for text in ("noon", "nan", "inf"):
        with pytest.raises(UnusableInput, match=f"^--since {text}: not a valid time; use seconds"):
            parse_time(text, 0.0, "--since")


def test_a_run_without_event_logs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnusableInput, match=r"no event logs; the run may have had log\.events = false"):
        list(merge_events(RunFolder(tmp_path)))
