"""Write structured logs for the tests of the report."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


class Logs:
    """A writer of log lines into `folder`; `t` is in seconds since the epoch."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def line(self, process: str, t: float, event: str, **fields: Any) -> None:
        timestamp = datetime.fromtimestamp(t, UTC).isoformat()
        entry = {**fields, "event": event, "process": process, "level": "info", "timestamp": timestamp}
        self.text(process, json.dumps(entry) + "\n")

    def text(self, process: str, text: str) -> None:
        with (self.folder / f"{process}.jsonl").open("a") as file:
            file.write(text)

    def engine_started(self, t: float, engine: str = "generator-0", *, loads_weights: bool = False) -> None:
        """Write the start of an engine, and also its first load of weights if `loads_weights`."""
        self.line(engine, t, "engine.started", kv_tokens=1000, page_tokens=10)
        if loads_weights:
            self.line(engine, t, "weights.loaded", version=0, load_s=0.5)

    def step_started(self, t: float, size: int, group_id: int = 7) -> None:
        """Write the start of step 1 with one group."""
        self.line("head", t, "step.requested", name="step 1", version=0)
        self.line("head", t, "group.started", name="step 1", group_id=group_id, size=size)

    def load(self, engine: str, t: float, **changes: float) -> None:
        """Write an engine.load line; fields default to 0."""
        names = ("version", "running", "waiting", "used_tokens", "cached_tokens", "decode_steps", "generated_tokens")
        more = ("prefilled_tokens", "recomputed_tokens", "evicted_tokens", "preempted", "busy_s")
        self.line(engine, t, "engine.load", engine=engine, **{**dict.fromkeys((*names, *more), 0), **changes})

    def counted(self, t: float, *phases: int, rollout: str = "rollout-0", **engines: int) -> None:
        """Write a line of counts. `phases` are leasing, generating, calling, grading; an engine is generator_0=4."""
        names = ("leasing", "generating", "calling", "grading")
        asked = {name.replace("_", "-"): count for name, count in engines.items()}
        self.line(rollout, t, "trajectories.counted", **dict(zip(names, phases, strict=True)), engines=asked)

    def ended(self, trajectory_id: int, t: float, *waits: float, **changes: Any) -> None:
        """Write the end of a trajectory. `waits` are the seconds for leases, generation, tools and grading."""
        names = ("lease_wait_s", "generation_s", "tools_s", "grading_s")
        fields = {"group_id": 0, "ending": "answered", "turns": 2, "calls": 1, "tokens": 30, "generated_tokens": 10}
        line = {**fields, **dict(zip(names, waits, strict=True)), **changes}
        self.line("rollout-0", t, "trajectory.ended", trajectory_id=trajectory_id, **line)
