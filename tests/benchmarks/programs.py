"""Runs programs of the benchmarks as a user does."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def run_program(line: str, *more: str, code: int = 0, env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Run `python -m benchmarks.LINE`, check the exit code, and return the figures of the last line."""
    command = [sys.executable, "-m", *f"benchmarks.{line}".split(), *more]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])
