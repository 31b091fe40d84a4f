"""The order of the sections, the budget, the file of results, and the lengths of sequences."""

import inspect
import json
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from asterism.engine.learner.batches.packing import split_micro_batches
from asterism.engine.model.training_flops import count_forward_flops
from benchmarks.gpu import __main__ as program
from benchmarks.gpu import training
from benchmarks.gpu.process_group import Finished
from benchmarks.gpu.result_file import Figures, append_result, find_figures, has_failed, measure_parts, read_results
from benchmarks.gpu.runs import alternate_advantages
from benchmarks.gpu.sections import GpuSection, list_sections
from benchmarks.gpu.training import draw_lengths, make_sequences
from benchmarks.support.benchmark_main import FlagError, Options
from benchmarks.support.qwen3_models import read_qwen3

FACTS = {"quick": False, "card": "a card", "torch": "2.11.0", "commit": "abc"}


def test_the_most_valuable_sections_come_first_and_variants_last() -> None:
    names = list(list_sections(is_quick=False))
    assert names[:5] == ["step_1.7B_8192", "head", "decode_1.7B", "weights_1.7B", "step_4B_8192"]
    variants = [name for name in names if name.count("_") == 3]
    assert names[-len(variants) :] == variants
    assert {"step_1.7B_8192_eager", "step_4B_8192_attention", "step_1.7B_8192_full"} <= set(variants)


@pytest.mark.parametrize("is_quick", [False, True])
def test_each_section_has_a_function_that_takes_its_arguments(*, is_quick: bool) -> None:
    for section in list_sections(is_quick=is_quick).values():
        inspect.signature(section.import_function()).bind(device=None, **section.arguments)


def test_limits_exceed_estimates_and_the_main_sections_fit_into_ten_minutes() -> None:
    sections = list_sections(is_quick=False)
    assert all(section.limit_s >= 1.5 * section.estimate_s for section in sections.values())
    main = list(sections)[: list(sections).index("run_1.7B") + 1]
    assert sum(sections[name].estimate_s for name in main) < 560  # the budget in docs/gpu.md


def test_a_section_longer_than_the_rest_of_the_budget_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: dict[str, float] = {}

    def record_limit(name: str, limit_s: float, shared: program.SharedOptions) -> Figures:
        limits[name] = limit_s
        return {"x": 1.0}

    monkeypatch.setattr(program, "run_section", record_limit)
    sections = {
        "long": GpuSection("", {}, 500, 600),
        "short": GpuSection("", {}, 20, 30),
        "late": GpuSection("", {}, 20, 900),
    }
    shared = program.SharedOptions(False, None, time.monotonic() + 100, {})
    found, skipped = program.run_sections(sections, shared)
    assert (found, skipped) == ({"short": {"x": 1.0}, "late": {"x": 1.0}}, ["long"])
    assert limits["short"] == 30
    assert 90 < limits["late"] <= 95  # the rest of the budget, less a margin


def test_sections_run_without_facts_of_the_machine_but_not_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    facts: dict[str, Figures] = {"machine": {"error": "no result after 120 s"}, "head": {"head_s": 1.0}}
    ran: list[str] = []

    def find_result(name: str, limit_s: float, shared: program.SharedOptions) -> Figures:
        ran.append(name)
        return facts[name]

    monkeypatch.setattr(program, "run_section", find_result)
    monkeypatch.setattr(program, "adopt_orphans", lambda: None)
    fixed = {"only": "head", "quick": False, "again": False, "out": None, "limit_s": None, "section": None}
    options = Options(**fixed, budget_s=float("inf"))
    figures = program.measure(options)
    assert figures is not None
    assert has_failed(figures)
    assert ran == ["machine", "head"]
    facts["machine"] = {"gpu": ""}
    with pytest.raises(FlagError, match="no GPU is available"):
        program.measure(options)
    assert ran == ["machine", "head", "machine"]


