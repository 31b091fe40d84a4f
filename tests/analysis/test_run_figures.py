"""The lines about figures at the end of a run, with and without the packages that draw figures."""

from pathlib import Path

import pytest

from asterism.analysis import run_figures
from asterism.configs.run_folder import RunFolder


def raise_missing(package: str) -> list[Path]:
    raise ModuleNotFoundError(f"No module named '{package}'", name=package)


@pytest.mark.parametrize(("module", "package"), [("polars", "polars"), ("matplotlib.axes", "matplotlib")])
def test_a_missing_package_for_figures_is_named_with_the_command_that_draws(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, module: str, package: str
) -> None:
    monkeypatch.setattr(run_figures, "draw_all_curves", lambda folder: raise_missing(module))
    assert run_figures.list_curve_lines(RunFolder(tmp_path)) == [
        f"no curves: the package {package} is not installed; with it, `asterism report {tmp_path}` draws them"
    ]


def test_any_other_missing_module_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(run_figures, "draw_all_curves", lambda folder: raise_missing("asterism.analysis.curves"))
    with pytest.raises(ModuleNotFoundError, match="analysis"):
        run_figures.list_curve_lines(RunFolder(tmp_path))


def test_a_run_without_metrics_has_no_figures(tmp_path: Path) -> None:
    assert run_figures.list_curve_lines(RunFolder(tmp_path)) == []
