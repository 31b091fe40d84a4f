"""Metrics, curves, comparisons and the summary table of a run."""

import json
from pathlib import Path
from typing import Any

import matplotlib.image
import pytest

from asterism.analysis.cold_start_curves import draw_cold_start, list_file_losses
from asterism.analysis.compare import compare_runs, main
from asterism.analysis.curves import draw_curves, has_binary_reward
from asterism.analysis.metric_lines import AnalysisError
from asterism.analysis.metrics import get_column, read_metrics
from asterism.analysis.summary_table import build_summary_table, list_health_lines, read_summary
from tests.consoles import capture

SUMMARY: dict[str, Any] = {
    **{"seed": 3, "params": 452_096, "sft_s": 81.2, "rl_s": 75.0, "steps": 60, "pass1_start": 0.381},
    **{"pass1_end": 0.957, "greedy_start": 0.42, "greedy_end": 0.994, "err_positive_start": 0.331},
    **{"err_positive_end": None, "tokens_per_s": 15123.4, "trajectories_started": 18_432},
    **{"trajectories_finished": 18_430, "trajectories_failed": 2, "replay_identical": True},
}

pytestmark = pytest.mark.slow  # drawing with matplotlib takes seconds


def step(number: int, **values: float | None) -> dict[str, Any]:
    return {"kind": "step", "step": number, "reward": 0.5, "response_tokens": 60.0, "step_s": 1.0, **values}


def write_run(folder: Path, *lines: dict[str, Any], summary: dict[str, Any] | None = None) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def is_picture(path: Path) -> bool:
    """Return whether the file is a PNG and has an SVG next to it."""
    return path.read_bytes().startswith(b"\x89PNG") and b"<svg" in path.with_suffix(".svg").read_bytes()


class TestMetrics:
    def test_each_kind_of_line_has_its_own_table(self, tmp_path: Path):
        evaluation = {"kind": "evaluation", "label": "start_greedy", "accuracy": 0.4}
        sft = {"kind": "sft", "step": 1, "loss": 2.5}
        metrics = read_metrics(write_run(tmp_path / "a", sft, evaluation, step(1), step(2)))
        assert (metrics.run, metrics.lines.evaluations) == ("a", {"start_greedy": 0.4})
        assert metrics.sft["loss"].to_list() == [2.5]
        assert metrics.steps["step"].to_list() == [1, 2]

    def test_a_repeated_step_replaces_the_earlier_one(self, tmp_path: Path):
        run = write_run(tmp_path, step(1), step(2, reward=0.1), step(3), step(2, reward=0.9))
        assert read_metrics(run).steps["step"].to_list() == [1, 2, 3]
        assert get_column(read_metrics(run).steps, "reward").to_list() == [0.5, 0.9, 0.5]

    def test_an_incomplete_last_line_is_ignored(self, tmp_path: Path):
        run = write_run(tmp_path, step(1))
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"kind": "step", "st')
        assert read_metrics(run).steps.height == 1

    @pytest.mark.parametrize("bad", ['{"kind": "st', "3", '{"step": 1}', '{"kind": "step"}', '{"kind": "evaluation"}'])
    def test_any_other_malformed_line_is_an_error_with_its_number(self, tmp_path: Path, bad: str):
        (tmp_path / "metrics.jsonl").write_text(f"{json.dumps(step(1))}\n{bad}\n{json.dumps(step(2))}\n")
        with pytest.raises(AnalysisError, match=r"metrics\.jsonl, line 2: "):
            read_metrics(tmp_path)

    def test_a_missing_column_is_null(self, tmp_path: Path):
        steps = read_metrics(write_run(tmp_path, step(1), step(2, entropy=0.5))).steps
        assert get_column(steps, "entropy").to_list() == [None, 0.5]
        assert get_column(steps, "weights_s").to_list() == [None, None]

    def test_the_error_names_a_folder_without_metrics(self, tmp_path: Path):
        with pytest.raises(AnalysisError, match=r"metrics\.jsonl: no such file"):
            read_metrics(tmp_path)


