"""Find the SGLang environment of the tests. This module imports nothing of the project, because every
test run imports this module."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-sglang" / "bin" / "python"


def missing_for_sglang() -> str:
    """Return an error message if the environment is missing, or else an empty string."""
    return "" if PYTHON.exists() else f"there is no {PYTHON.relative_to(ROOT)}."
