"""The programs for a GPU need only the packages of a machine with torch, and three wheels."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmarks.gpu.gpu_machine import build_environment, list_absent_modules
from tests.benchmarks.programs import ROOT, run_program

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

# The programs, the command, and the modules that a run with the process sandbox and the embedded engine imports.
MODULES = (
    *(f"benchmarks.gpu.{name}" for name in ("__main__", "check", "checks.check_table", "training", "serving", "runs")),
    *("benchmarks.gpu.machine_facts", "asterism.engine.inference.embedded_factory", "asterism.analysis.summary"),
    *(f"asterism.actors.{name}" for name in ("cli.main", "cli.run_command", "process", "executor")),
    *("asterism.engine.learner.learner", "asterism.engine.weight_transfer.weight_server"),
    *("asterism.sandbox.select_backend", "asterism.sandbox.fork_server_sandbox"),
    *(f"asterism.tasks.{name}" for name in ("tiny.prepare", "tiny.tiny_tokenizer", "hosting.task_services")),
)
PRINT_LOADED = "import sys, importlib; [importlib.import_module(name) for name in sys.argv[1:]]; print(*sys.modules)"


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return build_environment(tmp_path_factory.mktemp("site"))


def run(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_the_machine_lacks_packages_for_figures_containers_and_answer_checks() -> None:
    absent = list_absent_modules()
    assert {"polars", "aiodocker", "math_verify", "latex2sympy2_extended", "rensa"} <= absent
    assert not {"torch", "msgspec", "structlog", "zmq", "typer", "rich", "configs"} & absent


def test_runs_and_programs_can_be_imported_on_the_machine(environment: dict[str, str]) -> None:
    done = run(environment, "-c", PRINT_LOADED, *MODULES)
    assert done.returncode == 0, done.stderr
    assert not {"polars", "matplotlib", "aiodocker", "math_verify"} & set(done.stdout.split())


@pytest.mark.nightly  # `make test` runs the imports above, and tests/analysis/test_run_figures.py
def test_a_run_on_the_machine_ends_without_figures(environment: dict[str, str], tmp_path: Path) -> None:
    parameters = "prepare.parameters={num_train_questions = 64, num_test_questions = 16, num_sft_dialogues = 64}"
    settings = (parameters, "sandbox.backend=process", "sft.steps=2", "sft.batch_size=16")
    settings += ("rl.steps=1", "rl.prompts=2", "rl.rollouts=4")
    flags = [text for each in (*settings, f"runs_folder={tmp_path}") for text in ("--set", each)]
    checkout = {**environment, "PYTHONPATH": f"{ROOT}:{environment['PYTHONPATH']}"}
    done = run(checkout, "-m", "asterism.actors.cli.main", "run", "configs/tiny.toml", *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "demo"
    assert f"no curves: the package polars is not installed; with it, `asterism report {folder}` draws them" in (
        " ".join(done.stdout.split())
    )
    assert json.loads((folder / "summary.json").read_text())["replay_identical"] is True


@pytest.mark.nightly
def test_the_benchmark_and_its_runs_end_on_the_machine(environment: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "results.jsonl"
    figures = run_program("gpu --quick --only run_small,head --out", str(out), env=environment)
    assert figures["run_small.steps"] == 2
    assert figures["run_small.first_grad_norm"] > 0
    assert [json.loads(line)["section"] for line in out.read_text().splitlines()] == ["machine", "run_small", "head"]


@pytest.mark.nightly
def test_the_checks_pass_on_the_machine(environment: dict[str, str]) -> None:
    chosen = "float32_qwen3,segments,weights,shared_weights,non_finite,graphs,collectives,offload"
    result = run_program(f"gpu.check --device cpu --quick --only {chosen}", env=environment)
    assert result["passed"]
    assert set(result["seconds"]) == set(chosen.split(","))
