"""Summarizes a finished run in one JSON object: accuracies, times, counts, health, isolation."""

from bisect import bisect
from collections.abc import Mapping
from math import fsum
from pathlib import Path
from typing import Any, cast

import msgspec

from asterism.analysis.metric_lines import compute_mean, compute_token_rate, list_values, read_metric_lines
from asterism.bus.addresses import HEAD, LAUNCHER, LEARNER, ROLLOUT
from asterism.bus.event_log.reader import decode_event, list_removed_events, read_events
from asterism.bus.messages import StartGroup
from asterism.configs.file_manifest import check_file
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.run_config import RunConfig
from asterism.engine.data.task_inputs import read_task_descriptions
from asterism.engine.hf.weight_files import count_parameters
from asterism.engine.learner.checkpoints.best_checkpoint import read_best_checkpoint
from asterism.policies.tools.task_description import has_binary_reward

_ISOLATION_LAYERS = ("namespaces", "seccomp", "landlock")
AVERAGED_STEPS = 10  # last steps, averaged for the values at the end of a run


def summarize(run: RunConfig, folder: RunFolder, *, wall_s: float, replay_identical: bool | None) -> dict[str, Any]:
    """Return accuracies in [0, 1] and seconds; `..._end` is the mean of the last ten steps. Raises AnalysisError."""
    metrics = read_metric_lines(folder.path)
    steps, accuracy = metrics.steps, metrics.evaluations
    last_steps, first_checkpoint = steps[-AVERAGED_STEPS:], folder.get_checkpoint_path(0)
    return {
        "name": run.name,
        "seed": run.seed,
        "params": count_parameters(first_checkpoint) if first_checkpoint.exists() else None,
        "sft_s": _read_sft_seconds(folder),
        "rl_s": fsum(list_values(steps, "step_s")),
        "wall_s": wall_s,
        "steps": len(steps),
        "pass1_start": accuracy.get("start_sampled"),
        "pass1_end": accuracy.get("end_sampled"),
        "greedy_start": accuracy.get("start_greedy"),
        "greedy_end": accuracy.get("end_greedy"),
        "headline": "accuracy" if has_binary_reward(run, read_task_descriptions(folder)) else "reward",
        "success": run.success.describe(),
        "success_is_default": not run.evaluation.success,
        "evaluation_rewards": _join_evaluation_values(metrics.evaluation_values),
        "best_checkpoint": _describe_best_checkpoint(folder),
        "tasks": _join_task_rewards(metrics.task_rewards),
        "err_positive_start": compute_mean(steps[:1], "errors_in_positives"),
        "err_positive_end": compute_mean(last_steps, "errors_in_positives"),
        "reward_end": compute_mean(last_steps, "reward"),
        "response_tokens_end": compute_mean(last_steps, "response_tokens"),
        "step_s_mean": compute_mean(steps, "step_s"),
        "tokens_per_s": compute_token_rate(steps),
        **count_trajectories(folder),
        "restarts": len(_read_log_entries(folder, LAUNCHER, "process.died")),
        "groups_rejected": fsum(list_values(steps, "groups_rejected")),
        "prompts_skipped": sum(entry["num_skipped"] for entry in _read_log_entries(folder, HEAD, "prompts.skipped")),
        "health": metrics.health,
        "isolation": read_weakest_isolation(folder),
        "replay_identical": replay_identical,
    }


def _describe_best_checkpoint(folder: RunFolder) -> dict[str, Any] | None:
    best = read_best_checkpoint(folder.checkpoints)
    if best is None:
        return None
    path = folder.get_checkpoint_path(best.step).relative_to(folder.path)
    return {"path": str(path), "step": best.step, "label": best.label, "reward": best.reward}


def _join_evaluation_values(by_label: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, float | None]]:
    """Join the mean rewards before and after RL, by "sampled", "greedy", and "sampled: COMPONENT"."""
    joined: dict[str, dict[str, float | None]] = {}
    for sampling in ("sampled", "greedy"):
        start, end = (by_label.get(f"{time}_{sampling}", {}) for time in ("start", "end"))
        joined[sampling] = {"start": start.get("reward"), "end": end.get("reward")}
        components = sorted({key for key in (*start, *end) if key.startswith("reward: ")})
        for key in components:
            name = f"{sampling}: {key.removeprefix('reward: ')}"
            joined[name] = {"start": start.get(key), "end": end.get(key)}
    return joined


