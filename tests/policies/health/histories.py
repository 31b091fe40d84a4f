"""Metrics of a healthy run, and planted faults."""

import math
from pathlib import Path

import msgspec

from asterism.bus import messages as msg

# Steps 1 to 60 of `make demo` with seed 0, rounded to four digits.
HEALTHY_STEPS = [
    msgspec.json.decode(line, type=dict[str, float])
    for line in Path(__file__).with_name("healthy_demo.jsonl").read_bytes().splitlines()
]
EVALUATION = "accuracy of the evaluation"  # list_reports adds this value as an evaluation
Values = dict[str, float | None]  # None removes the metric from the step
_NO_ROWS: Values = dict.fromkeys(
    ("loss", "grad_norm", "clip_fraction", "entropy", "mismatch_k3", "mismatch_above_1", "updates_skipped")
)


class PlantedFault(msgspec.Struct, frozen=True):
    check: str  # the check that must report the fault
    first_step: int  # number of the first step with the fault; the run begins at 1
    values: Values  # values that replace those of the healthy run
    steps: int = 60  # number of steps with the fault
    also: tuple[str, ...] = ()  # further checks that the fault triggers


FAULTS = [
    PlantedFault("length_limit", 3, {"overlong_share": 0.35}),
    PlantedFault("length_limit", 40, {"overlong_share": 0.35}),
    PlantedFault("tool_errors", 12, {"errors_in_positives": 0.45}),
    PlantedFault("tool_errors", 40, {"errors_in_positives": 0.3}),
    PlantedFault("tool_errors", 1, {"errors_in_positives": 0.44}),
    PlantedFault("length_limit", 20, {"overlong_share": 0.12}),
    PlantedFault("length_limit", 1, {"overlong_share": 0.19}),
    PlantedFault("entropy", 4, {"entropy": 0.002, "positive_share": 0.5}, steps=10),
    PlantedFault("gradient_norm", 8, {"grad_norm": 12.0}, steps=1),
    PlantedFault("gradient_norm", 50, {"grad_norm": 40.0}, steps=1),
    PlantedFault("clipping", 2, {"clip_fraction": 0.5}),
    PlantedFault("clipping", 40, {"clip_fraction": 0.5}),
    PlantedFault("mismatch", 2, {"mismatch_k3": 0.2}),
    PlantedFault("mismatch", 40, {"mismatch_above_1": 0.05}),
    PlantedFault("mismatch", 40, {"mismatch_k3": math.nan, "mismatch_above_1": math.nan}),
    PlantedFault(
        "equal_groups",
        1,
        {"reward": 0.0, "positive_share": 0.0, "groups_rejected": 16.0, "updates": 0.0, **_NO_ROWS},
        also=("no_updates",),
    ),
    PlantedFault("no_updates", 1, {"updates": 0.0, **_NO_ROWS}),
    PlantedFault("tool_timeouts", 20, {"tool search: calls": 200.0, "tool search: timed_out": 200.0}),
    PlantedFault(
        "masked_trajectories", 1, {"trajectories": 236.0, "trajectories_failed": 20.0, "failed: reward": 20.0}
    ),
    PlantedFault("equal_groups", 20, {"positive_share": 0.5, "reward": 0.9, "groups_rejected": 15.0}),
    PlantedFault("confident_tokens", 7, {"mismatch_confident": 1.0}, steps=1),
    PlantedFault(
        "weight_sync",
        2,
        {
            "probe_engines": 2.0,
            "probe_unmoved_engines": 1.0,
            "probe_moved": 0.1,
            "probe_followed": 0.0,
            "probe_since": 1.0,
        },
        steps=1,
    ),
    PlantedFault("weight_sync", 30, {"probe_gap": 0.3, "probe_mismatch": 0.02}),
    PlantedFault("skipped_updates", 2, {"updates_skipped": 1.0, "grad_norm": math.inf}),
    PlantedFault("skipped_updates", 40, {"updates_skipped": 2.0, "grad_norm": math.nan, "loss": math.nan}),
    PlantedFault("reward_drop", 12, {"reward": 0.3, "positive_share": 0.3, "groups_rejected": 0.0}),
    PlantedFault("reward_drop", 45, {"reward": 0.5, "positive_share": 0.5, "groups_rejected": 2.0}),
    PlantedFault("evaluation_drop", 20, {EVALUATION: 0.3}),
    PlantedFault("recomputation", 5, {"recomputed_share": 0.6}),
    PlantedFault(
        "masked_trajectories", 5, {"trajectories": 192.0, "trajectories_failed": 64.0, "failed: sandbox": 64.0}
    ),
]


def plant(fault: PlantedFault) -> list[dict[str, float]]:
    """Return the healthy history with the fault."""
    steps: list[dict[str, float]] = []
    for number, healthy in enumerate(HEALTHY_STEPS, 1):
        has_fault = fault.first_step <= number < fault.first_step + fault.steps
        values: Values = {**healthy, **(fault.values if has_fault else {})}
        steps.append({name: value for name, value in values.items() if value is not None})
    return steps


def list_step_events(step: int, counts: msg.StepCounts) -> list[msg.AnyMessage]:
    return [
        msg.StepRequested(step, step - 1),
        msg.StepCollected(step, 4, counts, {}, msg.BufferCursor()),
        msg.StepTrained(step, {"updates": 1.0, "updates_skipped": 0.0, "loss": 0.1}),
        msg.WeightsSynced(step),
    ]
