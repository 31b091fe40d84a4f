"""Different contents are a divergence of two runs. Times, order of arrival and leases are not."""

import json
from pathlib import Path

import pytest
from hypothesis import given, strategies
from rich.console import Console

from asterism.actors.cli.log import diff_command
from asterism.actors.cli.log.diff_command import compare_runs
from asterism.analysis.event_logs import diff
from asterism.analysis.event_logs.comparable_events import ComparableEvent, EventStreams
from asterism.analysis.event_logs.diff import (
    RunDivergence,
    find_first_divergence,
    list_differing_fields,
    list_divergences,
)
from asterism.bus import messages as msg
from asterism.bus.codec import encode
from asterism.bus.event_log.writer import EventLog
from asterism.configs.load import write_resolved
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.algorithm import SftConfig
from asterism.configs.schema.run_config import RunConfig
from tests.consoles import capture
from tests.fakes import generated, start_group, text_context
from tests.recorded import small_run

Received = tuple[str, msg.AnyMessage]  # pairs of actor and message

START = start_group(2)


def finished(call: int, output: str, duration_s: float = 0.01) -> msg.CodeFinished:
    return msg.CodeFinished(7, call, msg.CodeOk(msg.Output(output)), duration_s, "executor-0/1")


def a_run(path: Path, *received: Received, tick_s: float = 1.0) -> RunFolder:
    folder = RunFolder(path)
    log = EventLog(folder.events / "head.sqlite")
    for number, (actor, message) in enumerate(received):
        frame = encode(msg.Envelope("x", f"head/{actor}", message))
        about = getattr(message, "trajectory_id", None)
        log.append(10.0 + number * tick_s, actor, "x", type(message).__name__, about, frame)
    log.close()
    return folder


def find(a: RunFolder, b: RunFolder, *, exact: bool = False) -> RunDivergence:
    found = find_first_divergence(a, b, exact=exact)
    assert found is not None
    return found


def test_timing_is_not_a_divergence(tmp_path: Path) -> None:
    a, b = small_run(RunFolder(tmp_path / "a")), small_run(RunFolder(tmp_path / "b"), tick_s=0.5)
    assert find_first_divergence(a, b) is None
    assert compare_runs(a, b, exact=False, console=Console(quiet=True)) == 0


def test_the_order_of_arrival_is_only_an_exact_divergence(tmp_path: Path) -> None:
    messages = [("r", START), ("r", generated(7, 0, "a")), ("r", generated(8, 0, "b"))]
    calls = [("r", finished(0, "x")), ("r", finished(1, "y"))]
    a = a_run(tmp_path / "a", *messages, *calls)
    b = a_run(tmp_path / "b", messages[0], messages[2], messages[1], *reversed(calls))
    assert find_first_divergence(a, b) is None
    found = find(a, b, exact=True)
    assert found.a is not None
    assert (found.stream, found.a.source, found.a.label) == ("head", "head:2", "TurnGenerated from x to head/r")


def test_a_turn_over_several_leases_is_compared_as_one(tmp_path: Path) -> None:
    whole = generated(7, 0, "abcdef")
    first, second = generated(7, 0, "abc", finish="length"), generated(7, 0, "def", lease=2)
    a = a_run(tmp_path / "a", ("r", START), ("r", whole))
    assert find_first_divergence(a, a_run(tmp_path / "b", ("r", START), ("r", first), ("r", second))) is None
    other = generated(7, 0, "dex", lease=2)
    found = find(a, a_run(tmp_path / "c", ("r", START), ("r", first), ("r", other)))
    assert list_differing_fields(found) == ["token_ids"]


def compare_streams(a: EventStreams, b: EventStreams) -> list[RunDivergence]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(diff, "read_event_streams", lambda folder: {"a": a, "b": b}[folder.path.name])  # pyright: ignore
        return list_divergences(RunFolder(Path("a")), RunFolder(Path("b")))


def make_events(*events: tuple[float, str]) -> list[ComparableEvent]:
    return [ComparableEvent(at_s, label, {}, "") for at_s, label in events]


STREAMS = strategies.dictionaries(
    strategies.sampled_from(["trajectory 1", "trajectory 2", "step 1", "metrics, step 1", "checkpoint step_000001"]),
    strategies.lists(
        strategies.tuples(strategies.integers(0, 3).map(float), strategies.sampled_from("xy")), max_size=3
    ),
)


@given(STREAMS, STREAMS)
def test_exchanged_runs_diverge_at_the_same_place(
    a: dict[str, list[tuple[float, str]]], b: dict[str, list[tuple[float, str]]]
) -> None:
    one, other = ({name: make_events(*events) for name, events in run.items()} for run in (a, b))
    forth, back = compare_streams(one, other), compare_streams(other, one)
    assert [(each.stream, each.a, each.b, each.at_s) for each in forth] == [
        (each.stream, each.b, each.a, each.at_s) for each in back
    ]


def test_a_cause_precedes_its_consequence_in_the_faster_run() -> None:
    slow: EventStreams = {"step 0": make_events((30.0, "x"))}
    fast: EventStreams = {"trajectory 951": make_events((12.0, "x")), "step 0": make_events((11.0, "y"))}
    for divergences in (compare_streams(slow, fast), compare_streams(fast, slow)):
        assert [each.stream for each in divergences] == ["step 0", "trajectory 951"]


def test_the_differences_of_the_configurations_come_first(tmp_path: Path) -> None:
    runs = [a_run(tmp_path / name, ("r", START)) for name in "ab"]
    for run, steps in zip(runs, (40, 100), strict=True):
        write_resolved(RunConfig(name=run.path.name, sft=SftConfig(steps=steps)), run.config)
    text = capture(lambda console: compare_runs(*runs, exact=False, console=console), 200)
    assert text.splitlines()[:2] == ["configuration:", "  sft.steps: 40 -> 100"]