def _join_task_rewards(by_label: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float | None]]:
    """Join, by task, the mean rewards of the sampled evaluations before and after RL."""
    start, end = (by_label.get(f"{time}_sampled", {}) for time in ("start", "end"))
    return {name: {"reward_start": start.get(name), "reward_end": end.get(name)} for name in sorted({*start, *end})}


def count_trajectories(folder: RunFolder) -> dict[str, int | None]:
    """Count trajectories in the event logs: started = finished + failed + aborted + abandoned.

    Aborted: the step ended without the trajectory (rl.group_oversampling). Abandoned: in flight when a
    launch of the run ended by ^C or a kill; the next launch restarts it.
    """
    ends = ("started", "finished", "failed", "aborted", "abandoned")
    names = [f"trajectories_{end}" for end in ends]
    logs = folder.events / f"{ROLLOUT}.sqlite", folder.events / f"{HEAD}.sqlite"
    if not all(log.exists() for log in logs):
        return dict.fromkeys(names)
    started = _count_by_launch(logs[0], ROLLOUT, "StartGroup")
    kinds = ("TrajectoryFinished", "TrajectoryFailed", "TrajectoryAborted")
    finished, failed, aborted = (_count_by_launch(logs[1], "buffer", kind) for kind in kinds)
    ended = [sum(launch) for launch in zip(finished, failed, aborted, strict=True)]
    abandoned = sum(num_started - num_ended for num_started, num_ended in zip(started[:-1], ended[:-1], strict=False))
    return dict(zip(names, (sum(started), sum(finished), sum(failed), sum(aborted), abandoned), strict=True))


def _count_by_launch(log: Path, actor: str, kind: str) -> list[int]:
    """Count the trajectories in events of one kind per launch (from RunStarted on), including removed events."""
    counts: list[int] = []
    starts: list[int] = []
    for event, _ in read_events(log, kinds=("RunStarted", kind)):
        if event.kind == "RunStarted" and event.actor == actor:
            counts.append(0)
            starts.append(event.seq)
        elif event.kind == kind:
            message = decode_event(log, event).message
            counts[-1] += message.size if isinstance(message, StartGroup) else 1
    for each in list_removed_events(log):
        if each.kind == kind:
            counts[bisect(starts, each.first) - 1] += each.events
    return counts


def _read_log_entries(folder: RunFolder, process: str, event: str) -> list[dict[str, Any]]:
    path = folder.logs / f"{process}.jsonl"
    check_file(path)
    lines = path.read_bytes().splitlines() if path.exists() else []
    entries = (cast(dict[str, Any], msgspec.json.decode(line)) for line in lines)
    return [entry for entry in entries if entry.get("event") == event]


def read_isolation(folder: RunFolder, executor: str) -> dict[str, Any] | None:
    """Read the isolation of the model's code, as this executor logged it."""
    entries = _read_log_entries(folder, executor, "sandbox.started")
    if not entries:
        return None
    return {key: entries[-1].get(key) for key in ("backend", *_ISOLATION_LAYERS, "missing")}


def read_weakest_isolation(folder: RunFolder) -> dict[str, Any] | None:
    """Return the isolation that all executors of all nodes had; `missing` is the union of their missing layers."""
    names = sorted(path.stem for path in folder.logs.glob("executor-*.jsonl"))
    isolations = [isolation for name in names if (isolation := read_isolation(folder, name)) is not None]
    if not isolations:
        return None
    return {
        "backend": ", ".join(sorted({isolation["backend"] for isolation in isolations})),
        **{layer: min((isolation[layer] for isolation in isolations), key=bool) for layer in _ISOLATION_LAYERS},
        "missing": list(dict.fromkeys(each for isolation in isolations for each in isolation["missing"] or ())),
    }


def _read_sft_seconds(folder: RunFolder) -> float | None:
    entries = _read_log_entries(folder, LEARNER, "cold_start.finished")
    return entries[-1].get("sft_s") if entries else None
