"""`asterism plan` reads a folder that has only config.json, and plans for named machines or this one."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import Result

from asterism.actors.cli.planning import local_machine
from asterism.actors.cli.planning.plan_command import EXIT_DOES_NOT_FIT, PlanOptions, choose_machines, plan_local_run
from asterism.analysis.planning.plan_inputs import GIB, GPUS, Assumptions
from asterism.analysis.simulation.cluster_model import GpuSpec
from asterism.configs.errors import UnusableInput
from asterism.configs.load import load_run
from benchmarks.support.qwen3_models import QWEN3
from tests.actors.cli.invoking import invoke
from tests.actors.runs.running import ROOT

CONFIG_1GPU = ROOT / "configs/qwen3_1.7b_1gpu.toml"
ONE_H100 = ("--gpu", "h100", "--gpus", "1")


@pytest.fixture
def plan(tmp_path: Path) -> Callable[..., Result]:
    """Return a function that invokes the command for the configuration of one GPU."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN3["1.7B"]))

    def plan_one_gpu(*arguments: str) -> Result:
        return invoke("plan", CONFIG_1GPU, "--set", f"model.checkpoint={tmp_path}", *arguments)

    return plan_one_gpu


def read_plan(path: Path) -> dict[str, Any]:
    return msgspec.json.decode(path.read_bytes())


def test_config_json_alone_is_enough_for_a_plan(plan: Callable[..., Result], tmp_path: Path) -> None:
    result = plan(*ONE_H100, "--host-memory-gib", "128", "--json", str(tmp_path / "plan.json"))
    assert result.exit_code == 0, result.output
    written = read_plan(tmp_path / "plan.json")
    assert written["parameters"] == 1_720_574_976
    gpu, host, *_ = written["resources"]
    assert (gpu["name"], gpu["available_bytes"]) == ("GPU memory", 80e9)
    assert host["available_bytes"] == 128 * GIB
    assert written["changes"] == []
    assert written["assumptions"] == Assumptions()._asdict()
    for text in ("1,720,574,976 parameters", "optimizer", "KV cache", "activations", "step: ", "mfu 0.4"):
        assert text in result.output


def test_a_gpu_that_is_too_small_is_an_error_with_the_key_to_change(plan: Callable[..., Result]) -> None:
    result = plan(*ONE_H100, "--gpu-memory-gib", "50")
    assert result.exit_code == EXIT_DOES_NOT_FIT
    assert "does not fit: 50.00 GiB available" in result.output
    assert "GPU memory: set " in result.output


@pytest.mark.slow
def test_the_assumptions_of_the_time_estimate_can_be_changed(plan: Callable[..., Result], tmp_path: Path) -> None:
    def read_seconds(*arguments: str) -> dict[str, float]:
        path = tmp_path / "plan.json"
        assert plan(*ONE_H100, *arguments, "--json", str(path)).exit_code == 0
        return read_plan(path)["seconds"]

    before, slower = read_seconds(), read_seconds("--mfu", "0.2")
    assert slower["training_s"] == pytest.approx(2 * before["training_s"])
    assert read_seconds("--mean-tokens-share", "1")["training_flops"] > 2 * before["training_flops"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (PlanOptions(gpu="h99"), "--gpu h99: unknown GPU; known are a100, h100, h200, mi300x"),
        (PlanOptions(gpus=1), "--gpus: name the GPU with --gpu; known are a100, h100, h200, mi300x"),
        (PlanOptions(gpu="h100", measures=True), "--measure: measures this machine; leave out --gpu"),
    ],
)
def test_invalid_options_for_a_machine_are_refused(options: PlanOptions, message: str) -> None:
    with pytest.raises(UnusableInput) as refused:
        choose_machines(load_run(CONFIG_1GPU), options)
    assert str(refused.value) == message


def test_sizes_of_a_node_default_to_those_of_this_machine() -> None:
    run = load_run(ROOT / "configs/tiny.toml")
    here = choose_machines(run, PlanOptions())
    assert (here.gpus, here.gpu, here.cpu) == (0, None, None)
    assert here.host_memory_bytes is not None
    assert here.disk_bytes == pytest.approx(shutil.disk_usage(ROOT).free, rel=0.1)
    there = choose_machines(run, PlanOptions(gpu="h200", disk_gib=100))
    assert (there.gpus, there.gpu) == (8, GPUS["h200"])
    assert (there.host_memory_bytes, there.disk_bytes) == (None, 100 * GIB)


def test_a_learner_on_gpus_does_not_fit_a_machine_without_gpus(
    plan: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = plan("--host-memory-gib", "64", "--shared-memory-gib", "64", "--disk-gib", "100")
    assert result.exit_code == EXIT_DOES_NOT_FIT
    assert "GPUs of the learner: 1 of 0, does not fit" in result.output
    assert "GPUs of the learner: no GPU here; name one with --gpu" in result.output
    assert "disk: set learner.checkpoints.keep = 1" in result.output
    tiny = ("prepare.import=asterism.tasks.tiny.prepare:TinyDemo", 'dialogue.tools=["jupyter_code"]')
    on_cpu = plan_local_run(load_run(CONFIG_1GPU, ["learner.device=cpu", "model.checkpoint=$RUN/a", *tiny]))
    assert "GPUs of the learner" not in [each.name for each in on_cpu.counts]


def test_the_demo_is_planned_before_its_model_exists(tmp_path: Path) -> None:
    plan = plan_local_run(load_run(ROOT / "configs/tiny.toml", [f"runs_folder={tmp_path}"]))
    assert plan.parameters == pytest.approx(0.45e6, rel=0.05)
    assert plan.shortfalls == []
    assert plan.seconds.step_s is None


@pytest.mark.parametrize("fields", [None, {"model_type": "gpt2"}])
def test_a_folder_without_a_supported_model_is_refused_with_key_and_remedy(
    tmp_path: Path, fields: dict[str, str] | None
) -> None:
    if fields is not None:
        (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(UnusableInput) as refused:
        plan_local_run(load_run(CONFIG_1GPU, [f"model.checkpoint={tmp_path}"]))
    assert str(refused.value).startswith(f"model.checkpoint: {tmp_path / 'config.json'}: ")
    assert str(refused.value).endswith("; set it to the folder of a supported model (docs/models.md)")


@pytest.mark.slow
def test_measured_rates_give_the_time_of_a_step_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_machine, "_MEASURED_S", 0.01)
    cpu = choose_machines(load_run(ROOT / "configs/tiny.toml"), PlanOptions(measures=True)).cpu
    assert isinstance(cpu, GpuSpec)
    assert cpu.flops > 1e8
    assert cpu.bandwidth > 1e7
    assert (cpu.flops_share, cpu.bandwidth_share) == (1.0, 1.0)