def test_the_first_divergence_in_time_is_found(tmp_path: Path) -> None:
    begin = [("r", START), ("r", generated(8, 0, "b")), ("r", generated(7, 0, "a"))]
    late = finished(0, "4")
    a = a_run(tmp_path / "a", *begin, ("r", late), ("recipe", msg.StepTrained(1, {"loss": 0.5, "train_s": 1.0})))
    b = a_run(
        tmp_path / "b",
        *begin,
        ("r", finished(0, "5", 3.0)),
        ("recipe", msg.StepTrained(1, {"loss": 0.25, "train_s": 9.0})),
    )
    found = find(a, b)
    assert (found.stream, found.at_s, list_differing_fields(found)) == ("trajectory 7", 3.0, ["outcome"])
    c = a_run(tmp_path / "c", *begin, ("r", late), ("recipe", msg.StepTrained(1, {"loss": 0.25, "train_s": 9.0})))
    found = find(a, c)
    assert (found.stream, found.at_s, list_differing_fields(found)) == ("step 1", 4.0, ["metrics"])


def test_an_event_that_one_run_lacks_is_a_divergence(tmp_path: Path) -> None:
    a = a_run(tmp_path / "a", ("r", START), ("r", generated(7, 0, "a")))
    b = a_run(tmp_path / "b", ("r", START))
    for one, other in ((a, b), (b, a)):
        found = find(one, other)
        assert found.stream == "trajectory 7"
        assert (found.a is None) == (one is b)


def test_a_trajectory_counts_from_its_last_start_if_a_resume_repeats_it(tmp_path: Path) -> None:
    a = a_run(tmp_path / "a", ("r", START), ("r", generated(7, 0, "b")))
    b = a_run(tmp_path / "b", ("r", START), ("r", generated(7, 0, "a")), ("r", START), ("r", generated(7, 0, "b")))
    assert find_first_divergence(a, b) is None


def test_the_files_of_the_newest_checkpoint_are_compared(tmp_path: Path) -> None:
    runs = [a_run(tmp_path / name, ("recipe", msg.StepTrained(1, {}))) for name in "ab"]
    for run, content in zip(runs, (b"1", b"2"), strict=True):
        for step in (0, 1):
            (run.get_checkpoint_path(step)).mkdir(parents=True)
        (run.get_checkpoint_path(0) / "model.safetensors").write_bytes(content)
        (run.get_checkpoint_path(1) / "config.json").write_bytes(b"")
    assert find_first_divergence(*runs) is None
    (runs[1].get_checkpoint_path(1) / "config.json").write_bytes(b"{}")
    for exact in (False, True):
        found = find(*runs, exact=exact)
        assert found.a is not None
        assert (found.stream, found.a.source) == ("checkpoint step_000001", "checkpoints/step_000001/config.json")


@pytest.mark.parametrize(
    ("compared", "ignored"),
    [
        ("reward", ("step_s", "recomputed_share")),
        (
            "probe_gap",
            (
                "probe_engines",
                "probe_unmoved_engines",
                "probe_mismatch",
                "probe_moved",
                "probe_followed",
                "probe_since",
            ),
        ),
    ],
)
def test_metrics_of_times_cache_misses_and_launches_are_not_compared(
    tmp_path: Path, compared: str, ignored: tuple[str, ...]
) -> None:
    runs = [a_run(tmp_path / name, ("recipe", msg.StepTrained(1, {}))) for name in "abc"]
    for run, value, other in zip(runs, (0.5, 0.5, 0.25), (1.0, 2.0, 1.0), strict=True):
        values = {compared: value, **dict.fromkeys(ignored, other)}
        run.metrics.write_text(json.dumps({"kind": "step", "step": 1, **values}) + "\n")
    assert list_divergences(runs[0], runs[1]) == []
    (found,) = list_divergences(runs[0], runs[2])
    assert (found.stream, list_differing_fields(found)) == ("metrics, step 1", [compared])


def test_an_exact_comparison_ignores_only_times_and_weight_paths(tmp_path: Path) -> None:
    a = a_run(tmp_path / "a", ("r", finished(0, "4", 1.0)), ("recipe", msg.WeightsPublished(1, "/dev/shm/a", 5, "d")))
    b = a_run(
        tmp_path / "b",
        ("r", finished(0, "4", 2.0)),
        ("recipe", msg.WeightsPublished(1, "/dev/shm/b", 5, "d")),
        tick_s=9,
    )
    assert find_first_divergence(a, b, exact=True) is None
    c = a_run(tmp_path / "c", ("r", finished(0, "4", 2.0)), ("recipe", msg.WeightsPublished(1, "/dev/shm/b", 5, "e")))
    found = find(a, c, exact=True)
    assert list_differing_fields(found) == ["digest"]


def test_both_sides_are_shown_from_the_first_different_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diff_command, "load_text_context", lambda _: text_context())
    turns: list[msg.TurnGenerated] = [generated(7, 0, "the same, then this"), generated(7, 0, "the same, then that")]
    a, b = (a_run(tmp_path / name, ("r", START), ("r", turn)) for name, turn in zip("ab", turns, strict=True))
    codes: list[int] = []
    text = capture(lambda console: codes.append(compare_runs(a, b, exact=False, console=console)), 200)
    assert codes == [1]
    assert "the runs diverge at trajectory 7, 1.0000 s after the start" in text
    assert "token_ids from index 17" in text
    assert "3 tokens: is<|im_end|>" in text
    assert "3 tokens: at<|im_end|>" in text
