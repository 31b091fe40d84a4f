"""Train the variants of one experiment with several seeds and draw their curves. A picture, JSON last.

    python -m benchmarks.experiments.variants NAME [--seeds 5] [--config configs/tiny.toml] [--set KEY=VALUE ...]
                                              [--runs runs/experiments] [--quick]

NAME is an experiment of the table EXPERIMENTS. Each run is `asterism run CONFIG` with the settings of its variant, in the
folder RUNS/NAME/VARIANT_SEED; the runs follow each other. A variant that names another one in `starts_from` takes its
settings, cold start and data. A finished run with the same settings is not repeated, so an interrupted experiment continues.

The picture RUNS/NAME/curves.png has the mean of the seeds, and a band of one standard error with two or more seeds.
RUNS/NAME/figures.json and the JSON line have, by variant, the mean, the standard error and the bootstrap interval of the
seeds for each figure of summary.json in FIGURES; values are null if no run has the figure.

--quick: one seed and runs of three short steps, in RUNS/NAME-quick.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import msgspec

from analysis.evaluation.answer_statistics import compute_bootstrap_interval, compute_standard_error
from analysis.metrics import AnalysisError, RunMetrics, read_metrics
from analysis.summary_table import read_summary
from benchmarks.experiments.variant_curves import draw_variants
from configs.run_folder import RunFolder

FIGURES = ("pass1_start", "pass1_end", "greedy_end", "reward_end", "err_positive_end", "response_tokens_end")
QUICK = (
    *("tiny.num_train_questions=64", "tiny.num_test_questions=16", "tiny.num_sft_dialogues=200", "sft.steps=4"),
    *("sft.batch_size=16", "rl.steps=3", "rl.prompts=2", "rl.rollouts=4", "evaluation.questions=6"),
    "sandbox.spare_notebooks=8",
)
Settings = tuple[str, ...]  # KEY=VALUE, as for --set of `asterism run`


class Variant(msgspec.Struct, frozen=True):
    settings: Settings = ()
    starts_from: str = ""  # earlier variant with the cold start, the data and further settings; empty: none


class Experiment(msgspec.Struct, frozen=True):
    title: str
    variants: Mapping[str, Variant]
    settings: Settings = ()  # of all variants


_SHORT = "dialogue.response_tokens=80"  # a dialogue with a repaired call does not fit
EXPERIMENTS: Mapping[str, Experiment] = {
    "roc": Experiment(
        "GRPO-RoC and plain GRPO",
        {"roc": Variant(("roc.enabled=true",)), "grpo": Variant(("roc.enabled=false",), "roc")},
    ),
    "cold_start": Experiment(
        "GRPO-RoC and plain GRPO after cold starts of different lengths",
        {
            "roc_600": Variant(("roc.enabled=true", "sft.steps=600")),
            "grpo_600": Variant(("roc.enabled=false",), "roc_600"),
            "roc_300": Variant(("roc.enabled=true", "sft.steps=300")),
            "grpo_300": Variant(("roc.enabled=false",), "roc_300"),
            "roc_0": Variant(("roc.enabled=true", "sft.steps=0")),
            "grpo_0": Variant(("roc.enabled=false", "sft.steps=0")),
        },
    ),
    "overlong": Experiment(
        "Responses at the length limit: kept as negatives, and dropped",
        {"keep": Variant(("rl.overlong=keep",)), "drop": Variant(("rl.overlong=drop",), "keep")},
        (_SHORT,),
    ),
    "ngram": Experiment(
        "Without and with a filter of repeated n-grams",
        {
            "none": Variant(("rl.repeated_ngram_tokens=0",)),
            "filter": Variant(("rl.repeated_ngram_tokens=8", "rl.repeated_ngram_limit=4"), "none"),
        },
    ),
}


class PlannedRun(NamedTuple):
    variant: str
    seed: int
    folder: Path
    settings: Settings


def plan_runs(
    experiment: Experiment, seeds: int, folder: Path, more: Sequence[str] = (), last: Settings = ()
) -> Iterator[PlannedRun]:
    """In the order in which they run. `more` comes before the settings of a variant, `last` after them."""
    for seed in range(seeds):
        for name, variant in experiment.variants.items():
            run, start = folder / f"{name}_{seed}", variant.starts_from
            changes = (*(experiment.variants[start].settings if start else ()), *variant.settings)
            settings = (*experiment.settings, *more, *changes, *last, f"seed={seed}")
            if start:
                settings += _take_cold_start(RunFolder(folder / f"{start}_{seed}"))
            place = (f'runs_folder="{folder}"', f"name={run.name}")
            yield PlannedRun(name, seed, run, (*settings, *place))


def _take_cold_start(made: RunFolder) -> Settings:
    data = (f"data.train={made.data / 'train.jsonl'}", f"data.test={made.data / 'test.jsonl'}")
    return ("sft.steps=0", f"model.checkpoint={made.get_checkpoint_path(0)}", *data)


def run_planned(planned: PlannedRun, config: Path) -> None:
    """Does nothing if the run has finished with these settings. Raises CalledProcessError, OSError."""
    command = ["run", str(config), *(part for each in planned.settings for part in ("--set", each))]
    record = planned.folder.parent / f"{planned.folder.name}.json"  # the command of the finished run
    if record.exists() and RunFolder(planned.folder).summary.exists() and json.loads(record.read_text()) == command:
        print(f"{planned.folder}: finished before", flush=True)
        return
    record.unlink(missing_ok=True)
    print(f"{planned.folder}: {planned.variant}, seed {planned.seed}", flush=True)
    done = subprocess.run(
        [sys.executable, "-m", "actors.cli.main", *command, "--overwrite"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        print(done.stdout[-4000:], flush=True)
        done.check_returncode()
    record.write_text(json.dumps(command))


def summarize_figure(values: Sequence[float]) -> dict[str, Any]:
    """`values`: one of each seed. A single value has no interval."""
    interval = compute_bootstrap_interval(values, seed=0) if len(values) > 1 else None
    return {
        "mean": round(fmean(values), 4) if values else None,
        "standard_error": compute_standard_error(values),
        "interval": interval,
        "seeds": len(values),
    }


def summarize_variants(planned: Sequence[PlannedRun]) -> dict[str, dict[str, dict[str, Any]]]:
    """By variant and figure. Raises AnalysisError."""
    summaries: dict[str, list[Mapping[str, Any]]] = {}
    for run in planned:
        summaries.setdefault(run.variant, []).append(read_summary(run.folder) or {})
    return {
        variant: {
            name: summarize_figure([each[name] for each in of_variant if each.get(name) is not None])
            for name in FIGURES
        }
        for variant, of_variant in summaries.items()
    }


def read_curves(planned: Sequence[PlannedRun]) -> dict[str, list[RunMetrics]]:
    """By variant: one of each seed. Raises AnalysisError."""
    curves: dict[str, list[RunMetrics]] = {}
    for run in planned:
        curves.setdefault(run.variant, []).append(read_metrics(run.folder, require_steps=True))
    return curves


def run_experiment(name: str, planned: Sequence[PlannedRun], config: Path, folder: Path) -> dict[str, Any]:
    """Raises AnalysisError, CalledProcessError, OSError."""
    for each in planned:
        run_planned(each, config)
    seeds = len({each.seed for each in planned})
    picture = draw_variants(EXPERIMENTS[name].title, read_curves(planned), seeds, folder / "curves.png")
    print(f"picture: {picture}")
    figures = {"experiment": name, "seeds": seeds, "variants": summarize_variants(planned)}
    (folder / "figures.json").write_text(json.dumps(figures, indent=2))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", metavar="NAME", choices=list(EXPERIMENTS), help=", ".join(EXPERIMENTS))
    parser.add_argument("--seeds", type=int, default=5, metavar="N", help="0 to N - 1 (default 5)")
    parser.add_argument("--config", type=Path, default=Path("configs/tiny.toml"))
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for all runs")
    parser.add_argument("--runs", type=Path, default=Path("runs/experiments"), metavar="FOLDER")
    parser.add_argument("--quick", action="store_true", help="one seed, and runs of three short steps")
    options = parser.parse_args()
    if options.seeds < 1:
        parser.error(f"--seeds must be at least 1: {options.seeds}")
    name = options.name
    folder = options.runs.resolve() / (f"{name}-quick" if options.quick else name)
    folder.mkdir(parents=True, exist_ok=True)
    seeds, last = (1, QUICK) if options.quick else (options.seeds, ())
    planned = list(plan_runs(EXPERIMENTS[name], seeds, folder, options.set, last))
    try:
        figures = run_experiment(name, planned, options.config, folder)
    except (AnalysisError, OSError) as error:
        sys.exit(f"{name}: {error}")
    except subprocess.CalledProcessError as error:
        sys.exit(f"{name}: the run ended with exit code {error.returncode}; the same command continues after a remedy")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
