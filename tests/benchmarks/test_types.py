"""Pyright checks the types of benchmarks/ here, and those of the product in `make check`, which has 40 seconds.

The check takes 20 s of CPU time for the packages that benchmarks/ imports.
"""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_the_types_of_the_programs_are_right() -> None:
    pyright = Path(sys.executable).with_name("pyright")
    checked = subprocess.run(
        [pyright, "-p", Path("benchmarks")], capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert checked.returncode == 0, checked.stdout
    assert "0 errors" in checked.stdout
