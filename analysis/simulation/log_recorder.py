"""Write the log lines that the utilization report needs, from a simulation in virtual time.

recording = LogRecorder(folder / "logs")
recording.observe(rollout)
recording.on_engine_started(now, "generator-0", kv_tokens, page_tokens)
recording.write_counts(now)                        # before each decision
recording.on_rollout_decision(now, event, effects) # after each decision
recording.on_engine_load(now, report)             # EngineLoadReported, every 0.25 s of work
recording.on_ledger_reported(now, report)            # LedgerReported
recording.close(now)
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from asterism.bus.addresses import EXECUTOR, HEAD, LAUNCHER, ROLLOUT
from asterism.bus.messages import (
    AnyMessage,
    CodeFinished,
    CodeRequested,
    EngineLoadReported,
    LedgerReported,
    StartGroup,
)
from asterism.policies.decider import Send
from asterism.policies.observers import TrajectoryObserver
from asterism.policies.rollout.rollout import Rollout

_COUNT_INTERVAL_S = 0.1
_EXECUTOR_LOAD_INTERVAL_S = 1.0


class LogRecorder:
    """A recorder of one rollout process, one executor without a queue, and one step, `name`, with all groups.

    Lines are buffered until `close`. Time 0 is the epoch.
    """

    def __init__(self, logs: Path, name: str = "step 1", executor: str = EXECUTOR) -> None:
        self._logs = logs
        self._name = name
        self._executor = executor
        self._now = 0.0
        self._lines: dict[str, list[bytes]] = {}
        self._observer: TrajectoryObserver | None = None
        self._counted_at = self._load_written_at = self._integrated_until = 0.0
        self._running = self._done = 0
        self._busy_s = self._running_s = 0.0
        self.add_line(HEAD, 0.0, "step.requested", name=name)

    def add_line(self, process: str, now: float, event: str, **fields: Any) -> None:
        timestamp = datetime.fromtimestamp(now, UTC).isoformat()
        line = {**fields, "event": event, "process": process, "level": "info", "timestamp": timestamp}
        self._lines.setdefault(process, []).append(msgspec.json.encode(line) + b"\n")

    def observe(self, rollout: Rollout) -> None:
        self._observer = TrajectoryObserver(self._add_rollout_line, rollout)

    def on_engine_started(self, now: float, engine: str, kv_tokens: int, page_tokens: int) -> None:
        self.add_line(engine, now, "engine.started", kv_tokens=kv_tokens, page_tokens=page_tokens)

    def on_engine_load(self, now: float, report: EngineLoadReported) -> None:
        self.add_line(report.engine, now, "engine.load", **msgspec.structs.asdict(report))

    def on_ledger_reported(self, now: float, report: LedgerReported) -> None:
        self.add_line(LAUNCHER, now, "ledger.reported", **msgspec.structs.asdict(report))

    def write_counts(self, now: float) -> None:
        """Write the counts since the last decision."""
        if self._observer is not None and now >= self._counted_at + _COUNT_INTERVAL_S:
            self._observer.write_counts()
            self._counted_at = now

    def on_rollout_decision(self, now: float, event: AnyMessage, effects: Sequence[Send]) -> None:
        self._now = now
        if isinstance(event, StartGroup):
            self.add_line(HEAD, now, "group.started", name=self._name, group_id=event.group_id, size=event.size)
        started = sum(isinstance(effect.message, CodeRequested) for effect in effects)
        if started or isinstance(event, CodeFinished):
            self._count_calls(now, started, isinstance(event, CodeFinished))
        if self._observer is not None:
            self._observer.on_decision(now, event, effects)

    def close(self, now: float) -> None:
        """End the step at `now` and replace the folder's logs by its lines. Raises OSError."""
        self._now = now
        if self._observer is not None:
            self._observer.write_counts()
        self._add_executor_line(now)
        self.add_line(HEAD, now, "step.ended", name=self._name)
        self._logs.mkdir(parents=True, exist_ok=True)
        for earlier in self._logs.glob("*.jsonl"):
            earlier.unlink()
        for process, lines in self._lines.items():
            (self._logs / f"{process}.jsonl").write_bytes(b"".join(lines))

    def _add_rollout_line(self, event: str, **fields: Any) -> None:
        self.add_line(ROLLOUT, self._now, event, **fields)

    def _count_calls(self, now: float, started: int, ended: int) -> None:
        """Write a line every second while calls run, and one when the last call ends."""
        while self._running and now >= self._load_written_at + _EXECUTOR_LOAD_INTERVAL_S:
            self._add_executor_line(self._load_written_at + _EXECUTOR_LOAD_INTERVAL_S)
        self._integrate(now)
        if not self._running:
            self._load_written_at = now
        self._running += started - ended
        self._done += ended
        if not self._running:
            self._add_executor_line(now)

    def _integrate(self, now: float) -> None:
        since, self._integrated_until = now - self._integrated_until, now
        self._running_s += since * self._running
        self._busy_s += since if self._running else 0.0

    def _add_executor_line(self, now: float) -> None:
        self._load_written_at = now
        self._integrate(now)
        counters = {"running": self._running, "done": self._done, "busy_s": self._busy_s, "running_s": self._running_s}
        executor = f"{self._executor}/1"
        self.add_line(
            self._executor, now, "executor.load", executor=executor, slots=0, queued=0, queued_s=0.0, **counters
        )
