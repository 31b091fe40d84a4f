"""`asterism log show`: all processes' events by time, filters that combine, and a live log that is followed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest

from actors.log_show import followed, lines
from analysis.event_logs.merging import EVERYTHING, Choice, Logged, began_at, merged, moment
from analysis.event_logs.telling import Words, excerpt
from bus.event_log import EventLog
from configs.errors import UnusableInput
from configs.run_folder import RunFolder
from configs.schema import Dialogue
from tests.fakes import TOKENIZER
from tests.recorded import small_run

WORDS = Words(TOKENIZER, Dialogue())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    return small_run(RunFolder(tmp_path_factory.mktemp("run") / "small"), output="the sum is 4")


def shown(events: Iterator[Logged], text: str = "") -> list[str]:
    return [re.sub(r"\[/?[a-z]*\]", "", line) for line in lines(events, WORDS, text, began=100.0)]


def test_events_of_all_processes_come_in_the_order_of_time_with_their_names(folder: RunFolder) -> None:
    events = list(merged(folder))
    assert [event.event.time for event in events] == sorted(event.event.time for event in events)
    assert {event.process for event in events} == {"head", "rollout-0"}
    assert shown(merged(folder))[0].split() == [
        "0.2500",
        "s",
        "head:1",
        "arbiter",
        "RunStarted",
        "from",
        "head",
        "step",
        "0,",
        "cursor",
        "BufferCursor(position=0,",
        "next_group_id=0,",
        "next_trajectory_id=0,",
        "pending=())",
    ]


def test_each_event_is_one_line_whatever_is_in_it(folder: RunFolder) -> None:
    told = shown(merged(folder))
    assert len(told) == len(list(merged(folder)))
    assert all("\n" not in line for line in told)
    called = next(line for line in told if "TurnGenerated" in line and "jupyter_code" in line)
    assert "trajectory 7: turn 0" in called
    assert "<tool_call>⏎{" in called


def test_filters_combine(folder: RunFolder) -> None:
    chosen = merged(
        folder, Choice(actor="rollout-0", kinds=("StartGroup", "TurnGenerated", "CodeFinished"), trajectory=7)
    )
    assert [each.event.kind for each in chosen] == ["StartGroup", "TurnGenerated", "CodeFinished", "TurnGenerated"]
    began = began_at(folder)
    early = list(merged(folder, Choice(since=began + 0.25, until=moment("1", began, "--until"))))
    assert [each.event.time - began for each in early] == [0.25, 0.5, 0.75]


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ('"code": "1"', {"TurnGenerated", "TrajectoryFinished"}),  # what the model wrote
        ("THE SUM IS", {"CodeFinished", "TrajectoryFinished"}),  # what a tool printed
        ("q:1", {"StartGroup"}),
        ("nowhere", set()),
    ],
)
def test_a_text_is_found_wherever_it_stands(folder: RunFolder, text: str, kinds: set[str]) -> None:
    found = shown(merged(folder), text)
    assert {line.split()[4] for line in found} == kinds
    assert all(text.casefold() in line.casefold() for line in found)  # and each line shows it


def test_a_long_text_is_cut_around_what_was_searched_for() -> None:
    text = "x" * 1000 + "needle" + "y" * 1000
    assert "needle" in excerpt(text, "Needle")
    assert len(excerpt(text, "needle")) < 250
    assert excerpt("a\nb") == "a⏎b"


def test_a_log_is_followed_without_gaps_or_repetition_also_into_a_new_process(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    logs = [EventLog(folder.events / "head.sqlite")]
    logs[0].append(1.0, "a", "b", "K", None, b"1")
    logs[0].close()
    events = followed(folder, EVERYTHING, looks_every_s=0.0)
    assert next(events).name == "head:1"
    for name, number in (("head", 2), ("rollout-0", 1)):
        log = EventLog(folder.events / f"{name}.sqlite")
        log.append(float(number), "a", "b", "K", None, b"x")
        log.close()
    assert [each.name for each in islice(events, 2)] == ["rollout-0:1", "head:2"]


def test_a_moment_is_seconds_since_the_beginning_or_a_date() -> None:
    assert moment("12.5", 100.0, "--since") == 112.5
    assert moment("1970-01-02T00:00:00+00:00", 100.0, "--since") == 86_400.0
    for text in ("noon", "nan", "inf"):
        with pytest.raises(UnusableInput, match=f"^--since {text}: this is no time: give seconds"):
            moment(text, 0.0, "--since")


def test_a_run_without_event_logs_says_so(tmp_path: Path) -> None:
    with pytest.raises(UnusableInput, match=r"there are no event logs; was the run started with log.events = false"):
        list(merged(RunFolder(tmp_path)))
