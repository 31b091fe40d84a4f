"""The entry of all benchmark programs: flags, their defaults with --quick, the JSON line and the exit code."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.experiments import variants
from benchmarks.support.benchmark_main import (
    SEED,
    Flag,
    Options,
    alternate,
    benchmark_main,
    choose_names,
    make_policies_flag,
)

FLAGS = (
    *(SEED, Flag("--rounds", 5, quick=1, least=1), Flag("--set", []), Flag("--again", False), Flag("--limit-s", 2.0)),
    make_policies_flag(("a",), ("a", "b", "c"), quick=("b",)),
    *variants.RUN_FLAGS,
)
NAMES = ("seed", "rounds", "set", "again", "limit_s", "policies")


def report_flags(options: Options) -> dict[str, Any]:
    return {name: getattr(options, name) for name in NAMES}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., list[str]]:
    """Run a program with a command line, and return its output's lines."""

    def run_program(line: str, measure: Any = report_flags, **settings: Any) -> list[str]:
        monkeypatch.setattr("sys.argv", ["benchmark", *line.split()])
        benchmark_main("What it measures.", measure, *FLAGS, quick="short", **settings)
        return capsys.readouterr().out.splitlines()

    return run_program


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("", (0, 5, [], False, 2.0, ["a"])),
        ("--quick", (0, 1, [], False, 2.0, ["b"])),
        ("--quick --rounds 3 --policies c,a", (0, 3, [], False, 2.0, ["c", "a"])),
        ("--seed 7 --set x=1 --set y=2 --again --limit-s 0.5", (7, 5, ["x=1", "y=2"], True, 0.5, ["a"])),
    ],
)
def test_quick_changes_defaults_and_given_flags_take_precedence(
    run: Callable[..., list[str]], line: str, values: tuple[Any, ...]
) -> None:
    assert json.loads(run(line)[-1]) == dict(zip(NAMES, values, strict=True))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--rounds 0", "--rounds must be at least 1: 0"),
        ("--seeds 0", "--seeds must be at least 1: 0"),  # an experiment needs a seed
        ("--policies a,z", "unknown name 'z'; known: a, b, c"),
        ("--seed x", "argument --seed: invalid int value: 'x'"),
    ],
)
def test_an_unusable_flag_is_refused_with_the_usage(
    run: Callable[..., list[str]], capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run(line)
    assert message in capsys.readouterr().err


def test_a_flag_error_in_the_measurement_is_shown_with_the_usage(
    run: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run("", lambda _: {"x": choose_names("none", ["one"], "--only: ")})
    assert "--only: unknown name 'none'; known: one" in capsys.readouterr().err


def test_an_async_program_has_a_temporary_folder_and_prints_its_table_first(
    run: Callable[..., list[str]],
) -> None:
    folders: list[Any] = []

    async def measure(options: Options) -> dict[str, float]:
        await asyncio.sleep(0)
        folders.append(options.scratch)
        return {"exists": float(options.scratch.is_dir())}

    assert [line.split() for line in run("", measure, shows_table=True)] == [["exists", "1"], ['{"exists":', "1.0}"]]
    assert not folders[0].exists()


def test_failed_figures_are_printed_and_the_exit_code_is_1(
    run: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="1"):
        run("", lambda _: {"passed": False}, has_passed=lambda figures: figures["passed"])
    assert json.loads(capsys.readouterr().out) == {"passed": False}


def test_an_expected_exception_ends_the_program_with_its_text(run: Callable[..., list[str]]) -> None:
    def fail(_: Options) -> dict[str, float]:
        raise ValueError("no server")

    with pytest.raises(SystemExit, match="no server"):
        run("", fail, expected=(ValueError,))


def test_a_program_without_figures_prints_nothing(run: Callable[..., list[str]]) -> None:
    assert run("", lambda _: None) == []


def test_ways_take_turns_by_round() -> None:
    calls: list[str] = []
    ways = {name: lambda name=name: calls.append(name) or len(calls) for name in "ab"}
    assert alternate(ways, 2) == {"a": [1, 3], "b": [2, 4]}
    assert calls == ["a", "b", "a", "b"]
