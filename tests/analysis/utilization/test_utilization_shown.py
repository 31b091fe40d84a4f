"""The report's tables, JSON, figure and errors."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from asterism.actors.cli.main import app
from asterism.actors.cli.report_command import report_run
from asterism.analysis.utilization import utilization_figure
from asterism.analysis.utilization.report import compute_utilization
from asterism.analysis.utilization.utilization_figure import draw_utilization
from asterism.configs.errors import UnusableInput
from tests.analysis.utilization.log_lines import Logs
from tests.consoles import capture

pytestmark = pytest.mark.slow  # drawing with matplotlib takes seconds

COLUMNS = 80


def write_logs(run: Path, engines: int) -> Logs:
    """Write a folder with logs only, as the simulator does."""
    logs = Logs(run / "logs")
    logs.step_started(0, size=2, group_id=0)
    for number in range(engines):
        engine = f"generator-{number}"
        logs.line(engine, 0, "engine.started", kv_tokens=1000, page_tokens=10)
        for t in range(1, 9):
            used = {"used_tokens": 100 * t, "cached_tokens": 50 * t, "generated_tokens": 100_000_000 * t}
            logs.load(engine, t, running=t, busy_s=t * (number + 1) / (engines + 1), recomputed_tokens=3 * t, **used)
            fields = {"leased_tokens": 110 * t, "usable_tokens": 1000}
            logs.line("launcher", t, "ledger.reported", engine=engine, **fields)
    logs.counted(0, 2, 0, 0, 0)
    logs.counted(3, 0, 0, 2, 0)
    fields = {"slots": 16, "running": 64, "queued": 3, "done": 9, "busy_s": 1.0, "running_s": 60.0, "queued_s": 1.5}
    logs.line("executor-0", 4, "executor.load", executor="executor-0/1", **fields)
    logs.ended(0, 8, 3.0, 1.0, 4.0, 0.5)
    logs.ended(1, 9, 3.0, 1.0, 4.5, 0.5, ending="failed", cause="sandbox: [broken]")
    logs.text("head", "torn [bold]\n")
    return logs


@pytest.fixture
def no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw no figure, which takes a second."""
    monkeypatch.setattr(utilization_figure, "draw_utilization", lambda use, title, path: path)


def shown(run: Path, *, as_json: bool = False) -> str:
    return capture(lambda console: report_run(run, json=as_json, console=console), COLUMNS)


@pytest.mark.usefixtures("no_figure")
@pytest.mark.parametrize("engines", [2, 14])
def test_every_table_fits_into_80_columns_untruncated(tmp_path: Path, engines: int) -> None:
    write_logs(tmp_path, engines)
    lines = shown(tmp_path).splitlines()
    tables = [line for line in lines if str(tmp_path) not in line]
    assert max(map(len, tables)) <= COLUMNS
    assert not any("…" in line for line in tables)
    assert any("trajectories waited for a lease" in line for line in lines)
    assert any("12 of 14 engines" in line for line in lines) == (engines == 14)


@pytest.mark.usefixtures("no_figure")
def test_a_warning_is_shown_without_markup(tmp_path: Path) -> None:
    write_logs(tmp_path, 1)
    assert "1 of 25 lines could not be read" in shown(tmp_path).replace("\n", " ")


@pytest.mark.usefixtures("no_figure")
def test_printed_and_written_json_are_equal(tmp_path: Path) -> None:
    write_logs(tmp_path, 2)
    printed = json.loads(shown(tmp_path, as_json=True))
    assert printed == json.loads((tmp_path / "utilization.json").read_text())
    assert [engine["engine"] for engine in printed["engines"]] == ["generator-0", "generator-1"]
    assert len(printed["timeline"]["engines"]["generator-0"]["running"]) == 400
    assert printed["trajectories"]["longest"][0]["cause"] == "sandbox: [broken]"


@pytest.mark.parametrize("engines", [0, 2, 14])
def test_the_figure_is_drawn_for_any_number_of_engines(tmp_path: Path, engines: int) -> None:
    logs = write_logs(tmp_path, engines)
    path = draw_utilization(compute_utilization(logs.folder), "Utilization", tmp_path / "picture.png")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_error_names_a_missing_folder_and_a_folder_without_logs(tmp_path: Path) -> None:
    with pytest.raises(UnusableInput, match=str(tmp_path / "nowhere")):
        shown(tmp_path / "nowhere")
    with pytest.raises(UnusableInput, match=rf"{tmp_path}/logs: no logs"):
        shown(tmp_path)


def test_the_command_replaces_symbolic_links_but_not_their_targets(tmp_path: Path) -> None:
    pictures = (f"{name}.{kind}" for name in ("utilization", "curves", "cold_start") for kind in ("png", "svg"))
    outputs = ("utilization.json", *pictures)
    run, outside = tmp_path / "run", tmp_path / "outside"
    write_logs(run, 1)
    step = {"kind": "step", "step": 1, "reward": 0.5, "response_tokens": 60.0, "step_s": 1.0}
    lines = [{"kind": "sft", "step": 1, "loss": 2.0}, step]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    outside.write_text("kept")
    for name in outputs:
        for link in (name, f"{name}.new"):  # a link at the name of the partial file, too
            (run / link).symlink_to(outside)
    result = CliRunner().invoke(app, ["report", str(run)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert outside.read_text() == "kept"
    assert [name for name in outputs if (run / name).is_symlink()] == []
    assert "engines" in json.loads((run / outputs[0]).read_text())
    assert [(run / name).read_bytes()[:4] for name in outputs[1:]] == [b"\x89PNG", b"<?xm"] * 3
