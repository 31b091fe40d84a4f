"""Where the SGLang of these tests is. Imports nothing of the project's: every run of tests asks whether it is there."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-sglang" / "bin" / "python"


def missing_for_sglang() -> str:
    """What of it is not there; nothing if all is."""
    return "" if PYTHON.exists() else f"there is no {PYTHON.relative_to(ROOT)}."
