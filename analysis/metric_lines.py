"""Reads `metrics.jsonl`: one JSON object per line, of kind "step", "sft", "evaluation", "lengths" or "health"."""

from collections.abc import Mapping, Sequence
from math import fsum
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import msgspec

from asterism.configs.errors import UnusableInput
from asterism.configs.file_manifest import check_file
from asterism.configs.run_folder import RunFolder

Rows = Sequence[Mapping[str, Any]]
_HEALTH_KEYS = ("step", "check", "action", "message")


class AnalysisError(UnusableInput):
    """A file is missing or malformed; `str(error)` names the file and the line."""


class RunLines(NamedTuple):
    steps: list[dict[str, Any]]  # one per RL step, in order
    sft: list[dict[str, Any]]  # one per step of the cold start, in order
    evaluations: dict[str, float | None]  # label -> accuracy of the last evaluation; None if every trajectory failed
    step_accuracies: dict[int, float]  # step -> accuracy of the evaluation during training
    evaluation_values: dict[str, dict[str, Any]]  # label -> last line, for evaluations at the start and at the end
    step_rewards: dict[int, float]  # step -> mean reward of the evaluation during training
    task_rewards: dict[str, dict[str, float]]  # label -> mean reward of the evaluation by task
    health: list[dict[str, Any]]  # reports of health checks: step, check, action, message


def read_metric_lines(run_folder: Path) -> RunLines:
    """Read a run's metrics.jsonl. The later line of a step counts, for example after a resume. Raises AnalysisError."""
    lines = decode_metric_lines(RunFolder(run_folder).metrics)
    evaluations = [line for line in lines if line["kind"] == "evaluation"]
    return RunLines(
        steps=_select_steps(lines, "step"),
        sft=_select_steps(lines, "sft"),
        evaluations={line["label"]: line.get("accuracy") for line in evaluations},
        step_accuracies=_select_step_values(evaluations, "accuracy"),
        evaluation_values={line["label"]: line for line in evaluations if not line["label"].startswith("step_")},
        step_rewards=_select_step_values(evaluations, "reward"),
        task_rewards={line["label"]: _read_task_rewards(line) for line in evaluations},
        health=[{key: line.get(key) for key in _HEALTH_KEYS} for line in lines if line["kind"] == "health"],
    )


def list_values(rows: Rows, key: str) -> list[float]:
    """Return the numbers of the rows that have the key."""
    return [float(row[key]) for row in rows if row.get(key) is not None]


def compute_mean(rows: Rows, key: str) -> float | None:
    """Return the mean over the rows that have the key, or None if no row has it."""
    return fmean(values) if (values := list_values(rows, key)) else None


def compute_token_rate(rows: Rows) -> float | None:
    """Return generated tokens per second: of `step_s` if rollouts run ahead of the learner, else of `rollout_s`."""
    runs_ahead = any("staleness_max" in row for row in rows)
    seconds = fsum(list_values(rows, "step_s" if runs_ahead else "rollout_s"))
    return fsum(list_values(rows, "generated_tokens")) / seconds if seconds else None


def _select_steps(lines: Sequence[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    latest = {line["step"]: line for line in lines if line["kind"] == kind}
    return [latest[step] for step in sorted(latest)]


def _select_step_values(evaluations: Sequence[dict[str, Any]], key: str) -> dict[int, float]:
    return {line["step"]: line[key] for line in evaluations if line["label"].startswith("step_") and key in line}


def _read_task_rewards(line: dict[str, Any]) -> dict[str, float]:
    keys = (key for key in line if key.startswith("task ") and key.endswith(": reward"))
    return {key.removeprefix("task ").removesuffix(": reward"): line[key] for key in keys}


def decode_metric_lines(path: Path) -> list[dict[str, Any]]:
    """Read all lines. An incomplete last line of a live or killed run is ignored. Raises AnalysisError."""
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
    """Read a file. Raises AnalysisError, and DamagedFile if the run's manifest has another digest."""
    try:
        check_file(path)
        return path.read_bytes()
    except FileNotFoundError:
        raise AnalysisError(f"{path}: no such file; {path.parent} may not be a run folder") from None
    except OSError as error:
        raise AnalysisError(f"{path}: {error.strerror}") from None
