"""`asterism simulate` on the command line."""

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from asterism.actors.cli.planning.simulate_command import ProgressLines, SimulateOptions, simulate_workload
from asterism.actors.cli.report_command import report_run
from asterism.analysis.simulation.simulate import simulate
from asterism.analysis.simulation.workloads import SHAPES, draw_named_workload
from asterism.analysis.utilization.report import compute_utilization
from asterism.configs.errors import UnusableInput
from asterism.configs.load import write_resolved
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.run_config import RunConfig
from tests.consoles import capture


def simulated(policies: str, workload: str = "report", **changes: Any) -> str:
    settings = {"scale": 0.01} if workload in SHAPES else {}
    options = SimulateOptions(workload, policies, **{**settings, **changes})
    return capture(lambda console: simulate_workload(options, console))


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Compare two policies. Return the folder of all outputs, and the printed lines."""
    folder = tmp_path_factory.mktemp("compared")
    outputs = {"json_file": folder / "step.json", "picture": folder / "step.png", "run": folder / "a[b]c"}
    return folder, simulated("static,kv_lookahead,static", **outputs)


@pytest.mark.slow
def test_simulate_compares_policies_and_writes_table_json_and_figure(compared: tuple[Path, str]) -> None:
    folder, said = compared
    assert "static" in said
    figures = json.loads((folder / "step.json").read_bytes())
    assert [each["policy"] for each in figures] == ["static", "kv_lookahead"]
    assert all(each["makespan_s"] > max(each["bounds"].values()) for each in figures)
    for each in figures:
        assert max(sample["running"] for sample in each["timeline"]) <= each["slots"]
        assert max(sample["used_tokens"] for sample in each["timeline"]) <= each["kv_tokens"]
        assert max(sample["leasing"] + sample["waiting"] for sample in each["timeline"]) > 0
        assert each["timeline"][-1]["live"] == each["timeline"][-1]["leasing"] == each["timeline"][-1]["calling"] == 0
    assert (folder / "step.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_report_reads_the_logs_of_each_simulated_policy(compared: tuple[Path, str]) -> None:
    static, lookahead = (RunFolder(compared[0] / "a[b]c" / policy) for policy in ("static", "kv_lookahead"))
    assert f"asterism report {static.path}" in compared[1]
    assert f"asterism report {lookahead.path}" in compared[1]
    assert compute_utilization(static.logs).trajectories.ended == 8 * 32
    shown = capture(lambda console: report_run(lookahead.path, json=False, console=console))
    assert f"utilization: {lookahead.utilization}\npicture: {lookahead.utilization_plot}\n" in shown
    assert lookahead.utilization_plot.read_bytes().startswith(b"\x89PNG")
    assert json.loads(lookahead.utilization.read_bytes())["trajectories"]["ended"] == 8 * 32


@pytest.mark.slow
def test_the_logs_of_a_single_policy_have_no_folder_of_the_policy(tmp_path: Path) -> None:
    simulated("worst_case", run=tmp_path)
    assert RunFolder(tmp_path).logs.is_dir()


@pytest.mark.parametrize(
    ("policies", "changes", "complaint"),
    [
        ("static,fifo", {}, "--policies: unknown policy 'fifo'; known are static, round_robin"),
        ("", {}, "--policies: unknown policy ''"),
        ("static", {"cluster": "9xh100"}, "--cluster 9xh100: unknown cluster; known are 8xh100"),
        ("static", {"step": 2}, "--step: only a recorded run has steps"),
        (
            "static",
            {"workload": "reprot"},
            "reprot: neither a run folder nor a workload; workloads are report, one_node",
        ),
    ],
)
def test_unknown_names_are_refused_with_the_known_ones(policies: str, changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(UnusableInput, match=complaint):
        simulated(policies, **changes)


def test_a_recorded_run_has_no_scale_or_seed_and_is_not_overwritten(tmp_path: Path) -> None:
    write_resolved(RunConfig(name="real"), RunFolder(tmp_path).config)
    with pytest.raises(UnusableInput, match="--scale: only for generated workloads"):
        simulated("static", workload=str(tmp_path), scale=0.5)
    with pytest.raises(UnusableInput, match="--seed: only for generated workloads"):
        simulated("static", workload=str(tmp_path), seed=3)
    with pytest.raises(UnusableInput, match="is the folder of a real run"):
        simulated("static", run=tmp_path)


def test_the_error_names_an_unwritable_output_folder(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(UnusableInput, match=r"taken: is not a folder"):
        simulated("static", run=tmp_path / "taken")


def test_a_long_simulation_prints_its_progress() -> None:
    shown, now = StringIO(), 0.0
    report = ProgressLines("static", Console(file=shown, width=120), lambda: now)
    report(10.0, 5, 2000)
    assert shown.getvalue() == ""
    now = 6.0
    report(20.0, 900, 2000)
    report(21.0, 901, 2000)
    assert shown.getvalue() == "static: 900 of 2,000 trajectories ended after 20 s of virtual time\n"


@pytest.mark.slow
def test_a_simulation_finally_reports_all_trajectories_as_ended() -> None:
    reports: list[tuple[float, int, int]] = []
    workload, cluster = draw_named_workload("one_node", 0, 1 / 64)
    simulate(workload, cluster, "static", on_progress=lambda *report: reports.append(report))
    assert [total for _, _, total in reports] == [len(workload.plans)] * len(reports)
    assert [ended for _, ended, _ in reports] == sorted(ended for _, ended, _ in reports)
    assert len(reports) > 2
