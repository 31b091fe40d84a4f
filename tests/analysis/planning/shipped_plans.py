"""Builds inputs for plans of the shipped configurations, and reads the planned resources."""

from pathlib import Path
from typing import Any

from asterism.analysis.planning.plan_inputs import GIB, GPUS, PlanInputs, PlannedMachines
from asterism.analysis.planning.resources import PlannedResource
from asterism.analysis.planning.run_plan import RunPlan
from asterism.configs.load import load_run
from benchmarks.support.qwen3_models import read_qwen3

ROOT = Path(__file__).parents[3]
NODE = PlannedMachines(8, GPUS["h100"], 1, 1024 * GIB, 512 * GIB, 2048 * GIB)
STAGES = ("stage=8k", "stage=12k", "stage=hard")


def make_inputs(
    model: str, *overrides: str, file: str = "qwen3_4b_8gpu", machines: PlannedMachines = NODE, **options: Any
) -> PlanInputs:
    run = load_run(ROOT / f"configs/{file}.toml", overrides)
    return PlanInputs(run, read_qwen3(model), machines, **options)


def make_1gpu_inputs(*overrides: str, machines: PlannedMachines | None = None) -> PlanInputs:
    """Build inputs of Qwen3-1.7B on one H100, or on other machines."""
    machines = machines or make_machines("h100", gpus=1)
    return make_inputs("1.7B", *overrides, file="qwen3_1.7b_1gpu", machines=machines)


def find(plan: RunPlan, name: str) -> PlannedResource:
    return next(each for each in plan.resources if each.name == name)


def get_bytes(resource: PlannedResource | None) -> dict[str, float]:
    assert resource is not None
    return {item.purpose: item.bytes for item in resource.items}


def make_machines(gpu: str, gpus: int = 8, nodes: int = 1) -> PlannedMachines:
    return PlannedMachines(gpus, GPUS[gpu], nodes, 1024 * GIB, 512 * GIB, 4096 * GIB)
