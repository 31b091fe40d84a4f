"""`asterism simulate` on the command line."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from actors.simulate_command import simulate_workload
from configs.errors import UnusableInput


def simulated(policies: str, **changes: Any) -> str:
    console = Console(width=140, file=StringIO())
    settings: dict[str, Any] = {"seed": 0, "scale": 0.01, "cluster": None, "json_file": None, "picture": None}
    simulate_workload("report", policies, console=console, **{**settings, **changes})
    return console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.slow
def test_policies_stand_side_by_side_and_all_figures_are_written(tmp_path: Path) -> None:
    said = simulated("static,kv_lookahead", json_file=tmp_path / "step.json", picture=tmp_path / "step.png")
    assert "static" in said
    figures = json.loads((tmp_path / "step.json").read_bytes())
    assert [each["policy"] for each in figures] == ["static", "kv_lookahead"]
    assert all(each["makespan_s"] > max(each["bounds"].values()) for each in figures)
    assert (tmp_path / "step.png").exists()


def test_what_it_does_not_know_is_refused_with_what_it_knows() -> None:
    with pytest.raises(UnusableInput, match="no policy 'fifo'; there are static, round_robin"):
        simulated("static,fifo")
    with pytest.raises(UnusableInput, match="no cluster '9xh100'; there are 8xh100"):
        simulated("static", cluster="9xh100")
