"""Train the variants of one experiment with several seeds and draw their curves. Draws a picture and prints JSON last.

    python -m benchmarks.experiments.variants NAME [--seeds 5] [--config configs/tiny.toml] [--set KEY=VALUE ...]
                                              [--runs runs/experiments] [--quick]

NAME is an experiment of the table EXPERIMENTS (planned_runs.py). Each run is `asterism run CONFIG` with the settings
of its variant, in the folder RUNS/VARIANT_SEED, and starts from the checkpoint of its cold start,
RUNS/cold_START_SEED. One run starts after another. A finished run with the same settings is not repeated, an interrupted
one resumes from its last checkpoint, and experiments share their runs.

The picture RUNS/NAME/curves.png has the mean of the seeds. With two or more seeds, it has a band of one standard error.
RUNS/NAME/figures.json and the JSON line have, by variant, the mean, the standard error and the bootstrap interval of the
seeds for each of FIGURES: keys of summary.json, and the share of rollouts at the length limit in the last steps.
Values are null if no run has the figure.

--quick: one seed and runs of three short steps, in RUNS-quick.
"""

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from asterism.analysis.evaluation.answer_statistics import compute_bootstrap_interval, compute_standard_error
from asterism.analysis.metric_lines import AnalysisError
from asterism.analysis.metrics import RunMetrics, read_metrics
from asterism.analysis.summary_table import read_summary
from asterism.configs.run_folder import RunFolder
from benchmarks.experiments.planned_runs import EXPERIMENTS, QUICK, PlannedRun, plan_runs
from benchmarks.experiments.variant_curves import draw_variants
from benchmarks.support.benchmark_main import Flag, Options, benchmark_main

FIGURES = (
    *("pass1_start", "pass1_end", "greedy_end", "reward_end", "err_positive_end", "response_tokens_end"),
    "overlong_share_end",
)
_LAST_STEPS = 20  # steps that overlong_share_end averages: the share is small, so a few steps would be noisy


def run_planned(planned: PlannedRun, config: Path) -> None:
    """Run the command, unless the run has finished with these settings. Raises CalledProcessError and OSError.

    An interrupted run with these settings continues from its last checkpoint.
    """
    command = ["run", str(config), *(part for each in planned.settings for part in ("--set", each))]
    record = planned.folder.parent / f"{planned.folder.name}.json"  # the command of the run in the folder
    summary, is_same = RunFolder(planned.folder).summary, record.exists() and json.loads(record.read_text()) == command
    if is_same and summary.exists():
        print(f"{planned.folder}: finished before", flush=True)
        return
    if not is_same:
        summary.unlink(missing_ok=True)
        record.write_text(json.dumps(command))
    start = "--resume" if is_same and planned.folder.exists() else "--overwrite"
    print(f"{planned.folder}: seed {planned.seed}, {start}", flush=True)
    done = subprocess.run(
        [sys.executable, "-m", "asterism.actors.cli.main", *command, start],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        print(done.stdout[-4000:], flush=True)
        done.check_returncode()


def summarize_figure(values: Sequence[float]) -> dict[str, Any]:
    """Summarize a figure by its value for each seed. A single value has no interval."""
    interval = compute_bootstrap_interval(values, seed=0) if len(values) > 1 else None
    return {
        "mean": round(fmean(values), 4) if values else None,
        "standard_error": compute_standard_error(values),
        "interval": interval,
        "seeds": len(values),
    }


def summarize_variants(runs: Sequence[PlannedRun]) -> dict[str, dict[str, dict[str, Any]]]:
    """Summarize the figures by variant. Raises AnalysisError."""
    summaries: dict[str, list[Mapping[str, Any]]] = {}
    for run in runs:
        figures, steps = dict(read_summary(run.folder) or {}), read_metrics(run.folder).steps
        if "overlong_share" in steps.columns:
            figures["overlong_share_end"] = steps["overlong_share"].tail(_LAST_STEPS).mean()
        summaries.setdefault(run.variant, []).append(figures)
    return {
        variant: {
            name: summarize_figure([each[name] for each in of_variant if each.get(name) is not None])
            for name in FIGURES
        }
        for variant, of_variant in summaries.items()
    }


def read_curves(runs: Sequence[PlannedRun], labels: Mapping[str, str]) -> dict[str, list[RunMetrics]]:
    """Return the metrics of all seeds by label. `labels` maps variants to labels. Raises AnalysisError."""
    curves: dict[str, list[RunMetrics]] = {}
    for run in runs:
        curves.setdefault(labels[run.variant], []).append(read_metrics(run.folder, require_steps=True))
    return curves


def run_experiment(name: str, planned: Sequence[PlannedRun], config: Path, folder: Path) -> dict[str, Any]:
    """Run an experiment and summarize it. Raises AnalysisError, CalledProcessError and OSError."""
    for each in planned:
        run_planned(each, config)
    title, labels = EXPERIMENTS[name]
    runs = [each for each in planned if each.variant]
    seeds = len({each.seed for each in runs})
    folder.mkdir(parents=True, exist_ok=True)
    picture = draw_variants(title, read_curves(runs, labels), seeds, folder / "curves.png")
    print(f"picture: {picture}")
    figures = {"experiment": name, "seeds": seeds, "variants": summarize_variants(runs)}
    (folder / "figures.json").write_text(json.dumps(figures, indent=2))
    return figures


def prepare_runs(options: Options) -> tuple[Path, tuple[str, ...]]:
    """Make the folder of the runs. Return the folder, and the settings that follow all others."""
    runs = options.runs.resolve()
    if options.quick:
        runs = runs.with_name(f"{runs.name}-quick")
    runs.mkdir(parents=True, exist_ok=True)
    return runs, QUICK if options.quick else ()


def measure(options: Options) -> dict[str, Any]:
    name, (folder, last) = options.name, prepare_runs(options)
    planned = list(plan_runs(EXPERIMENTS[name], options.seeds, folder, options.set, last))
    try:
        return run_experiment(name, planned, options.config, folder / name)
    except (AnalysisError, OSError) as error:
        sys.exit(f"{name}: {error}")
    except subprocess.CalledProcessError as error:
        sys.exit(f"{name}: the run ended with exit code {error.returncode}; the same command continues after a remedy")


RUN_FLAGS = (
    Flag("--seeds", 5, "seeds 0 to N - 1", quick=1, least=1, metavar="N"),
    Flag("--config", Path("configs/tiny.toml")),
    Flag("--runs", Path("runs/experiments"), metavar="FOLDER"),
)

if __name__ == "__main__":
    benchmark_main(
        __doc__,
        measure,
        Flag("name", text=", ".join(EXPERIMENTS), choices=list(EXPERIMENTS), metavar="NAME"),
        *RUN_FLAGS,
        Flag("--set", [], "setting for all runs", metavar="KEY=VALUE"),
        quick="one seed, and runs of three short steps",
    )