class TestCurves:
    def test_the_curves_are_drawn_into_the_runs_folder(self, tmp_path: Path):
        steps = [
            step(n, errors_in_positives=0.3, groups=16, groups_rejected=2, groups_lost=1, rollout_s=0.5)
            for n in range(1, 13)
        ]
        end = {"kind": "evaluation", "label": "end_sampled", "accuracy": 0.9}
        path = draw_curves(write_run(tmp_path / "demo", *steps, end))
        assert path == tmp_path / "demo" / "curves.png"
        assert is_picture(path)
        first = path.with_suffix(".svg").read_bytes()
        assert draw_curves(tmp_path / "demo").with_suffix(".svg").read_bytes() == first

    def test_a_binary_reward_is_drawn_with_accuracies_and_a_shaped_reward_separately(self, tmp_path: Path):
        evaluation = {"kind": "evaluation", "label": "start_sampled", "accuracy": 0.75, "reward": 0.75}
        binary = write_run(tmp_path / "binary", evaluation, step(1, positive_share=0.5))
        shaped = write_run(
            tmp_path / "shaped",
            {**evaluation, "reward": -0.2},
            {"kind": "evaluation", "label": "step_sampled", "step": 1, "accuracy": 0.5, "reward": 0.1},
            step(1, positive_share=0.75, reward=-1.5, **{"reward: correct": 0.5, "reward: length": -2.0}),
        )
        assert [has_binary_reward(read_metrics(folder)) for folder in (binary, shaped)] == [True, False]
        heights = [matplotlib.image.imread(draw_curves(folder)).shape[0] for folder in (binary, shaped)]
        assert heights[1] > heights[0]

    def test_one_step_with_few_measurements_can_be_drawn(self, tmp_path: Path):
        assert is_picture(draw_curves(write_run(tmp_path, step(1, errors_in_positives=None))))

    def test_a_run_without_steps_is_refused(self, tmp_path: Path):
        with pytest.raises(AnalysisError, match="no RL step yet"):
            draw_curves(write_run(tmp_path, {"kind": "sft", "step": 1, "loss": 2.0}))


class TestColdStartCurves:
    def test_losses_of_training_validation_and_files_are_drawn(self, tmp_path: Path):
        lines = [
            {"kind": "sft", "step": number, "loss": 3.0 / number, "grad_norm": 1.0, "lr": 1e-5, "tokens_per_s": 900.0}
            | {"tokens": 500.0, "mfu": 0.4, "file chat: loss": 2.0 / number}
            | ({"file calls: loss": 4.0 / number, "validation_loss": 3.5 / number} if number % 3 == 0 else {})
            for number in range(1, 13)
        ]
        folder = write_run(tmp_path / "demo", *lines)
        assert draw_cold_start(folder) == folder / "cold_start.png"
        assert is_picture(folder / "cold_start.png")
        files = list_file_losses(read_metrics(folder).sft)
        assert set(files) == {"chat", "calls"}
        assert files["calls"].drop_nulls().to_list() == [4.0 / number for number in (3, 6, 9, 12)]

    def test_a_step_without_validation_files_and_mfu_can_be_drawn(self, tmp_path: Path):
        assert is_picture(draw_cold_start(write_run(tmp_path, {"kind": "sft", "step": 1, "loss": 2.0})))

    def test_a_run_without_a_cold_start_is_refused(self, tmp_path: Path):
        with pytest.raises(AnalysisError, match="no step of the cold start yet"):
            draw_cold_start(write_run(tmp_path, step(1)))


class TestComparison:
    def test_two_runs_share_a_figure_and_a_summary_by_folder_name(self, tmp_path: Path):
        roc = write_run(tmp_path / "roc", step(1), step(2), summary=SUMMARY)
        grpo = write_run(tmp_path / "grpo", step(1), summary={**SUMMARY, "seed": 4})
        picture, summary = compare_runs([roc, grpo], tmp_path / "both")
        assert is_picture(picture)
        assert json.loads(summary.read_text()) == {"roc": SUMMARY, "grpo": {**SUMMARY, "seed": 4}}
        assert (picture.parent, picture.name, summary.name) == (tmp_path / "both", "curves.png", "summary.json")

    def test_the_error_names_a_missing_summary_and_no_file_is_written(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ):
        roc = write_run(tmp_path / "roc", step(1), summary=SUMMARY)
        grpo = write_run(tmp_path / "grpo", step(1))
        assert main([str(roc), str(grpo), "--into", str(tmp_path / "both")]) == 2
        assert capsys.readouterr().err.startswith(f"compare: {grpo}/summary.json: no such file")
        assert not (tmp_path / "both").exists()

    @pytest.mark.parametrize(("parents", "names"), [("ab", "roc, roc"), ("a", "roc")])
    def test_one_run_and_runs_with_the_same_folder_name_are_refused(self, tmp_path: Path, parents: str, names: str):
        runs = [write_run(tmp_path / parent / "roc", step(1), summary=SUMMARY) for parent in parents]
        with pytest.raises(AnalysisError, match=f"need two or more runs with different folder names, got: {names}$"):
            compare_runs(runs, tmp_path / "both")


