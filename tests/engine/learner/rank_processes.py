"""Starts the ranks of a test program."""

import os
import subprocess
import sys


def run_ranks(ranks: int, module: str, *arguments: str) -> None:
    """Run `python -m tests.engine.learner.MODULE ARGUMENTS` on each rank, with torchrun for several ranks."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *launcher, "-m", f"tests.engine.learner.{module}", *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, check=False)
    assert done.returncode == 0, f"exit code {done.returncode}: {done.stderr}"
