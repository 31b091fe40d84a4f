"""`asterism simulate`: policies side by side on one workload, in virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast, get_args

import msgspec
from rich.console import Console

from analysis.simulation.model import CLUSTERS
from analysis.simulation.outcome import Outcome, Policy
from analysis.simulation.run import simulate
from analysis.simulation.table import outcomes_table
from analysis.simulation.workloads import named
from configs.errors import UnusableInput
from policies.scheduling import PolicyName

POLICIES: tuple[Policy, ...] = (*get_args(PolicyName), "oracle")


def simulate_workload(
    workload: str,
    policies: str,
    *,
    seed: int,
    scale: float,
    cluster: str | None,
    json_file: Path | None,
    picture: Path | None,
    console: Console,
) -> None:
    """Raises UnusableInput."""
    chosen = _policies(policies)
    step, usual = named(workload, seed, scale)
    if cluster is not None and cluster not in CLUSTERS:
        raise UnusableInput(f"no cluster {cluster!r}; there are {', '.join(CLUSTERS)}")
    engines = CLUSTERS[cluster] if cluster is not None else usual
    try:
        outcomes = [simulate(step, engines, policy, seed) for policy in chosen]
        console.print(outcomes_table(outcomes))
        _write(outcomes, json_file, picture)
    except (ValueError, OSError) as error:
        raise UnusableInput(str(error)) from error


def _policies(names: str) -> list[Policy]:
    chosen = [name.strip() for name in names.split(",")]
    for name in chosen:
        if name not in POLICIES:
            raise UnusableInput(f"no policy {name!r}; there are {', '.join(POLICIES)}")
    return cast(list[Policy], chosen)


def _write(outcomes: Sequence[Outcome], json_file: Path | None, picture: Path | None) -> None:
    if json_file is not None:
        json_file.write_bytes(msgspec.json.format(msgspec.json.encode(outcomes), indent=2) + b"\n")
    if picture is not None:
        from analysis.simulation.picture import draw_outcomes  # matplotlib: when there is something to draw

        draw_outcomes(outcomes, picture)
