"""`asterism config` prints all keys with values and descriptions."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from asterism.actors.cli.config_command import print_config, read_descriptions
from asterism.configs.load import load_run
from asterism.configs.schema.run_config import RunConfig
from asterism.configs.schema.schema_tree import Section, find_section, get_field_types
from tests.actors.cli.invoking import read_output
from tests.actors.runs.running import ROOT, asterism


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides", [[], ["learner.optimizer.lr=2e-5", "sglang.environment.A=x", 'dialogue.tools=["jupyter_code"]']]
)
def test_the_printed_configuration_is_a_file_with_the_same_values(tmp_path: Path, overrides: list[str]) -> None:
    file = io.StringIO()
    print_config(ROOT / "configs/tiny.toml", overrides, Console(file=file, width=40))
    printed = tmp_path / "printed.toml"
    printed.write_text(file.getvalue())
    assert load_run(printed) == load_run(ROOT / "configs/tiny.toml", overrides)


@pytest.mark.slow
def test_every_key_has_a_description() -> None:
    described: dict[str, str] = {}

    def describe(section: type[Section], prefix: str) -> None:
        descriptions = read_descriptions(section)
        assert set(descriptions) == set(get_field_types(section))
        for key, kind in get_field_types(section).items():
            if inner := find_section(kind):
                describe(inner, f"{prefix}{key}.")
            else:
                described[f"{prefix}{key}"] = descriptions[key]

    describe(RunConfig, "")
    assert [key for key, text in described.items() if len(text) < 5] == []


@pytest.mark.slow
def test_the_command_has_a_version_and_its_help_lists_run_first() -> None:
    assert asterism("--version").stdout.startswith("asterism ")
    assert read_output("run", "-h") == read_output("run", "--help") != ""
    shown = read_output("-h")
    assert "--install-completion" in shown
    assert re.findall(r"^╭─ (\w+)", shown, re.MULTILINE) == ["Options", "Train", "Prepare", "Look", "Serve", "Machines"]
    assert re.findall(r"─ Train ─+╮\n│ (\w+)", shown) == ["run"]
