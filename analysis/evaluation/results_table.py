"""The table that `asterism eval` prints: one column per set of questions."""

from collections.abc import Mapping, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from asterism.analysis.evaluation.set_results import sort_levels

_UNKNOWN = "-"  # undefined value, such as a share of zero answers


def build_results_table(results: Mapping[str, Any]) -> Table:
    """Build the table from the content of results.json."""
    sets: Mapping[str, Mapping[str, Any]] = results["sets"]
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for name in sets:
        table.add_column(escape(name), justify="right")
    for label, cells in _build_rows(list(sets.values())):
        table.add_row(label, *cells)
    for level in sort_levels({level for each in sets.values() for level in each["by_difficulty"]}):
        cells = [_format(each["by_difficulty"].get(level, {}).get("avg"), ".1%") for each in sets.values()]
        table.add_row(f"  difficulty {escape(level)}", *cells)
    return table


def _build_rows(sets: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    passes = sorted({int(k) for each in sets for k in each["pass_at_k"]})
    rows = [
        ("questions x answers", [f"{each['questions']} x {each['samples']}" for each in sets]),
        ("avg@k", [f"{_format(each['avg'], '.1%')} ± {_format(each['standard_error'], '.1%')}" for each in sets]),
        ("  95% interval", [_format_interval(each["interval"]) for each in sets]),
        *((f"pass@{k}", [_format_pass(each, k) for each in sets]) for k in passes if k > 1),
        ("majority@k", [_format(each["majority"], ".1%") for each in sets]),
        ("without an answer", [_format(each["unanswered_share"], ".1%") for each in sets]),
        ("at the length limit", [_format(each["truncated_share"], ".1%") for each in sets]),
        ("response tokens", [_format((each["response_tokens"] or {}).get("mean"), ",.0f") for each in sets]),
        ("turns, calls", [f"{_format(each['turns'], '.1f')}, {_format(each['calls'], '.1f')}" for each in sets]),
        ("tool errors", [_format(each["call_error_share"], ".1%") for each in sets]),
        ("prompts over the limit", [str(each["questions_over_limit"]) for each in sets]),
        ("failed answers", [str(each["failed"]) for each in sets]),
    ]
    return [row for row in rows if row[0] not in ("prompts over the limit", "failed answers") or set(row[1]) != {"0"}]


def _format(value: float | None, form: str) -> str:
    return _UNKNOWN if value is None else format(value, form)


def _format_interval(interval: Sequence[float] | None) -> str:
    return _UNKNOWN if interval is None else f"{interval[0]:.1%} to {interval[1]:.1%}"


def _format_pass(each: Mapping[str, Any], k: int) -> str:
    by_k = {int(key): value for key, value in each["pass_at_k"].items()}
    return _format(by_k.get(k), ".1%")
