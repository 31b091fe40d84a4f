"""`python -m analysis.sameness RUN_A RUN_B`: whether two runs did the same, byte for byte, times aside.

Compared are trajectories, what tools answered, the weights of every version, the lines of metrics.jsonl and the files of
the newest checkpoint. Of each the first difference is shown, and the exit code is 1; 0 if there is none.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from analysis.metrics import AnalysisError, read_bytes
from bus.event_reading import envelope_of, read_events
from bus.messages import AnyMessage, CodeFinished, TrajectoryFailed, TrajectoryFinished, WeightsPublished
from configs.errors import UNUSABLE
from configs.run_folder import RunFolder

Part = Mapping[Any, Any]  # what is compared, by its name; names can be sorted


def trajectories(folder: RunFolder) -> Part:
    """By number. Of one that was rolled out again, as after a resume, the later time counts."""
    ended: dict[int, object] = {}
    for message in _messages(folder, "head", ("TrajectoryFinished", "TrajectoryFailed")):
        match message:
            case TrajectoryFinished():
                timeless = replace(message, lease_wait_s=0.0, generation_s=0.0, tools_s=0.0, grading_s=0.0)
                ended[message.trajectory_id] = msgspec.msgpack.encode(timeless)
            case TrajectoryFailed(trajectory_id=trajectory_id, cause=cause):
                ended[trajectory_id] = cause
            case _:
                pass
    return ended


def tool_answers(folder: RunFolder) -> Part:
    """By trajectory and call."""
    return {
        (message.trajectory_id, message.call): message.outcome
        for message in _messages(folder, "rollout-*", ("CodeFinished",))
        if isinstance(message, CodeFinished)
    }


def weights(folder: RunFolder) -> Part:
    """Digests by version."""
    published = _messages(folder, "head", ("WeightsPublished",))
    return {message.version: message.digest for message in published if isinstance(message, WeightsPublished)}


def metrics(folder: RunFolder) -> Part:
    """Values by kind, step and label, without those that are seconds or per second."""
    lines = [msgspec.json.decode(line, type=dict[str, Any]) for line in read_bytes(folder.metrics).splitlines()]
    return {
        (line["kind"], line["step"], line.get("label", "")): {
            name: value for name, value in line.items() if not name.endswith("_s")
        }
        for line in lines
    }


def newest_checkpoint(folder: RunFolder) -> Part:
    """Bytes by path."""
    newest = max(folder.checkpoints.glob("step_*"), default=folder.checkpoint(0))
    files = (path for path in newest.rglob("*") if path.is_file())
    return {str(path.relative_to(folder.checkpoints)): path.read_bytes() for path in files}


PARTS: Mapping[str, Callable[[RunFolder], Part]] = {
    "trajectory": trajectories,
    "tool answer": tool_answers,
    "weights of version": weights,
    "line of metrics": metrics,
    "file": newest_checkpoint,
}


def differences(a: RunFolder, b: RunFolder) -> list[str]:
    """A line for each part of which something differs. Raises AnalysisError where a run lacks a log."""
    found = (_difference(name, read(a), read(b)) for name, read in PARTS.items())
    return [difference for difference in found if difference]


def _difference(name: str, a: Part, b: Part) -> str:
    differing = [key for key in sorted(a.keys() | b.keys()) if key not in a or key not in b or a[key] != b[key]]
    if not differing:
        return ""
    first = differing[0]
    lacking = [which for which, part in (("first", a), ("second", b)) if first not in part]
    what = f"only the {'second' if lacking == ['first'] else 'first'} run has it" if lacking else "it differs"
    return f"{name} {first}: {what}; {len(differing)} of {len(a.keys() | b.keys())} are not the same"


def _messages(folder: RunFolder, processes: str, kinds: tuple[str, ...]) -> Iterable[AnyMessage]:
    logs = sorted(folder.events.glob(f"{processes}.sqlite"))
    if not logs:
        raise AnalysisError(f"{folder.events}: there is no event log; was the run started with log.events = false?")
    return (envelope_of(log, event).message for log in logs for event, _ in read_events(log, kinds=kinds))


def main() -> int:
    parser = argparse.ArgumentParser(prog="analysis.sameness", description="Compare two runs byte for byte.")
    parser.add_argument("runs", nargs=2, type=Path, metavar="RUN", help="a run's folder, such as runs/demo")
    first, second = (RunFolder(path) for path in parser.parse_args().runs)
    try:
        found = differences(first, second)
    except AnalysisError as error:
        sys.stderr.write(f"{error}\n")
        return UNUSABLE
    compared = ", ".join(f"{len(read(first))} of {name}" for name, read in PARTS.items())
    sys.stdout.write("\n".join(found or [f"the same: {compared}"]) + "\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
