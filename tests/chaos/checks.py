"""The invariants that must hold after a run with faults."""

import json
from collections import Counter
from collections.abc import Iterator

from asterism.actors.replay.replay import redecide_all, replay_run
from asterism.actors.runtime.wiring import build_deciders
from asterism.analysis.event_logs.diff import list_differing_fields, list_divergences
from asterism.bus.addresses import HEAD
from asterism.bus.messages import RunStarted
from asterism.configs.load import load_run
from asterism.configs.run_folder import RunFolder
from asterism.engine.learner.checkpoints.checkpoint_folders import list_saved_steps
from asterism.policies.groups.staleness import check_versions
from tests.actors.runs.running import is_conserved, metrics, read_log_entries
from tests.batches import BatchAssembler, CompleteBatch
from tests.chaos.play import STEPS, PlayResult


def find_violations(result: PlayResult, baseline: RunFolder) -> Iterator[str]:
    """Yield the violated invariants. A run without lost trajectories must equal the baseline byte for byte."""
    yield from result.leftovers
    if result.exit_code != 0:
        yield f"the run ended with exit code {result.exit_code}: {result.output[-2000:]}"
        return
    folder = result.folder
    summary = json.loads(folder.summary.read_text())
    if not is_conserved(summary):
        yield f"trajectories do not add up: { {key: summary[key] for key in summary if key.startswith('traj')} }"
    if result.launches == 1 and summary["trajectories_abandoned"]:
        yield f"{summary['trajectories_abandoned']} trajectories were abandoned although the launcher lived"
    steps, missing_lines = [int(line["step"]) for line in metrics(folder, "step")], _find_missing_lines(folder)
    if steps != [step for step in range(1, STEPS + 1) if step not in missing_lines]:
        yield f"the steps in metrics.jsonl are {steps}"
    if STEPS not in list_saved_steps(folder.checkpoints):
        yield "there is no checkpoint of the last step"
    replay = replay_run(load_run(folder.config), folder)
    if not replay.identical:
        yield f"the replay differs: {replay.difference}"
    yield from _find_batch_violations(folder)
    if not count_failures(result):
        yield from _find_differences(baseline, folder, missing_lines)


def count_failures(result: PlayResult) -> int:
    """Return the number of trajectories that failed because of lost processes or hosts."""
    return int(json.loads(result.folder.summary.read_text())["trajectories_failed"])


def _find_missing_lines(folder: RunFolder) -> set[int]:
    """Return steps without a metrics line. A launch resumed from their checkpoint (actors/runtime/resume_point.py)."""
    resumed = {int(entry["step"]) for entry in read_log_entries(folder, "run.started")} - {0}
    return resumed - {int(line["step"]) for line in metrics(folder, "step")}


def _find_differences(baseline: RunFolder, folder: RunFolder, missing_lines: set[int]) -> Iterator[str]:
    expected = {stream for step in missing_lines for stream in (f"step {step}", f"metrics, step {step}")}
    for divergence in list_divergences(baseline, folder):
        if divergence.b is not None or divergence.stream not in expected:
            yield f"{divergence.stream} differs from the baseline: {list_differing_fields(divergence)}"


def _find_batch_violations(folder: RunFolder) -> Iterator[str]:
    """Check the batch of each step. The batch of the latest launch that reached the step counts."""
    batches, assembler = dict[int, CompleteBatch](), BatchAssembler()
    run = load_run(folder.config)
    path, deciders = folder.events / f"{HEAD}.sqlite", build_deciders(HEAD, run, folder)
    for _, _, redecision in redecide_all(path, deciders, since=1):
        if isinstance(redecision.message, RunStarted):
            batches = {step: batch for step, batch in batches.items() if step <= redecision.message.step}
        for send in redecision.sends:
            batches.update({batch.step: batch for batch in assembler.add(send.message)})
    if sorted(batches) != list(range(1, STEPS + 1)):
        yield f"there were batches for the steps {sorted(batches)}"
    rows = Counter(row.trajectory_id for batch in batches.values() for row in batch.samples)
    if duplicates := [trajectory for trajectory, count in rows.items() if count > 1]:
        yield f"trajectories in two batches: {duplicates}"
    for step, batch in batches.items():
        check_versions(batch.samples, step, run.rl.max_staleness)
