"""docs/bridges.md names exactly the parameters of the bridges."""

import inspect
import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from asterism.tasks.bridges.mcp_tools import McpTools
from asterism.tasks.bridges.openenv_dialogue import OpenEnvDialogue

PAGE = (Path(__file__).parents[3] / "docs" / "bridges.md").read_text()
BRIDGES = {f"{each.__module__}:{each.__name__}": each for each in (McpTools, OpenEnvDialogue)}


def test_the_examples_have_parameters_that_the_bridges_accept() -> None:
    examples = [tomllib.loads(block) for block in re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)]
    assert {task["import"] for example in examples for task in example["tasks"]} == set(BRIDGES)
    for example in examples:
        for task in example["tasks"]:
            inspect.signature(BRIDGES[task["import"]]).bind(**task["parameters"])
            assert (
                "functions" in task.get("reward", {}) or BRIDGES[task["import"]] is not McpTools
            )  # McpTools gives no rewards


@pytest.mark.parametrize("bridge", BRIDGES.values(), ids=BRIDGES)
def test_every_parameter_is_in_the_table_of_its_bridge(bridge: Callable[..., object]) -> None:
    tables = [re.findall(r"^\| `(\w+)` \|", part, re.MULTILINE) for part in PAGE.split("| Parameter | Content |")[1:]]
    assert list(inspect.signature(bridge).parameters) in tables
