"""The log lines of a run in virtual time: what a simulation tells of its rollouts, engines and books, as the report reads it.

recording = Recording(folder / "logs")
recording.engine_started(now, "generator-0", kv_tokens, page_tokens)
recording.rollout_decided(now, event, effects)     # after each decision
recording.engine_reported(now, report)             # EngineLoadReported, every 0.25 s while it works
recording.arbiter_reported(now, report)            # LedgerReported
recording.close(now)
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from analysis.utilization.trajectory_observer import TrajectoryObserver
from bus.messages import AnyMessage, CodeFinished, CodeRequested, EngineLoadReported, LedgerReported, StartGroup
from policies.decider import Send

_COUNTS_EVERY_S = 0.1
_CALLS_EVERY_S = 1.0


class Recording:
    """One rollout process, one executor without a queue, and one step, `name`, which all groups belong to.

    Lines are kept until `close`. The moment 0 is the epoch.
    """

    def __init__(self, logs: Path, name: str = "step 1", executor: str = "executor-0") -> None:
        self._logs = logs
        self._name = name
        self._executor = executor
        self._now = 0.0
        self._lines: dict[str, list[bytes]] = {}
        self._trajectories = TrajectoryObserver(self._say_of_rollout)
        self._counted_at = self._called_at = self._calls_at = 0.0
        self._running = self._done = 0
        self._busy_s = self._running_s = 0.0
        self.say("head", 0.0, "step.requested", name=name)

    def say(self, process: str, now: float, event: str, **fields: Any) -> None:
        timestamp = datetime.fromtimestamp(now, UTC).isoformat()
        line = {**fields, "event": event, "process": process, "level": "info", "timestamp": timestamp}
        self._lines.setdefault(process, []).append(msgspec.json.encode(line) + b"\n")

    def engine_started(self, now: float, engine: str, kv_tokens: int, page_tokens: int) -> None:
        self.say(engine, now, "engine.started", kv_tokens=kv_tokens, page_tokens=page_tokens)

    def engine_reported(self, now: float, report: EngineLoadReported) -> None:
        self.say(report.engine, now, "engine.load", **msgspec.structs.asdict(report))

    def arbiter_reported(self, now: float, report: LedgerReported) -> None:
        self.say("launcher", now, "ledger.reported", **msgspec.structs.asdict(report))

    def rollout_decided(self, now: float, event: AnyMessage, effects: Sequence[Send]) -> None:
        if now >= self._counted_at + _COUNTS_EVERY_S:  # what was so since the last decision, before this one changes it
            self._trajectories.say_counts()
            self._counted_at = now
        self._now = now
        if isinstance(event, StartGroup):
            self.say("head", now, "group.started", name=self._name, group_id=event.group_id, size=event.size)
        started = sum(isinstance(effect.message, CodeRequested) for effect in effects)
        if started or isinstance(event, CodeFinished):
            self._call(now, started, isinstance(event, CodeFinished))
        self._trajectories.saw(now, event, effects)

    def close(self, now: float) -> None:
        """The step ended at `now`. Its lines take the place of all that the folder held. Raises OSError."""
        self._now = now
        self._trajectories.say_counts()
        self._say_calls(now)
        self.say("head", now, "step.ended", name=self._name)
        self._logs.mkdir(parents=True, exist_ok=True)
        for earlier in self._logs.glob("*.jsonl"):
            earlier.unlink()
        for process, lines in self._lines.items():
            (self._logs / f"{process}.jsonl").write_bytes(b"".join(lines))

    def _say_of_rollout(self, event: str, **fields: Any) -> None:
        self.say("rollout-0", self._now, event, **fields)

    def _call(self, now: float, started: int, ended: int) -> None:
        """A line every second while calls run, and one when none does any more."""
        while self._running and now >= self._called_at + _CALLS_EVERY_S:
            self._say_calls(self._called_at + _CALLS_EVERY_S)
        self._integrate(now)
        if not self._running:
            self._called_at = now
        self._running += started - ended
        self._done += ended
        if not self._running:
            self._say_calls(now)

    def _integrate(self, now: float) -> None:
        since, self._calls_at = now - self._calls_at, now
        self._running_s += since * self._running
        self._busy_s += since if self._running else 0.0

    def _say_calls(self, now: float) -> None:
        self._called_at = now
        self._integrate(now)
        told = {"running": self._running, "done": self._done, "busy_s": self._busy_s, "running_s": self._running_s}
        executor = f"{self._executor}/1"
        self.say(self._executor, now, "executor.load", executor=executor, slots=0, queued=0, queued_s=0.0, **told)
