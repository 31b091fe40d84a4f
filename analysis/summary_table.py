"""Builds the table of a run's `summary.json`: results before and after RL, times and counts."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from asterism.analysis.metric_lines import AnalysisError, read_bytes
from asterism.configs.run_folder import RunFolder

_UNKNOWN = "-"  # not measured
_REPLAY_LABELS = {True: "identical", False: "[bold red]differs[/]", None: "not checked"}


def read_summary(run_folder: Path) -> dict[str, Any]:
    """Read the run's summary.json. Raises AnalysisError."""
    path = RunFolder(run_folder).summary
    try:
        return msgspec.json.decode(read_bytes(path), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise AnalysisError(f"{path}: {error}") from None


def build_summary_table(summary: Mapping[str, Any]) -> Table:
    """Build the table. A null or absent key is shown as "-", and unknown keys are ignored."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    table.add_column("before RL", justify="right")
    table.add_column("after", justify="right", style="bold")
    for label, ends in _build_reward_rows(summary):
        table.add_row(escape(label), *ends)
    successes = _name_successes(summary)
    for label, key in (
        (f"{successes}, sampled", "pass1"),
        (f"{successes}, greedy", "greedy"),
        ("tool errors if correct, last 10 steps", "err_positive"),
    ):
        ends = [_format(summary.get(f"{key}_{end}"), ".1%") for end in ("start", "end")]
        table.add_row(label, *ends)
    for name, rewards in (summary.get("tasks") or {}).items():
        ends = [_format(rewards.get(f"reward_{end}"), ".3f") for end in ("start", "end")]
        table.add_row(f"reward of {escape(name)}, sampled", *ends)
    table.add_section()
    for label, value in _build_fact_rows(summary):
        table.add_row(label, "", value)
    return table


def _build_reward_rows(summary: Mapping[str, Any]) -> list[tuple[str, list[str]]]:
    """List the mean rewards and components of a shaped reward; a binary reward is the share of correct answers."""
    if summary.get("headline") != "reward":
        return []
    rewards: Mapping[str, Mapping[str, float | None]] = summary.get("evaluation_rewards") or {}
    rows: list[tuple[str, list[str]]] = []
    for name in sorted(rewards, key=lambda name: ": " in name):
        sampling, _, component = name.partition(": ")
        if component and sampling != "sampled":
            continue
        label = f"  {component}, {sampling}" if component else f"reward, {sampling}"
        rows.append((label, [_format(rewards[name].get(end), ".3f") for end in ("start", "end")]))
    return rows


def _name_successes(summary: Mapping[str, Any]) -> str:
    """Return the rule of success of a shaped reward without evaluation.success, else "correct answers"."""
    is_shaped = summary.get("headline") == "reward"
    return summary["success"] if is_shaped and summary.get("success_is_default") else "correct answers"


def _build_fact_rows(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    steps, rl_s = summary.get("steps"), summary.get("rl_s")
    each = f", {rl_s / steps:.2f} s each" if steps and rl_s is not None else ""
    return [
        ("parameters", _format(summary.get("params"), ",")),
        ("seed", _format(summary.get("seed"), "d")),
        ("cold start", _format(summary.get("sft_s"), ".0f", " s")),
        (f"{_format(steps, 'd')} RL steps", _format(rl_s, ".0f", " s") + each),
        ("generation", _format(summary.get("tokens_per_s"), ",.0f", " tokens/s")),
        ("trajectories", _format_trajectories(summary)),
        ("restarts of processes", _format(summary.get("restarts"), "d")),
        ("health checks", _format_health(summary.get("health"))),
        ("code isolation", _format_isolation(summary.get("isolation"))),
        ("replay of the event logs", _REPLAY_LABELS[summary.get("replay_identical")]),
    ]


def _format_health(reports: Sequence[Mapping[str, Any]] | None) -> str:
    """List the checks with their steps; `list_health_lines` has the messages."""
    if reports is None:
        return _UNKNOWN
    found = ", ".join(f"{report['check']} (step {report['step']})" for report in reports)
    return f"[bold yellow]{escape(found)}[/]" if found else "no problem"


def list_health_lines(summary: Mapping[str, Any]) -> list[str]:
    """Return one line per report of a health check, to print under the table."""
    return [f"step {report['step']}: {report['message']}" for report in summary.get("health") or ()]


def _format_isolation(isolation: Mapping[str, Any] | None) -> str:
    """Format the backend, and in red the missing layers."""
    if not isolation:
        return _UNKNOWN
    missing = [name for name in ("namespaces", "seccomp") if not isolation.get(name)]
    return f"{isolation['backend']}" + "".join(f"[bold red], no {name}[/]" for name in missing)


def _format_trajectories(summary: Mapping[str, Any]) -> str:
    """Format the counts, with a warning if they do not add up: every trajectory ends exactly once."""
    started, finished, failed = (summary.get(f"trajectories_{end}") for end in ("started", "finished", "failed"))
    if started is None or finished is None or failed is None:
        return _UNKNOWN
    parts = [f"{finished:,} finished"]
    if failed:
        parts.append(f"{failed:,} failed")
    if aborted := summary.get("trajectories_aborted"):
        parts.append(f"{aborted:,} aborted at the end of their step")
    if abandoned := summary.get("trajectories_abandoned"):
        parts.append(f"{abandoned:,} abandoned at an interruption and restarted")
    if missing := started - finished - failed - (aborted or 0) - (abandoned or 0):
        parts.append(f"[bold red]{missing:,} unaccounted for[/]")
    return ", ".join(parts)


def _format(value: float | None, spec: str, unit: str = "") -> str:
    return _UNKNOWN if value is None else f"{value:{spec}}{unit}"
