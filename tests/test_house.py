"""Checks of the repository: import names, docstrings, layers, pinned packages and Make targets."""

import importlib.util
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from asterism.configs.choices.sink_kinds import SINK_KINDS

ROOT = Path(__file__).parent.parent
LAYERS = ("configs", "bus", "policies", "sandbox", "engine", "tasks", "actors", "analysis")


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.mark.parametrize("layer", LAYERS)
def test_generic_import_names_resolve_to_the_repository(layer: str):
    spec = importlib.util.find_spec(layer)
    assert spec is not None
    assert spec.origin == str(ROOT / layer / "__init__.py")


def test_every_file_starts_with_a_docstring_and_every_folder_has_an_init():
    files = {path for layer in LAYERS for path in (ROOT / layer).rglob("*.py")}
    assert [path for path in files if not re.match(r'(#!.*\n)?r?"""\S', path.read_text())] == []
    assert {path.parent / "__init__.py" for path in files} <= files


def test_no_layer_except_tasks_contains_the_module_name_of_the_demo():
    files = [path for layer in LAYERS if layer != "tasks" for path in (ROOT / layer).rglob("*.py")]
    naming = [path.name for path in files if "asterism.tasks.tiny" in path.read_text()]
    assert naming == ["renamed_keys.py"]  # contains the new name of the former table [tiny]


def test_every_layer_is_linted_typed_and_in_the_import_contract(project: dict[str, Any]):
    tool = project["tool"]
    ordered = [layer for line in tool["importlinter"]["contracts"][0]["layers"] for layer in line.split(" | ")]
    assert set(ordered) == set(LAYERS) == set(tool["ruff"]["lint"]["flake8-tidy-imports"]["banned-api"])
    assert {f"asterism/{layer}" for layer in LAYERS} == set(tool["pyright"]["include"])
    links = {path.name: path.resolve() for path in (ROOT / "asterism").iterdir() if path.is_symlink()}
    assert links == {layer: ROOT / layer for layer in LAYERS}


def test_the_pin_of_every_required_package_meets_its_requirement(project: dict[str, Any]):
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    pinned = {canonicalize_name(name): version for name, version in pins.items()}
    asked = project["project"]["dependencies"] + project["project"]["optional-dependencies"]["dev"]
    for requirement in map(Requirement, [*asked, *project["build-system"]["requires"]]):
        version = pinned[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement} is pinned to {version}"
        assert "+" not in version, f"{requirement.name} is pinned to one build of a version"


def test_every_metric_sink_that_needs_packages_has_an_extra(project: dict[str, Any]):
    with_packages = {name for name, sink in SINK_KINDS.items() if sink.packages}
    assert with_packages <= set(project["project"]["optional-dependencies"])


def test_every_make_target_with_a_program_installs_first():
    makefile = (ROOT / "Makefile").read_text()
    targets = dict(re.findall(r"^([a-z-]+):(.*?)##", makefile, flags=re.MULTILINE))
    assert {"setup", "demo", "ablation", "sandbox-image", "sandbox-image-local", "test", "check"} < set(targets)
    for target, prerequisites in targets.items():
        if target not in ("help", "clean"):
            assert "$(INSTALLED)" in prerequisites, target