def test_a_later_call_reuses_recorded_figures_unless_the_section_failed(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    append_result(path, "machine", {"gpu": "a card"}, 1.0, FACTS)
    append_result(path, "head", {"head_s": 1.0}, 2.0, FACTS)
    append_result(path, "demo", {"error": "no result after 9 s"}, 9.0, FACTS)
    append_result(path, "head", {"head_s": 0.5}, 2.0, FACTS)
    append_result(path, "weights_1.7B", {"slot_weights_s": 1.0, "ipc_error": "no handle"}, 2.0, FACTS)  # a part failed
    with path.open("a") as file:
        file.write('{"section": "passes_8B", "figu')
    assert read_results(path, is_quick=False) == {"head": {"head_s": 0.5}}
    assert read_results(path, is_quick=True) == {}
    lines = path.read_text().splitlines()
    assert json.loads(lines[4])["figures"]["slot_weights_s"] == 1.0
    line = json.loads(lines[1])
    assert line.pop("date").startswith("20")
    assert line == {"section": "head", "figures": {"head_s": 1.0}, "seconds": 2.0, **FACTS}


def test_a_failed_part_does_not_lose_figures_of_other_parts(capsys: pytest.CaptureFixture[str]) -> None:
    def run_out_of_memory() -> Figures:
        raise RuntimeError("out of memory")

    figures = measure_parts({"slot": lambda: {"slot_s": 1.0}, "ipc": run_out_of_memory})
    assert figures["slot_s"] == 1.0
    assert str(figures["ipc_error"]).endswith("RuntimeError: out of memory")
    assert has_failed(figures)
    assert not has_failed({"slot_s": 1.0, "peak_gib": 2.0})
    with pytest.raises(SystemExit, match=r"ipc_error: (?s:.*)out of memory"):
        measure_parts({"ipc": run_out_of_memory})
    killed = Finished(None, capsys.readouterr().out, "", 9.0)
    assert find_figures(killed, 9.0) == {**figures, "end_error": "no result after 9.0 s"}


def test_a_failed_section_keeps_the_figures_that_it_sent() -> None:
    output = 'a library prints\nfigures: {"x": 1.0}\nand prints\n'
    assert find_figures(Finished(0, output, "a warning", 1.0), 9.0) == {"x": 1.0}
    assert find_figures(Finished(-11, output, "", 1.0), 9.0) == {"x": 1.0, "end_error": "exit code -11"}
    assert find_figures(Finished(0, "a library prints", "", 1.0), 9.0) == {"error": "exit code 0"}
    assert find_figures(Finished(None, "", "a line", 9.0), 9.0) == {"error": "no result after 9.0 s: a line"}


@pytest.mark.parametrize(("model", "tokens"), [("1.7B", 8192), ("4B", 16_384), ("0.6B", 16_384), ("0.6B", 256)])
def test_sequences_of_unequal_lengths_fill_two_micro_batches(model: str, tokens: int) -> None:
    lengths = draw_lengths(tokens, 2)
    assert lengths == draw_lengths(tokens, 2)
    attention = count_forward_flops(read_qwen3(model)).attention_tokens
    (micro_batches,) = split_micro_batches(make_sequences(lengths, 100), 1, tokens, attention)
    assert len(micro_batches) == 2
    assert sum(lengths) >= 0.96 * 2 * tokens
    if tokens >= 8192:
        assert max(lengths) <= 4000
        assert np.quantile(lengths, 0.9) > 5 * np.quantile(lengths, 0.1)


def test_alternating_advantages_add_up_to_zero() -> None:
    assert alternate_advantages([0.0, 0.0, 1.0, 0.0]) == [1.0, -1.0, 1.0, -1.0]


def test_the_memory_peak_excludes_the_compiling_first_round(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(training, "reset_peak_memory", lambda device: calls.append(f"reset {device}"))
    training.measure_seconds(lambda: calls.append("work"), torch.device("cpu"), rounds=2)
    assert calls == ["work", "reset cpu", "work", "work"]
