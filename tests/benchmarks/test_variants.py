"""The experiments with variants: planned runs, reuse of finished runs, figures and curves."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asterism.configs.load import load_run
from benchmarks.experiments.planned_runs import COLD_STARTS, EXPERIMENTS, VARIANTS, PlannedRun, plan_runs
from benchmarks.experiments.recorded_runs import RecordedRun, compute_recipe, find_recorded, read_recorded, record_run
from benchmarks.experiments.variant_curves import draw_variants, stack_seeds
from benchmarks.experiments.variants import run_planned, summarize_figure, summarize_variants

TINY = Path(__file__).parents[2] / "configs" / "tiny.toml"
PAIR = EXPERIMENTS["roc"]


@pytest.mark.parametrize("is_quick", [False, True], ids=["full", "quick"])
@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_planned_run_has_a_valid_configuration(name: str, is_quick: bool, tmp_path: Path) -> None:
    experiment = EXPERIMENTS[name]
    planned = list(plan_runs(experiment, 2, tmp_path, last=experiment.quick if is_quick else ()))
    cold_starts = {VARIANTS[variant].cold_start for variant in EXPERIMENTS[name].labels}
    assert len(planned) == len({each.folder for each in planned})
    assert len(planned) == 2 * (len(EXPERIMENTS[name].labels) + len(cold_starts))
    for each in planned:
        run = load_run(TINY.parents[1] / experiment.config, each.settings)
        assert (Path(run.runs_folder) / run.name, run.seed) == (each.folder, each.seed)
        assert (run.rl.steps == 0) == (not each.variant or each.variant == "words_twice")
        assert (run.sft.steps == 0) == bool(each.variant)


def test_variants_start_from_the_cold_start_of_their_seed(tmp_path: Path) -> None:
    cold, roc, grpo, *_ = plan_runs(PAIR, 2, tmp_path)
    assert cold.folder == tmp_path / "cold_demo_0"
    for planned in (roc, grpo):
        run = load_run(TINY, planned.settings)
        assert run.model.checkpoint == str(cold.folder / "checkpoints" / "step_000000")
        assert run.data.train == str(cold.folder / "data" / "train.jsonl")
        assert run.roc.enabled == (planned is roc)


def test_experiments_share_the_runs_of_equal_variants(tmp_path: Path) -> None:
    settings = [{run.folder: run.settings for run in plan_runs(each, 1, tmp_path)} for each in EXPERIMENTS.values()]
    for first in settings:
        for second in settings:
            for folder in first.keys() & second.keys():
                assert first[folder] == second[folder]


def test_every_cold_start_belongs_to_a_variant() -> None:
    assert {variant.cold_start for variant in VARIANTS.values()} == set(COLD_STARTS)
    assert {name for experiment in EXPERIMENTS.values() for name in experiment.labels} == set(VARIANTS)


def test_settings_of_a_variant_override_the_command_line(tmp_path: Path) -> None:
    *_, grpo = plan_runs(PAIR, 1, tmp_path, ["roc.enabled=true", "rl.prompts=2"])
    run = load_run(TINY, grpo.settings)
    assert (run.roc.enabled, run.rl.prompts) == (False, 2)


def write_run(folder: Path, rewards: Sequence[float | None], **summary: Any) -> Path:
    folder.mkdir()
    fields = {"kind": "step", "overlong_share": 0.25}
    lines = [{**fields, "step": step, "reward": reward} for step, reward in enumerate(rewards, 1)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def test_a_finished_run_with_the_same_settings_is_not_repeated(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    planned = next(plan_runs(PAIR, 1, tmp_path))
    write_run(planned.folder, [0.5], reward_end=0.5)
    config = tmp_path / "missing.toml"  # a run of this file would fail
    command = ["run", str(config), *(part for each in planned.settings for part in ("--set", each))]
    (tmp_path / "cold_demo_0.json").write_text(json.dumps(command))
    run_planned(planned, config)
    assert "finished before" in capsys.readouterr().out


def record(folder: Path, name: str, seed: int, rewards: Sequence[float | None], **summary: Any) -> RecordedRun:
    """Record a written run, in a file of the folder."""
    planned = PlannedRun(name, seed, write_run(folder / f"{name}_{seed}", rewards, **summary), ())
    return record_run(planned, TINY, folder / "results.jsonl")


def test_a_recorded_run_needs_no_folder_and_another_recipe_runs_again(tmp_path: Path) -> None:
    """Places are not part of a recipe; other settings and the configuration are."""
    settings = ("rl.steps=2", "name=a_1", f"runs_folder={tmp_path}")
    planned, results = (
        PlannedRun("a", 1, write_run(tmp_path / "a_1", [0.5, None]), settings),
        tmp_path / "results.jsonl",
    )
    line = {"kind": "evaluation", "step": 2, "label": "end_sampled", "accuracy": 0.5, "set words: accuracy": 0.25}
    with (planned.folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    run = record_run(planned, TINY, results)
    assert (run.figures["words_end"], run.curves["reward"]) == (0.25, [0.5, None])
    moved = planned._replace(folder=Path("elsewhere"), settings=("rl.steps=2", "name=b", "runs_folder=elsewhere"))
    assert find_recorded(read_recorded(results), moved, TINY) == run
    assert find_recorded(read_recorded(results), planned._replace(settings=("rl.steps=3",)), TINY) is None
    assert find_recorded(read_recorded(results), planned._replace(seed=2), TINY) is None
    assert find_recorded(read_recorded(results), planned, TINY.with_name("tiny_lora.toml")) is None


def test_a_recipe_contains_the_programs_beside_its_configuration_and_the_models_name(tmp_path: Path) -> None:
    config, program = tmp_path / "run.toml", tmp_path / "prepare.py"
    config.write_text('prepare.import = "prepare.py:Words"')
    program.write_text("first")
    planned = PlannedRun("a", 1, tmp_path, ("model.checkpoint=models/first",))
    before = compute_recipe(planned, config)
    assert compute_recipe(planned._replace(settings=("model.checkpoint=/elsewhere/first",)), config) == before
    assert compute_recipe(planned._replace(settings=("model.checkpoint=models/second",)), config) != before
    program.write_text("second")
    assert compute_recipe(planned, config) != before


def test_figures_are_means_over_seeds_and_null_without_a_value(tmp_path: Path) -> None:
    runs = [
        record(tmp_path, "a", seed, [0.1], reward_end=reward, err_positive_end=None)
        for seed, reward in enumerate((0.2, 0.4))
    ]
    figures = summarize_variants(runs)["a"]
    assert figures["reward_end"]["mean"] == pytest.approx(0.3)
    assert figures["reward_end"]["standard_error"] == pytest.approx(0.1)
    assert figures["reward_end"]["interval"] == pytest.approx((0.2, 0.4))
    assert figures["err_positive_end"] == {"mean": None, "standard_error": None, "interval": None, "seeds": 0}
    assert (figures["overlong_share_end"]["mean"], figures["overlong_share_end"]["seeds"]) == (0.25, 2)
    assert summarize_figure([0.5])["interval"] is None


def test_the_curves_of_seeds_end_at_the_last_common_step(tmp_path: Path) -> None:
    runs = [record(tmp_path, "a", seed, rewards) for seed, rewards in enumerate(([0.1, None, 0.3], [0.2, 0.4]))]
    stacked = stack_seeds(runs, "reward")
    assert stacked.shape == (2, 2)
    np.testing.assert_allclose(stacked[:, 0], [0.1, 0.2])
    assert math.isnan(stacked[0, 1])


@pytest.mark.slow
def test_the_picture_shows_all_variants(tmp_path: Path) -> None:
    runs = [record(tmp_path, "a", seed, [0.1 * seed, 0.3]) for seed in (1, 2)]
    path = draw_variants("title", {"a": runs, "b": runs[::-1]}, 2, tmp_path / "curves.png")
    assert path.read_bytes().startswith(b"\x89PNG")
