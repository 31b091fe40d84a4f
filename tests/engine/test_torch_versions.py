"""Tests: every use of torch type-checks with the oldest supported version of torch and with a version in between.

The published packages are downloaded once, 500 to 900 MB each. Their sources stay in build/torch-sources/, 50 MB each.
"""

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import msgspec
import pytest

ROOT = Path(__file__).parents[2]
CHECKED = ("engine", "policies", "benchmarks/gpu", "analysis/planning")
# Rules that report a missing function, attribute or parameter. Other rules depend on how well a version is typed.
RULES = ("reportAttributeAccessIssue", "reportCallIssue", "reportArgumentType", "reportMissingImports")
# Uses that the code makes only if torch has the function.
GUARDED = {"2.9.0": {("engine/model/experts.py", '"grouped_mm" is not a known attribute')}}


class Diagnostic(msgspec.Struct):
    file: str
    message: str
    rule: str = ""


class Report(msgspec.Struct, rename="camel"):
    general_diagnostics: list[Diagnostic]


def download_sources(version: str) -> Path:
    """Return the folder of the Python files of the package, without compiled libraries."""
    folder = ROOT / "build/torch-sources" / version
    if folder.exists():
        return folder
    wheels, partial = folder.with_suffix(".wheels"), folder.with_suffix(".partial")
    for each in (wheels, partial):
        shutil.rmtree(each, ignore_errors=True)
    package = ("--no-deps", "--only-binary=:all:", "--dest", str(wheels), f"torch=={version}")
    subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", *package], check=True, timeout=1200)
    (wheel,) = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(partial, [name for name in archive.namelist() if name.endswith((".py", ".pyi"))])
    shutil.rmtree(wheels)
    partial.rename(folder)
    return folder


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("version", ["2.9.0", "2.11.0"])
def test_every_use_of_torch_exists_in_the_supported_versions(version: str) -> None:
    settings = {
        "extends": "../../pyproject.toml",
        "include": [f"../../{folder}" for folder in CHECKED],
        "extraPaths": [str(download_sources(version)), str(ROOT)],
        "venvPath": str(ROOT),
    }
    config = ROOT / "build/torch-sources" / f"pyright-{version}.json"
    config.write_text(json.dumps(settings))
    command = [sys.executable, "-m", "pyright", "--project", str(config), "--outputjson"]
    finished = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    found = msgspec.json.decode(finished.stdout, type=Report).general_diagnostics
    problems = {
        (str(Path(each.file).relative_to(ROOT)), each.message.partition(" of module")[0])
        for each in found
        if each.rule in RULES
    }
    assert problems == GUARDED.get(version, set())
