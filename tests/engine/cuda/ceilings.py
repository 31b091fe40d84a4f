"""Ceilings on kernels and memory traffic. The suite fails if a count exceeds its ceiling and headroom.

ceilings.json has the counts of fake CUDA steps with the pinned torch: GRPO steps with Qwen3-1.7B's widths (WIDE_CASES
of case_table.py), and steps of the embedded engine with a small model (ENGINE_CASES). To record the current counts:

    python -m tests.engine.cuda.ceilings > /tmp/ceilings.json && mv /tmp/ceilings.json tests/engine/cuda/ceilings.json
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path

import msgspec

from tests.engine.cuda.case_reports import CaseReport, PartCount, run_groups
from tests.engine.cuda.case_table import ENGINE_CASES, WIDE_CASES

TABLE = Path(__file__).with_name("ceilings.json")
HEADROOM = 1.05
MICRO_BATCHES = 2
_LAYER_PARTS = ("layers", "attention")
Counts = dict[str, float]  # by name
_NOTHING = PartCount(0, 0, 0.0)


def read_ceilings() -> dict[str, Counts]:
    return msgspec.json.decode(TABLE.read_bytes(), type=dict[str, Counts])


def count_wide_case(name: str, report: CaseReport) -> Counts:
    """Count kernels and bytes of a layer, of the head and of the optimizer, and all other kernels of a micro batch."""
    of_layers = [report.parts.get(part, _NOTHING) for part in _LAYER_PARTS]
    passes = WIDE_CASES[name].layers * MICRO_BATCHES
    head, optimizer = report.parts["head"], report.parts["optimizer"]
    layer_kernels = sum(part.kernels for part in of_layers)
    rest = report.kernels - layer_kernels - head.kernels - optimizer.kernels
    return {
        "kernels per layer": layer_kernels / passes,
        "bytes per layer": sum(part.bytes for part in of_layers) / passes,
        "head kernels": head.kernels / MICRO_BATCHES,
        "head bytes": head.bytes / MICRO_BATCHES,
        "optimizer kernels": optimizer.kernels,
        "optimizer bytes": optimizer.bytes,
        "other kernels": rest / MICRO_BATCHES,
    }


def count_engine_case(report: CaseReport) -> Counts:
    return {
        "kernels": report.kernels,
        "bytes": sum(part.bytes for part in report.parts.values()),
        "syncs": len(report.syncs),
        "blocking copies": len(report.blocking_copies),
    }


def list_exceeded(counts: Counts, ceilings: Mapping[str, float]) -> list[str]:
    """Describe the counts that exceed their ceiling or have none."""
    return [
        f"{figure}: {count:,.0f}, recorded are {ceilings.get(figure, 0):,.0f}"
        for figure, count in counts.items()
        if count > HEADROOM * ceilings.get(figure, 0)
    ]


def measure_all() -> dict[str, Counts]:
    """Measure the counts of each wide case and each engine case. Raises RuntimeError if a case fails."""
    reports = run_groups("wide", "engine", "nightly")
    if failed := [f"{name}: {report.error}" for name, report in reports.items() if report.error]:
        raise RuntimeError("\n".join(failed))
    counts = {name: count_wide_case(name, reports[name]) for name in WIDE_CASES}
    return counts | {name: count_engine_case(reports[name]) for name in ENGINE_CASES}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure_all(), indent=2) + "\n")