def shown(summary: dict[str, Any]) -> dict[str, list[str]]:
    """Return the non-empty cells of each row, by label."""
    text = capture(lambda console: console.print(build_summary_table(summary)), 100)
    rows = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in text.splitlines()]
    return {row[0]: row[1:] for row in rows if row}


class TestSummaryTable:
    def test_results_before_and_after_rl_share_a_row(self):
        rows = shown(SUMMARY)
        assert rows["correct answers, sampled"] == ["38.1%", "95.7%"]
        assert rows["correct answers, greedy"] == ["42.0%", "99.4%"]
        assert rows["60 RL steps"] == ["75 s, 1.25 s each"]
        assert rows["replay of the event logs"] == ["identical"]

    def test_a_shaped_reward_comes_first_with_its_components_and_success_rule(self):
        rewards = {
            "sampled": {"start": 0.4, "end": 0.9},
            "sampled: correct": {"start": 0.25, "end": 0.75},
            "greedy": {"start": 0.5, "end": None},
            "greedy: correct": {"start": 0.25, "end": 0.75},
        }
        shaped = {**SUMMARY, "headline": "reward", "success": "reward > 0", "success_is_default": True}
        rows = shown({**shaped, "evaluation_rewards": rewards})
        names = list(rows)
        assert names.index("reward, sampled") < names.index("correct, sampled") < names.index("reward > 0, sampled")
        assert rows["reward, sampled"] == ["0.400", "0.900"]
        assert rows["reward, greedy"] == ["0.500", "-"]
        assert rows["correct, sampled"] == ["0.250", "0.750"]
        assert rows["reward > 0, sampled"] == ["38.1%", "95.7%"]
        assert "correct answers, sampled" not in rows
        explicit = shown({**shaped, "success": "correct >= 1", "success_is_default": False})
        assert explicit["correct answers, sampled"] == ["38.1%", "95.7%"]

    def test_a_missing_measurement_is_a_dash(self):
        assert shown(SUMMARY)["tool errors if correct, last 10 steps"] == ["33.1%", "-"]
        assert shown({})["trajectories"] == ["-"]

    def test_unaccounted_trajectories_are_reported(self):
        assert shown(SUMMARY)["trajectories"] == ["18,430 finished, 2 failed"]
        lost = {**SUMMARY, "trajectories_started": 18_437}
        assert shown(lost)["trajectories"] == ["18,430 finished, 2 failed, 5 unaccounted for"]

    def test_health_reports_are_listed_by_check_and_step_before_their_messages(self):
        assert shown(SUMMARY)["health checks"] == ["-"]
        assert shown({**SUMMARY, "health": []})["health checks"] == ["no problem"]
        reports = [
            {"step": step, "check": check, "action": "warn", "message": f"health.{check}: [0.1]"}
            for step, check in ((3, "entropy"), (7, "reward_drop"))
        ]
        assert shown({**SUMMARY, "health": reports})["health checks"] == ["entropy (step 3), reward_drop (step 7)"]
        lines = list_health_lines({"health": reports})
        assert lines == ["step 3: health.entropy: [0.1]", "step 7: health.reward_drop: [0.1]"]
        assert list_health_lines({}) == []

    def test_the_error_names_a_malformed_summary(self, tmp_path: Path):
        (tmp_path / "summary.json").write_text("{")
        with pytest.raises(AnalysisError, match=r"summary\.json: "):
            read_summary(tmp_path)
