"""Finds the tests' SGLang environment. Imports nothing of the project, because every test run
imports this module."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-sglang" / "bin" / "python"


def missing_for_sglang() -> str:
    """Return a message if the environment is missing, otherwise an empty string."""
    return "" if PYTHON.exists() else f"there is no {PYTHON.relative_to(ROOT)}."
