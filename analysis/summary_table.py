"""The table that ends a run: what `summary.json` says, the beginning beside the end, then what it took."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from rich.box import SIMPLE_HEAD
from rich.table import Table

from analysis.metrics import AnalysisError, read_bytes
from configs.run_folder import RunFolder

_UNKNOWN = "-"  # not measured: there was nothing to measure, or the run left it out
_REPLAY = {True: "identical", False: "[bold red]differs[/]", None: "not checked"}


def read_summary(run_folder: Path) -> dict[str, Any]:
    """Raises AnalysisError."""
    path = RunFolder(run_folder).summary
    try:
        return msgspec.json.decode(read_bytes(path), type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise AnalysisError(f"{path}: {error}") from None


def summary_table(summary: Mapping[str, Any]) -> Table:
    """Shows "-" for a key that is null or absent, and nothing of the keys that it does not know."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    table.add_column("before RL", justify="right")
    table.add_column("after", justify="right", style="bold")
    for label, key in (
        ("right answers, sampled", "pass1"),
        ("right answers, greedy", "greedy"),
        ("tool errors in right answers", "err_positive"),
    ):
        ends = [_format(summary.get(f"{key}_{end}"), ".1%") for end in ("start", "end")]
        table.add_row(label, *ends, end_section=key == "err_positive")
    for label, value in _facts(summary):
        table.add_row(label, "", value)
    return table


def _facts(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    steps, rl_s = summary.get("steps"), summary.get("rl_s")
    each = f", {rl_s / steps:.2f} s each" if steps and rl_s is not None else ""
    return [
        ("parameters", _format(summary.get("params"), ",")),
        ("seed", _format(summary.get("seed"), "d")),
        ("cold start", _format(summary.get("sft_s"), ".0f", " s")),
        (f"{_format(steps, 'd')} RL steps", _format(rl_s, ".0f", " s") + each),
        ("generation", _format(summary.get("tokens_per_s"), ",.0f", " tokens/s")),
        ("trajectories", _trajectories(summary)),
        ("executed code was held by", _isolation(summary.get("isolation"))),
        ("replay of the event logs", _REPLAY[summary.get("replay_identical")]),
    ]


def _isolation(isolation: Mapping[str, Any] | None) -> str:
    """The backend, and in red what else should stand between the code and the machine."""
    if not isolation:
        return _UNKNOWN
    lacks = [name for name in ("namespaces", "seccomp") if not isolation.get(name)]
    return f"{isolation['backend']}" + "".join(f"[bold red], no {name}[/]" for name in lacks)


def _trajectories(summary: Mapping[str, Any]) -> str:
    """Says so where the numbers do not add up: every trajectory that starts ends once."""
    started, finished, failed = (summary.get(f"trajectories_{end}") for end in ("started", "finished", "failed"))
    if started is None or finished is None or failed is None:
        return _UNKNOWN
    parts = [f"{finished:,} finished"]
    if failed:
        parts.append(f"{failed:,} failed")
    if aborted := summary.get("trajectories_aborted"):
        parts.append(f"{aborted:,} aborted when their step had ended")
    if abandoned := summary.get("trajectories_abandoned"):
        parts.append(f"{abandoned:,} abandoned when the run was ended, and done again")
    if missing := started - finished - failed - (aborted or 0) - (abandoned or 0):
        parts.append(f"[bold red]{missing:,} unaccounted for[/]")
    return ", ".join(parts)


def _format(value: float | None, spec: str, unit: str = "") -> str:
    return _UNKNOWN if value is None else f"{value:{spec}}{unit}"
