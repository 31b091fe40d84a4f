"""What must hold after a run, whatever happened to it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator

from actors.replay import batches_of, decide_all_again, replay_run
from actors.wiring import HEAD, deciders_of
from analysis import sameness
from bus.messages import BatchReady, RunStarted
from configs.load import load_resolved
from configs.run_folder import RunFolder
from engine.batches import check_versions
from engine.snapshots import steps_saved
from tests.actors.running import adds_up, metrics, said
from tests.chaos.play import STEPS, Played


def complaints(played: Played, undisturbed: RunFolder) -> Iterator[str]:
    """What does not hold. Nothing, if all is well: then the run also did what the undisturbed one did, byte for byte, unless
    infrastructure lost trajectories."""
    yield from played.left
    if played.exit_code != 0:
        yield f"the run ended with exit code {played.exit_code}: {played.output[-2000:]}"
        return
    folder = played.folder
    summary = json.loads(folder.summary.read_text())
    if not adds_up(summary):
        yield f"trajectories do not add up: { {key: summary[key] for key in summary if key.startswith('traj')} }"
    if played.launches == 1 and summary["trajectories_abandoned"]:
        yield f"{summary['trajectories_abandoned']} trajectories were abandoned, and the launcher lived"
    steps, forgone = [int(line["step"]) for line in metrics(folder, "step")], _lines_forgone(folder)
    if steps != [step for step in range(1, STEPS + 1) if step not in forgone]:
        yield f"the steps in metrics.jsonl are {steps}"
    if STEPS not in steps_saved(folder.checkpoints):
        yield "there is no checkpoint of the last step"
    replay = replay_run(load_resolved(folder.config), folder)
    if not replay.identical:
        yield f"the replay differs: {replay.difference}"
    yield from _complaints_about_batches(folder)
    if not failures_of(played):
        yield from _differences(undisturbed, folder, forgone)


def failures_of(played: Played) -> int:
    """Trajectories that infrastructure lost."""
    return int(json.loads(played.folder.summary.read_text())["trajectories_failed"])


def _lines_forgone(folder: RunFolder) -> set[int]:
    """Steps from whose checkpoint a later launch went on, all before it was killed but the line in the metrics, since no
    earlier one was kept that has a line (actors.head.newest_whole)."""
    resumed = {int(entry["step"]) for entry in said(folder, "run.started")} - {0}
    return resumed - {int(line["step"]) for line in metrics(folder, "step")}


def _differences(undisturbed: RunFolder, folder: RunFolder, forgone: set[int]) -> Iterator[str]:
    lines = sameness.metrics(undisturbed)
    expected = {key: line for key, line in lines.items() if key[0] != "step" or key[1] not in forgone}
    as_expected = forgone and sameness.metrics(folder) == expected
    for difference in sameness.differences(undisturbed, folder):
        if not (as_expected and difference.startswith("line of metrics ")):
            yield difference


def _complaints_about_batches(folder: RunFolder) -> Iterator[str]:
    """In the last word on each step: that of the latest launch that came to it."""
    batches: dict[int, BatchReady] = {}
    run = load_resolved(folder.config)
    path, deciders = folder.events / f"{HEAD}.sqlite", deciders_of(HEAD, run, folder)
    for _, _, done in decide_all_again(path, deciders, since=1):
        if isinstance(done.message, RunStarted):
            batches = {step: batch for step, batch in batches.items() if step <= done.message.step}
        batches.update({batch.step: batch for batch in batches_of(done)})
    if sorted(batches) != list(range(1, STEPS + 1)):
        yield f"there were batches for the steps {sorted(batches)}"
    rows = Counter(row.trajectory_id for batch in batches.values() for row in batch.rows)
    if twice := [trajectory for trajectory, count in rows.items() if count > 1]:
        yield f"trajectories that were trained on twice: {twice}"
    for step, batch in batches.items():
        check_versions(batch.rows, step, run.rl.max_staleness)
