"""The metrics file of a run has one JSON line per step of the cold start and of RL, evaluation and health report."""

import asyncio
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from asterism.bus.messages import AnyMessage, HealthReported, MetricsRecorded
from asterism.configs.atomic_write import raising_disk_errors, write_atomically
from asterism.engine.learner.checkpoints.best_checkpoint import BestCheckpointFile, EvaluationResult


class MetricsFile:
    """A file with one line per step and evaluation; a thread writes it. A resumed run's repeated lines are ignored."""

    def __init__(self, path: Path, best_checkpoint: BestCheckpointFile | None = None) -> None:
        self._path = path
        self._best_checkpoint = best_checkpoint
        path.touch()
        lines = self._read_lines()
        self._written = {_parse_key(line) for line in lines}
        if best_checkpoint is not None:
            best_checkpoint.restart(_list_evaluations(lines))

    def truncate_after(self, step: int) -> None:
        """Remove the lines of an earlier launch about RL steps after the checkpoint that this launch resumes from."""
        keys = [(line, _parse_key(line)) for line in self._read_lines()]
        lines = [line for line, (kind, about, _) in keys if kind == "sft" or (step and about <= step)]
        write_atomically(self._path, b"".join(lines))
        self._written = {_parse_key(line) for line in lines}

    async def write(self, message: AnyMessage) -> None:
        match message:
            case MetricsRecorded():
                label = {"label": message.label} if message.label else {}
                await self._append_once({"kind": message.kind, "step": message.step, **label, **message.values})
            case HealthReported():
                await self._append_once({"kind": "health", **msgspec.structs.asdict(message)})
            case _:
                pass

    async def _append_once(self, values: Mapping[str, object]) -> None:
        line = msgspec.json.encode(values)
        if _parse_key(line) not in self._written:
            self._written.add(_parse_key(line))
            await asyncio.to_thread(self._append, line)

    def _read_lines(self) -> list[bytes]:
        """Read the complete lines. A partial last line, left by a kill, is removed from the file."""
        lines = self._path.read_bytes().splitlines(keepends=True)
        complete = [line for line in lines if line.endswith(b"\n")]
        if len(complete) < len(lines):
            write_atomically(self._path, b"".join(complete))
        return complete

    def _append(self, line: bytes) -> None:
        with raising_disk_errors(self._path), self._path.open("ab") as file:
            file.write(line + b"\n")
        if self._best_checkpoint is not None:
            for result in _list_evaluations([line]):
                self._best_checkpoint.add(result)


def read_steps_written(metrics: Path) -> set[int]:
    """Return the RL steps that have a complete line."""
    lines = metrics.read_bytes().splitlines(keepends=True) if metrics.exists() else []
    keys = (_parse_key(line) for line in lines if line.endswith(b"\n"))
    return {step for kind, step, _ in keys if kind == "step"}


def _list_evaluations(lines: Iterable[bytes]) -> list[EvaluationResult]:
    values = [msgspec.json.decode(line) for line in lines if _parse_key(line)[0] == "evaluation"]
    return [EvaluationResult(each["step"], each["label"], each) for each in values]


def _parse_key(line: bytes) -> tuple[str, int, str]:
    """Return the kind and step of a line, and the label of an evaluation or the name of a health check."""
    values = msgspec.json.decode(line)
    return values["kind"], values["step"], values.get("label") or values.get("check", "")
