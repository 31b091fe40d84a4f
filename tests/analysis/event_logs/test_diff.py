"""Two runs part where their contents do, not where their times, their order of arrival or their leases do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from actors import log_diff
from actors.log_diff import compare_runs
from analysis.event_logs.diff import differing, exact_parting, parting
from analysis.event_logs.telling import Words
from bus.codec import encode
from bus.event_log import EventLog
from bus.messages import (
    AnyMessage,
    CodeFinished,
    CodeOk,
    Envelope,
    Output,
    StartGroup,
    StepTrained,
    TurnGenerated,
    WeightsPublished,
)
from configs.run_folder import RunFolder
from configs.schema import Dialogue
from tests.fakes import PROMPT, TOKENIZER, generated
from tests.recorded import small_run

Said = tuple[str, AnyMessage]  # actor, message

START = StartGroup(0, "train", "q:1", "2", PROMPT, 2, 7, 1.0, 5)


def finished(call: int, output: str, duration_s: float = 0.01) -> CodeFinished:
    return CodeFinished(7, call, CodeOk(Output(output)), duration_s, "executor-0/1")


def a_run(path: Path, *said: Said, tick_s: float = 1.0) -> RunFolder:
    folder = RunFolder(path)
    log = EventLog(folder.events / "head.sqlite")
    for number, (actor, message) in enumerate(said):
        frame = encode(Envelope("x", f"head/{actor}", message))
        about = getattr(message, "trajectory_id", None)
        log.append(10.0 + number * tick_s, actor, "x", type(message).__name__, about, frame)
    log.close()
    return folder


def test_the_same_run_at_another_pace_does_not_part(tmp_path: Path) -> None:
    a, b = small_run(RunFolder(tmp_path / "a")), small_run(RunFolder(tmp_path / "b"), tick_s=0.5)
    assert parting(a, b) is None
    assert compare_runs(a, b, exact=False, console=Console(quiet=True)) == 0


def test_the_order_of_arrival_is_no_difference_but_an_exact_one(tmp_path: Path) -> None:
    said = [("r", START), ("r", generated(7, 0, "a")), ("r", generated(8, 0, "b"))]
    calls = [("r", finished(0, "x")), ("r", finished(1, "y"))]
    a = a_run(tmp_path / "a", *said, *calls)
    b = a_run(tmp_path / "b", said[0], said[2], said[1], *reversed(calls))
    assert parting(a, b) is None
    found = exact_parting(a, b)
    assert found is not None
    assert found.a is not None
    assert (found.of, found.a.logged, found.a.what) == ("head", "head:2", "TurnGenerated from x to head/r")


def test_a_turn_counts_as_a_whole_however_many_leases_it_took(tmp_path: Path) -> None:
    whole = generated(7, 0, "abcdef")
    first, second = generated(7, 0, "abc", finish="length"), generated(7, 0, "def", lease=2)
    a = a_run(tmp_path / "a", ("r", START), ("r", whole))
    assert parting(a, a_run(tmp_path / "b", ("r", START), ("r", first), ("r", second))) is None
    other = generated(7, 0, "dex", lease=2)
    found = parting(a, a_run(tmp_path / "c", ("r", START), ("r", first), ("r", other)))
    assert found is not None
    assert differing(found) == ["token_ids"]


def test_the_first_parting_in_the_time_of_run_a_is_told(tmp_path: Path) -> None:
    begin = [("r", START), ("r", generated(8, 0, "b")), ("r", generated(7, 0, "a"))]
    late = finished(0, "4")
    a = a_run(tmp_path / "a", *begin, ("r", late), ("recipe", StepTrained(1, {"loss": 0.5, "train_s": 1.0})))
    b = a_run(
        tmp_path / "b", *begin, ("r", finished(0, "5", 3.0)), ("recipe", StepTrained(1, {"loss": 0.25, "train_s": 9.0}))
    )
    found = parting(a, b)
    assert found is not None
    assert (found.of, found.at, differing(found)) == ("trajectory 7", 3.0, ["outcome"])
    c = a_run(tmp_path / "c", *begin, ("r", late), ("recipe", StepTrained(1, {"loss": 0.25, "train_s": 9.0})))
    found = parting(a, c)
    assert found is not None
    assert (found.of, found.at, differing(found)) == ("step 1", 4.0, ["metrics"])


def test_what_only_one_run_has_parts_them(tmp_path: Path) -> None:
    a = a_run(tmp_path / "a", ("r", START), ("r", generated(7, 0, "a")))
    b = a_run(tmp_path / "b", ("r", START))
    for one, other in ((a, b), (b, a)):
        found = parting(one, other)
        assert found is not None
        assert found.of == "trajectory 7"
        assert (found.a is None) == (one is b)


def test_a_trajectory_that_a_resumed_run_started_again_is_another_one(tmp_path: Path) -> None:
    a = a_run(tmp_path / "a", ("r", START), ("r", generated(7, 0, "a")), ("r", START), ("r", generated(7, 0, "a")))
    b = a_run(tmp_path / "b", ("r", START), ("r", generated(7, 0, "a")), ("r", START), ("r", generated(7, 0, "b")))
    found = parting(a, b)
    assert found is not None
    assert found.of == "trajectory 7, start 2"


def test_the_metrics_file_is_compared_without_its_times(tmp_path: Path) -> None:
    runs = [a_run(tmp_path / name, ("recipe", StepTrained(1, {}))) for name in "abc"]
    for run, reward, step_s in zip(runs, (0.5, 0.5, 0.25), (1.0, 2.0, 1.0), strict=True):
        run.metrics.write_text(json.dumps({"kind": "step", "step": 1, "reward": reward, "step_s": step_s}) + "\n")
    assert parting(runs[0], runs[1]) is None
    found = parting(runs[0], runs[2])
    assert found is not None
    assert (found.of, differing(found)) == ("metrics, step 1", ["reward"])


def test_an_exact_comparison_leaves_out_times_and_where_weights_lie_and_nothing_else(tmp_path: Path) -> None:
    a = a_run(tmp_path / "a", ("r", finished(0, "4", 1.0)), ("recipe", WeightsPublished(1, "/dev/shm/a", 5, "d")))
    b = a_run(
        tmp_path / "b", ("r", finished(0, "4", 2.0)), ("recipe", WeightsPublished(1, "/dev/shm/b", 5, "d")), tick_s=9
    )
    assert exact_parting(a, b) is None
    c = a_run(tmp_path / "c", ("r", finished(0, "4", 2.0)), ("recipe", WeightsPublished(1, "/dev/shm/b", 5, "e")))
    found = exact_parting(a, c)
    assert found is not None
    assert differing(found) == ["digest"]


def test_both_sides_are_shown_from_the_first_token_that_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_diff, "words_of", lambda _: Words(TOKENIZER, Dialogue()))
    turns: list[TurnGenerated] = [generated(7, 0, "the same, then this"), generated(7, 0, "the same, then that")]
    a, b = (a_run(tmp_path / name, ("r", START), ("r", turn)) for name, turn in zip("ab", turns, strict=True))
    console = Console(width=200)
    with console.capture() as captured:
        assert compare_runs(a, b, exact=False, console=console) == 1
    text = captured.get()
    assert "the runs part at trajectory 7, 1.0000 s after the beginning" in text
    assert "token_ids from place 17 on" in text
    assert "3 tokens: is<|im_end|>" in text
    assert "3 tokens: at<|im_end|>" in text
