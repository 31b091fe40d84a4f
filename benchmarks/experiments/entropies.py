"""Measure entropies of tokens by kind, before and after RL, with several seeds. Draws a picture and prints JSON.

    python -m benchmarks.experiments.entropies [--seeds 5] [--trajectories 256] [--config configs/tiny.toml]
                                               [--runs runs/experiments] [--quick]

The runs belong to the variant `roc` of `benchmarks.experiments.variants`; runs that are not finished are trained first.
`asterism analyze entropy` scores their trajectories at the first and the last step. The picture RUNS/entropies/kinds.png has the
mean of the seeds and its bootstrap interval. figures.json there, and the JSON line, have the mean entropy and the share of
forking tokens by moment and kind, with standard errors and intervals.

--quick: one seed, eight trajectories and runs of three short steps, in RUNS-quick.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from asterism.analysis.plotting import Color, Panel, draw_figure
from asterism.analysis.token_kinds import KINDS
from asterism.configs.run_folder import RunFolder
from asterism.engine.learner.checkpoints.checkpoint_folders import list_saved_steps
from benchmarks.experiments.planned_runs import Experiment, plan_runs
from benchmarks.experiments.variants import RUN_FLAGS, prepare_runs, run_planned, summarize_figure
from benchmarks.support.benchmark_main import Flag, Options, benchmark_main

MOMENTS = ("before RL", "after RL")
PANELS = (
    ("mean_nats", "Entropy", "nats, mean of the kind", False),
    ("forking_share", "Forking tokens", "of the kind", True),
)
_COLORS = (Color.BLUE, Color.ORANGE)
_BAR_WIDTH = 0.38


def analyze_run(run: Path, step: int, trajectories: int) -> dict[str, Any]:
    """Return the statistics of `asterism analyze entropy`. Raises CalledProcessError."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "entropy.json"
        command = ["analyze", "entropy", f"{run}:{step}", "--trajectories", str(trajectories), "--json", str(file)]
        subprocess.run(
            [sys.executable, "-m", "asterism.actors.cli.main", *command], check=True, stdout=subprocess.DEVNULL
        )
        return json.loads(file.read_bytes())


def summarize_kinds(statistics: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Summarize each kind and figure over the seeds. A seed without a token of the kind is left out."""
    by_kind = {kind: [each["kinds"][kind] for each in statistics if kind in each["kinds"]] for kind in KINDS}
    figures = {
        kind: {key: summarize_figure([each[key] for each in found]) for key, *_ in PANELS}
        for kind, found in by_kind.items()
    }
    return {**figures, "all": {"mean_nats": summarize_figure([each["mean_nats"] for each in statistics])}}


def draw_kinds(figures: Mapping[str, Mapping[str, Any]], seeds: int, path: Path) -> Path:
    """Draw `figures`. The keys are moment, kind and figure. Raises OSError."""
    subtitle = f"mean of the seeds 0 to {seeds - 1}, with its bootstrap interval of 95 %" if seeds > 1 else "seed 0"

    def draw(key: str, axes: Axes) -> None:
        for number, moment in enumerate(MOMENTS):
            _draw_bars(axes, [figures[moment][kind][key] for kind in KINDS], number, moment)
        axes.set_xticks(range(len(KINDS)), KINDS)
        axes.legend(loc="upper right", fontsize=10, frameon=False)

    panels = [Panel(title, unit, partial(draw, key), percent, x_label="") for key, title, unit, percent in PANELS]
    return draw_figure(path, "Which tokens are uncertain?", subtitle, panels, columns=2)


def _draw_bars(axes: Axes, summaries: Sequence[Mapping[str, Any]], number: int, label: str) -> None:
    means = [each["mean"] or 0.0 for each in summaries]
    places = [place + (number - 0.5) * _BAR_WIDTH for place in range(len(summaries))]
    intervals = [each["interval"] or (mean, mean) for each, mean in zip(summaries, means, strict=True)]
    below = [mean - low for mean, (low, _) in zip(means, intervals, strict=True)]
    above = [high - mean for mean, (_, high) in zip(means, intervals, strict=True)]
    axes.bar(places, means, _BAR_WIDTH * 0.9, yerr=(below, above), capsize=3, color=_COLORS[number], label=label)


def measure(options: Options) -> dict[str, Any]:
    runs, last = prepare_runs(options)
    folder = runs / "entropies"
    folder.mkdir(exist_ok=True)
    planned = list(plan_runs(Experiment("", {"roc": ""}), options.seeds, runs, last=last))
    for each in planned:
        run_planned(each, options.config)
    trained = [each.folder for each in planned if each.variant]
    steps = [(0, list_saved_steps(RunFolder(run).checkpoints)[-1]) for run in trained]
    figures = {
        moment: summarize_kinds(
            [analyze_run(run, of_run[place], options.trajectories) for run, of_run in zip(trained, steps, strict=True)]
        )
        for place, moment in enumerate(MOMENTS)
    }
    print(f"picture: {draw_kinds(figures, options.seeds, folder / 'kinds.png')}")
    result = {"seeds": options.seeds, "trajectories": options.trajectories, **figures}
    (folder / "figures.json").write_text(json.dumps(result, indent=2))
    return result


if __name__ == "__main__":
    trajectories = Flag("--trajectories", 256, "trajectories of each run and step", quick=8, metavar="N")
    benchmark_main(__doc__, measure, *RUN_FLAGS, trajectories, quick="one seed, and runs of three short steps")
