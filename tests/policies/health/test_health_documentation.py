"""docs/health.md has a row for every check, with the limits, metrics and keys of the code."""

import re
from pathlib import Path

import pytest
from msgspec.structs import asdict

from asterism.configs.schema.health import HealthConfig
from asterism.configs.schema.run_config import RunConfig
from asterism.configs.schema.schema_tree import find_annotation
from asterism.policies.health.health_checks import HEALTH_CHECKS
from asterism.policies.health.step_history import METRICS_READ, TOOL_PREFIX

DOCS = Path(__file__).parents[3] / "docs"
KEY = re.compile(r"\b([a-z]+(?:\.[a-z_]+)+)\b")
NO_KEYS = {"metrics.jsonl"}
# configuration keys that several checks share
COMMON = {"window_steps", "solved_share"}


def read_rows() -> dict[str, list[str]]:
    """Return, by check, the cells of its row in the table."""
    section = (DOCS / "health.md").read_text().partition("\n## Checks\n")[2].partition("\n## ")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line.startswith("| `")
    ]
    return {name.strip("`"): cells for name, *cells in rows}


def list_quoted(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def test_every_check_has_a_row_in_the_order_of_the_code() -> None:
    assert list(read_rows()) == list(HEALTH_CHECKS)


@pytest.mark.parametrize("check", HEALTH_CHECKS)
def test_the_limits_of_a_row_are_the_defaults(check: str) -> None:
    defaults = asdict(HealthConfig())
    limits = dict(re.findall(r"`(\w+)` = ([\d.]+)", read_rows()[check][1]))
    assert limits
    assert {name: float(value) for name, value in limits.items()} == {name: defaults[name] for name in limits}


def test_every_key_of_the_table_is_a_check_or_a_documented_limit() -> None:
    limits = {name for cells in read_rows().values() for name in list_quoted(cells[1])}
    assert {*HEALTH_CHECKS, *limits, *COMMON} == set(HealthConfig.__struct_fields__)


@pytest.mark.parametrize("check", HEALTH_CHECKS)
def test_the_metrics_of_the_rows_are_read_by_the_checks_and_documented(check: str) -> None:
    metrics = set(list_quoted(read_rows()[check][0]))
    assert metrics
    assert {name for name in metrics if not name.startswith(TOOL_PREFIX)} <= set(METRICS_READ)
    described = (DOCS / "metrics.md").read_text()
    assert {name for name in metrics if f"`{name}`" not in described} == set()


@pytest.mark.parametrize("check", HEALTH_CHECKS)
def test_every_key_to_change_exists_and_is_named_in_message_and_page(check: str) -> None:
    in_message = set(KEY.findall(HEALTH_CHECKS[check].change)) - NO_KEYS
    in_page = {name for name in list_quoted(read_rows()[check][-1]) if KEY.fullmatch(name)} - NO_KEYS
    assert in_message == in_page
    assert in_message
    assert {key for key in in_message if find_annotation(RunConfig, key.split(".")) is None} == set()
