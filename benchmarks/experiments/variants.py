"""Train the variants of one experiment with several seeds and draw their curves. Draws a picture and prints JSON last.

    python -m benchmarks.experiments.variants NAME [--seeds 5] [--only VARIANT,VARIANT] [--set KEY=VALUE ...]
                                              [--runs runs/experiments] [--results FILE] [--config FILE] [--quick]

NAME is an experiment of the table EXPERIMENTS (planned_runs.py). Each run is `asterism run CONFIG` with the settings
of its variant, in the folder RUNS/VARIANT_SEED, and starts from the checkpoint of its cold start,
RUNS/cold_START_SEED. One run starts after another. Each finished run appends a line to the file of results, with its
figures, curves and commit. A run with a line is not repeated, an interrupted one resumes from its last checkpoint, and
experiments share their runs.

The picture RUNS/NAME/curves.png has the mean of the seeds. With two or more seeds, it has a band of one standard error.
RUNS/NAME/figures.json and the JSON line have, by variant, the mean, the standard error and the bootstrap interval of the
seeds for each figure: some keys of summary.json, the share of rollouts at the length limit in the last steps, and each
set's accuracy before and after RL. Values are null if no run has the figure.

Experiments with word problems compute in bfloat16 on a processor that has instructions for it, unless --set has other dtypes.

--quick: one seed and runs of few short steps, in RUNS-quick.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from asterism.analysis.evaluation.answer_statistics import compute_bootstrap_interval, compute_standard_error
from asterism.analysis.metric_lines import AnalysisError
from asterism.configs.run_folder import RunFolder
from benchmarks.experiments.planned_runs import BFLOAT16, EXPERIMENTS, WORDS, Experiment, PlannedRun, plan_runs
from benchmarks.experiments.recorded_runs import RecordedRun, find_recorded, read_recorded, record_run
from benchmarks.experiments.variant_curves import draw_variants
from benchmarks.real.machine_limits import has_bfloat16
from benchmarks.support.benchmark_main import Flag, Options, benchmark_main


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


def summarize_variants(runs: Sequence[RecordedRun]) -> dict[str, dict[str, dict[str, Any]]]:
    """Summarize the figures of the seeds by variant."""
    by_variant: dict[str, list[RecordedRun]] = {}
    for run in runs:
        by_variant.setdefault(run.variant, []).append(run)
    return {
        variant: {
            name: summarize_figure([value for each in of_variant if (value := each.figures.get(name)) is not None])
            for name in of_variant[0].figures
        }
        for variant, of_variant in by_variant.items()
    }


def run_missing(planned: Sequence[PlannedRun], config: Path, results: Path) -> list[RecordedRun]:
    """Run what has no line in `results`. Raises AnalysisError, CalledProcessError, OSError and ValueError."""
    recorded, runs = read_recorded(results), list[RecordedRun]()
    cold: PlannedRun | None = None
    for each in planned:
        if not each.variant:
            cold = each
            continue
        run = find_recorded(recorded, each, config)
        if run is None:
            if cold is not None:
                run_planned(cold, config)
            run_planned(each, config)
            run = record_run(each, config, results)
        else:
            print(f"{each.variant}, seed {each.seed}: recorded in {results}", flush=True)
        runs.append(run)
    return runs


def run_experiment(
    name: str, planned: Sequence[PlannedRun], config: Path, folder: Path, results: Path
) -> dict[str, Any]:
    """Run an experiment and summarize it. Raises AnalysisError, CalledProcessError, OSError and ValueError."""
    runs, (title, labels, *_) = run_missing(planned, config, results), EXPERIMENTS[name]
    curves: dict[str, list[RecordedRun]] = {}
    for run in runs:
        if run.curves["reward"]:
            curves.setdefault(labels[run.variant], []).append(run)
    seeds = len({run.seed for run in runs})
    folder.mkdir(parents=True, exist_ok=True)
    picture = draw_variants(title, curves, seeds, folder / "curves.png")
    print(f"picture: {picture}")
    figures = {"experiment": name, "seeds": seeds, "variants": summarize_variants(runs)}
    (folder / "figures.json").write_text(json.dumps(figures, indent=2))
    return figures


def prepare_runs(options: Options) -> Path:
    """Make the folder of the runs and return it."""
    runs = options.runs.resolve()
    if options.quick:
        runs = runs.with_name(f"{runs.name}-quick")
    runs.mkdir(parents=True, exist_ok=True)
    return runs


def select_variants(experiment: Experiment, only: str) -> Experiment:
    """Keep the named variants, separated by commas; empty: all."""
    names = only.split(",") if only else list(experiment.labels)
    if unknown := set(names) - set(experiment.labels):
        sys.exit(f"--only: {', '.join(sorted(unknown))} is none of {', '.join(experiment.labels)}")
    return experiment._replace(labels={name: experiment.labels[name] for name in names})


def measure(options: Options) -> dict[str, Any]:
    name, folder = options.name, prepare_runs(options)
    experiment = select_variants(EXPERIMENTS[name], options.only)
    last = experiment.quick if options.quick else ()
    dtype = BFLOAT16 if experiment.config == WORDS and has_bfloat16() else ()
    planned = list(plan_runs(experiment, options.seeds, folder, (*dtype, *options.set), last))
    results = folder / "results.jsonl" if options.quick or not options.results.name else options.results
    try:
        return run_experiment(
            name, planned, options.config if options.config.name else experiment.config, folder / name, results
        )
    except (AnalysisError, OSError, ValueError) as error:
        sys.exit(f"{name}: {error}")
    except subprocess.CalledProcessError as error:
        sys.exit(f"{name}: the run ended with exit code {error.returncode}; the same command continues after a remedy")


RUN_FLAGS = (
    Flag("--seeds", 5, "seeds 0 to N - 1", quick=1, least=1, metavar="N"),
    Flag("--config", Path(), "configuration (default: the experiment's)", metavar="FILE"),
    Flag("--runs", Path("runs/experiments"), metavar="FOLDER"),
)

if __name__ == "__main__":
    benchmark_main(
        __doc__,
        measure,
        Flag("name", text=", ".join(EXPERIMENTS), choices=list(EXPERIMENTS), metavar="NAME"),
        *RUN_FLAGS,
        Flag("--only", "", "variants, separated by commas (default: all)"),
        Flag("--results", Path(), "file of results (default: results.jsonl in RUNS)", metavar="FILE"),
        Flag("--set", [], "setting for all runs", metavar="KEY=VALUE"),
        quick="one seed, and runs of few short steps",
    )
