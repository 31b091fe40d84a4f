"""A finished run in one JSON object: what it learned, how fast, and whether its numbers add up."""

from __future__ import annotations

import json
from bisect import bisect
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np

from analysis.metrics import column, read_metrics
from bus.event_reading import envelope_of, missing, read_events
from bus.messages import StartGroup
from configs.run_folder import RunFolder
from configs.schema import Run

_WALLS = ("namespaces", "seccomp", "landlock")
WINDOW = 10  # last steps over which what varies from step to step is averaged


def summarize(run: Run, folder: RunFolder, *, wall_s: float, replay_identical: bool | None) -> dict[str, Any]:
    """Accuracies in [0, 1], times in seconds. `err_positive_start` is step 1's, `err_positive_end` the mean of the last
    ten steps'. Raises AnalysisError."""
    metrics = read_metrics(folder.path)
    steps, accuracy = metrics.steps, metrics.evaluations
    # Where rollouts run ahead of the learner, `rollout_s` is what the learner waited for, and not how long they took.
    generation_s = column(steps, "step_s" if run.rl.max_staleness else "rollout_s").sum()
    errors = column(steps, "errors_in_positives")
    return {
        "name": run.name,
        "seed": run.seed,
        "params": count_parameters(folder.checkpoint(0) / "model.safetensors"),
        "sft_s": _sft_seconds(folder),
        "rl_s": column(steps, "step_s").sum(),
        "wall_s": wall_s,
        "steps": steps.height,
        "pass1_start": accuracy.get("start_sampled"),
        "pass1_end": accuracy.get("end_sampled"),
        "greedy_start": accuracy.get("start_greedy"),
        "greedy_end": accuracy.get("end_greedy"),
        "err_positive_start": errors[0] if steps.height else None,
        "err_positive_end": errors.tail(WINDOW).mean(),
        "reward_end": column(steps, "reward").tail(WINDOW).mean(),
        "response_tokens_end": column(steps, "response_tokens").tail(WINDOW).mean(),
        "step_s_mean": column(steps, "step_s").mean(),
        "tokens_per_s": float(column(steps, "generated_tokens").sum()) / float(generation_s) if generation_s else None,
        **count_trajectories(folder),
        "groups_rejected": column(steps, "groups_rejected").sum(),
        "prompts_skipped": sum(entry["num_skipped"] for entry in _log_entries(folder, "head", "prompts.skipped")),
        "isolation": isolation_in_force(folder),
        "replay_identical": replay_identical,
    }


def count_parameters(weights: Path) -> int | None:
    """From the header of a safetensors file."""
    if not weights.exists():
        return None
    with weights.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    return sum(int(np.prod(entry["shape"])) for name, entry in header.items() if name != "__metadata__")


def count_trajectories(folder: RunFolder) -> dict[str, int | None]:
    """Counted in the event logs: started = finished + failed + aborted + abandoned.

    Aborted are those whose step ended without them (rl.oversubscribe). Those under way when a life of the run ended, by
    ^C or a kill, are abandoned: its next life starts them anew.
    """
    ends = ("started", "finished", "failed", "aborted", "abandoned")
    names = [f"trajectories_{end}" for end in ends]
    logs = folder.events / "rollout-0.sqlite", folder.events / "head.sqlite"
    if not all(log.exists() for log in logs):
        return dict.fromkeys(names)
    started = _by_life(logs[0], "rollout-0", "StartGroup")
    kinds = ("TrajectoryFinished", "TrajectoryFailed", "TrajectoryAborted")
    finished, failed, aborted = (_by_life(logs[1], "buffer", kind) for kind in kinds)
    ended = [sum(life) for life in zip(finished, failed, aborted, strict=True)]
    abandoned = sum(began - over for began, over in zip(started[:-1], ended[:-1], strict=False))
    return dict(zip(names, (sum(started), sum(finished), sum(failed), sum(aborted), abandoned), strict=True))


def _by_life(log: Path, actor: str, kind: str) -> list[int]:
    """How many trajectories the events of a kind are about, in each life of the run: RunStarted begins one. Those that
    log.keep_steps has removed count."""
    lives: list[int] = []
    begins: list[int] = []
    for event, _ in read_events(log, kinds=("RunStarted", kind)):
        if event.kind == "RunStarted" and event.actor == actor:
            lives.append(0)
            begins.append(event.seq)
        elif event.kind == kind:
            message = envelope_of(log, event).message
            lives[-1] += message.size if isinstance(message, StartGroup) else 1
    for each in missing(log):
        if each.kind == kind:
            lives[bisect(begins, each.first) - 1] += each.events
    return lives


def _log_entries(folder: RunFolder, process: str, event: str) -> list[dict[str, Any]]:
    path = folder.logs / f"{process}.jsonl"
    lines = path.read_bytes().splitlines() if path.exists() else []
    entries = (cast(dict[str, Any], msgspec.json.decode(line)) for line in lines)
    return [entry for entry in entries if entry.get("event") == event]


def isolation_of(folder: RunFolder, executor: str) -> dict[str, Any] | None:
    """What stood between the model's code and the machine, as this executor logged it."""
    entries = _log_entries(folder, executor, "sandbox.started")
    if not entries:
        return None
    return {key: entries[-1].get(key) for key in ("backend", *_WALLS, "missing")}


def isolation_in_force(folder: RunFolder) -> dict[str, Any] | None:
    """What all executors had, on whatever node; what one of them lacked, and whatever held its code, counts."""
    names = sorted(path.stem for path in folder.logs.glob("executor-*.jsonl"))
    found = [isolation for name in names if (isolation := isolation_of(folder, name)) is not None]
    if not found:
        return None
    return {
        "backend": ", ".join(sorted({isolation["backend"] for isolation in found})),
        **{wall: min((isolation[wall] for isolation in found), key=bool) for wall in _WALLS},
        "missing": list(dict.fromkeys(lack for isolation in found for lack in isolation["missing"] or ())),
    }


def _sft_seconds(folder: RunFolder) -> float | None:
    entries = _log_entries(folder, "learner", "cold_start.finished")
    return entries[-1].get("sft_s") if entries else None
