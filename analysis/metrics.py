"""Reads `metrics.jsonl`: one JSON object per line, of kind "step", "sft", "evaluation", "lengths" or "health"."""

from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import polars as pl

from configs.errors import UnusableInput
from configs.run_folder import RunFolder


class AnalysisError(UnusableInput):
    """A file is missing or malformed; `str(error)` names the file and the line."""


class RunMetrics(NamedTuple):
    run: str  # name of the folder
    steps: pl.DataFrame  # one row per RL step, in order
    sft: pl.DataFrame  # one row per step of the cold start, in order
    evaluations: dict[str, float | None]  # label -> accuracy of the last one; None if every trajectory failed
    step_accuracies: dict[int, float]  # step -> accuracy of the evaluation during training
    task_rewards: dict[str, dict[str, float]]  # label -> mean reward of an evaluation, by task
    health: list[dict[str, Any]]  # reports of health checks: step, check, action, message


def read_metrics(run_folder: Path, *, require_steps: bool = False) -> RunMetrics:
    """Raises AnalysisError. If a step ran twice, as after a resume, the later one counts."""
    path = RunFolder(run_folder).metrics
    lines = decode_metric_lines(path)
    steps = _build_step_frame(lines, "step")
    if require_steps and steps.is_empty():
        raise AnalysisError(f"{path}: no RL step yet")
    return RunMetrics(
        run=run_folder.resolve().name,
        steps=steps,
        sft=_build_step_frame(lines, "sft"),
        evaluations={line["label"]: line.get("accuracy") for line in lines if line["kind"] == "evaluation"},
        step_accuracies={
            line["step"]: line["accuracy"]
            for line in lines
            if line["kind"] == "evaluation" and line["label"].startswith("step_") and "accuracy" in line
        },
        task_rewards={line["label"]: _read_task_rewards(line) for line in lines if line["kind"] == "evaluation"},
        health=[_read_health_report(line) for line in lines if line["kind"] == "health"],
    )


def _read_health_report(line: dict[str, Any]) -> dict[str, Any]:
    return {key: line.get(key) for key in ("step", "check", "action", "message")}


def _read_task_rewards(line: dict[str, Any]) -> dict[str, float]:
    keys = (key for key in line if key.startswith("task ") and key.endswith(": reward"))
    return {key.removeprefix("task ").removesuffix(": reward"): line[key] for key in keys}


def compute_token_rate(steps: pl.DataFrame) -> float | None:
    """Generated tokens per second of generation: of `step_s` if rollouts run ahead of the learner, else of `rollout_s`."""
    seconds = get_column(steps, "step_s" if "staleness_max" in steps.columns else "rollout_s").sum()
    return float(get_column(steps, "generated_tokens").sum()) / float(seconds) if seconds else None


def get_column(frame: pl.DataFrame, name: str) -> pl.Series:
    """The column as float64; all null if no line has the key."""
    if name not in frame.columns:
        return pl.Series(name, [None] * frame.height, dtype=pl.Float64)
    return frame[name].cast(pl.Float64)


def _build_step_frame(lines: list[dict[str, Any]], kind: str) -> pl.DataFrame:
    latest = {line["step"]: line for line in lines if line["kind"] == kind}
    rows = [latest[step] for step in sorted(latest)]
    return pl.DataFrame(rows, infer_schema_length=None) if rows else pl.DataFrame({"step": []})


def decode_metric_lines(path: Path) -> list[dict[str, Any]]:
    """Without an incomplete last line, as a live or killed run leaves it. Raises AnalysisError."""
    texts = read_bytes(path).splitlines(keepends=True)
    lines: list[dict[str, Any]] = []
    for number, text in enumerate(texts, start=1):
        try:
            line = msgspec.json.decode(text, type=dict[str, Any])
            required = ("label",) if line["kind"] == "evaluation" else ("step",)
            _ = [line[key] for key in required]
        except msgspec.DecodeError as error:
            if not text.endswith(b"\n") and not isinstance(error, msgspec.ValidationError):
                break
            raise AnalysisError(f"{path}, line {number}: {error}") from None
        except KeyError as error:
            raise AnalysisError(f"{path}, line {number}: missing key {error}") from None
        lines.append(line)
    return lines


def read_bytes(path: Path) -> bytes:
    """Raises AnalysisError."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise AnalysisError(f"{path}: no such file; {path.parent} may not be a run folder") from None
    except OSError as error:
        raise AnalysisError(f"{path}: {error.strerror}") from None
