"""The benchmark of strict determinism, in its short form: it ends, and its figures are there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


def test_the_last_line_holds_the_engines_figures() -> None:
    command = [sys.executable, "-m", "benchmarks.determinism", "--quick"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    kinds = ("strict", "tiles_64", "tiles_16", "tiles_4")
    ratios = {f"{kind}_over_fast_{batch}" for kind in kinds for batch in (1, 16, 64, 256)}
    assert set(figures) == {"trial_s", "tile_rows", *ratios}
    assert all(figures[name] > 0 for name in ratios)
    assert figures["tile_rows"] in (0, 64, 16, 4)
