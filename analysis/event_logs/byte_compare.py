"""`python -m analysis.event_logs.byte_compare A B`: compares two runs byte for byte, except times.

The comparison covers trajectories, tool results, the weights of every version, the lines of
metrics.jsonl and the files of the newest checkpoint. It prints the first difference of each part;
the exit code is 1 if there is a difference.
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
from bus.addresses import HEAD
from bus.event_log.reader import decode_event, read_events
from bus.messages import AnyMessage, CodeFinished, TrajectoryFailed, TrajectoryFinished, WeightsPublished
from configs.errors import EXIT_UNUSABLE
from configs.run_folder import RunFolder

ComparedPart = Mapping[Any, Any]  # values by sortable name


def read_trajectories(folder: RunFolder) -> ComparedPart:
    """Ends by trajectory id. If a trajectory ran twice, as after a resume, the later one counts."""
    ended: dict[int, object] = {}
    for message in _read_messages(folder, HEAD, ("TrajectoryFinished", "TrajectoryFailed")):
        match message:
            case TrajectoryFinished():
                timeless = replace(message, lease_wait_s=0.0, generation_s=0.0, tools_s=0.0, grading_s=0.0)
                ended[message.trajectory_id] = msgspec.msgpack.encode(timeless)
            case TrajectoryFailed(trajectory_id=trajectory_id, cause=cause):
                ended[trajectory_id] = cause
            case _:
                pass
    return ended


def read_tool_results(folder: RunFolder) -> ComparedPart:
    """Outcomes by trajectory and call."""
    return {
        (message.trajectory_id, message.call): message.outcome
        for message in _read_messages(folder, "rollout-*", ("CodeFinished",))
        if isinstance(message, CodeFinished)
    }


def read_weight_digests(folder: RunFolder) -> ComparedPart:
    """Digests by version."""
    published = _read_messages(folder, HEAD, ("WeightsPublished",))
    return {message.version: message.digest for message in published if isinstance(message, WeightsPublished)}


def read_metric_lines(folder: RunFolder) -> ComparedPart:
    """Values by kind, step and label, without seconds and rates per second."""
    lines = [msgspec.json.decode(line, type=dict[str, Any]) for line in read_bytes(folder.metrics).splitlines()]
    return {
        (line["kind"], line["step"], line.get("label", "")): {
            name: value for name, value in line.items() if not name.endswith("_s")
        }
        for line in lines
    }


def read_newest_checkpoint(folder: RunFolder) -> ComparedPart:
    """Bytes by path."""
    newest = max(folder.checkpoints.glob("step_*"), default=folder.get_checkpoint_path(0))
    files = (path for path in newest.rglob("*") if path.is_file())
    return {str(path.relative_to(folder.checkpoints)): path.read_bytes() for path in files}


COMPARED_PARTS: Mapping[str, Callable[[RunFolder], ComparedPart]] = {
    "trajectory": read_trajectories,
    "tool answer": read_tool_results,
    "weights of version": read_weight_digests,
    "line of metrics": read_metric_lines,
    "file": read_newest_checkpoint,
}


def list_differences(a: RunFolder, b: RunFolder) -> list[str]:
    """One line for each part that differs. Raises AnalysisError if a run lacks a log."""
    descriptions = (_describe_difference(name, read(a), read(b)) for name, read in COMPARED_PARTS.items())
    return [difference for difference in descriptions if difference]


def _describe_difference(name: str, a: ComparedPart, b: ComparedPart) -> str:
    differing = [key for key in sorted(a.keys() | b.keys()) if key not in a or key not in b or a[key] != b[key]]
    if not differing:
        return ""
    first = differing[0]
    only = f"only in the {'first' if first in a else 'second'} run"
    problem = "differs" if first in a and first in b else only
    return f"{name} {first}: {problem}; {len(differing)} of {len(a.keys() | b.keys())} differ"


def _read_messages(folder: RunFolder, processes: str, kinds: tuple[str, ...]) -> Iterable[AnyMessage]:
    logs = sorted(folder.events.glob(f"{processes}.sqlite"))
    if not logs:
        raise AnalysisError(f"{folder.events}: no event log; the run may have had log.events = false")
    return (decode_event(log, event).message for log in logs for event, _ in read_events(log, kinds=kinds))


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="analysis.event_logs.byte_compare", description="Compare two runs byte for byte."
    )
    parser.add_argument("runs", nargs=2, type=Path, metavar="RUN", help="a run's folder, such as runs/demo")
    first, second = (RunFolder(path) for path in parser.parse_args().runs)
    try:
        differences = list_differences(first, second)
    except AnalysisError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_UNUSABLE
    compared = ", ".join(f"{name}: {len(read(first))}" for name, read in COMPARED_PARTS.items())
    sys.stdout.write("\n".join(differences or [f"identical ({compared})"]) + "\n")
    return int(bool(differences))


if __name__ == "__main__":
    sys.exit(main())
