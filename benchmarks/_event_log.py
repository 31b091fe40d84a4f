"""The event log by itself: how fast it takes events, how fast it tells a story, how long a step's logs are. JSON last.

    python -m benchmarks._event_log [--quick] [--folder FOLDER]

`log_events_per_s`   small events with their decisions, appended until all are committed
`story_ms`           the command `asterism log story`, interpreter and all, on logs of so many events (`events`)
`story_query_ms`     what of it is opening the logs and finding the trajectory's events
`step_bytes`         of the head's and the rollout's logs of the report's step (512 prompts x 32 rollouts): a part of it is
                     simulated with as many engines as are its share, every message is logged with drawn tokens in place of
                     the simulation's zeros, and the bytes are scaled up; `step_plain_bytes` without compression
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from actors.decider_loop import subject_of
from analysis.event_logs.merging import Choice, merged
from analysis.simulation.model import Cluster
from analysis.simulation.run import Simulation
from analysis.simulation.workload import Workload
from analysis.simulation.workloads import SHAPES, named
from bus.codec import encode
from bus.event_log import EventLog
from bus.messages import (
    AnyMessage,
    CodeFinished,
    CodeOk,
    Envelope,
    LeaseGranted,
    Output,
    StartGroup,
    TrajectoryFinished,
    TurnGenerated,
)
from configs.load import write_resolved
from configs.run_folder import RunFolder
from configs.schema import Data, Model, Run
from engine.tiny import tokenizer

ROOT = Path(__file__).parents[1]
FINGERPRINT = b"12345678"
SIBLINGS, EVENTS_A_TRAJECTORY = 32, 24
STEP_SHARE = 1 / 32
VOCABULARY = 151_000
_ADDED_IDS = 256  # the bytes: hardly ever tokens of their own
_CHARACTERS_A_TOKEN = 4


def log_events_per_s(folder: Path, events: int = 200_000) -> float:
    frame = encode(Envelope("head/arbiter", "rollout-0", _lease(7)))
    log = EventLog(folder / "speed.sqlite", compress=True)
    began = time.perf_counter()
    for number in range(events):
        seq = log.append(float(number), "rollout-0", "head/arbiter", "LeaseGranted", number // 24, frame, 1, number)
        log.decided(seq, FINGERPRINT, FINGERPRINT)
        if log.full:
            log.wait_for_room()
    log.close()
    return events / (time.perf_counter() - began)


def story_ms(folder: Path, events: int = 1_000_000) -> float:
    """Of the command. The run is left in `folder`."""
    run = folder if (folder / "config.toml").exists() else logged_run(folder, events)
    middle = events // EVENTS_A_TRAJECTORY // 2
    command = [sys.executable, "-m", "actors.cli", "log", "story", str(run), str(middle)]
    began = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    took_ms = 1e3 * (time.perf_counter() - began)
    assert len(done.stdout.splitlines()) > EVENTS_A_TRAJECTORY / 2, done.stdout
    return took_ms


def story_query_ms(folder: Path, events: int = 1_000_000) -> float:
    began = time.perf_counter()
    found = list(merged(RunFolder(folder), Choice(trajectory=events // EVENTS_A_TRAJECTORY // 2)))
    assert found
    return 1e3 * (time.perf_counter() - began)


def logged_run(path: Path, events: int) -> Path:
    """A run's folder with so many events, half of them in the head's log, as far as a story needs one."""
    path.mkdir(parents=True, exist_ok=True)
    folder = RunFolder(path)
    (path / "model").mkdir(exist_ok=True)
    tokenizer.save(tokenizer.train(["words " * 100]), path / "model")
    model = Model(checkpoint=str(path / "model"))
    write_resolved(Run("events", model=model, data=Data("train.jsonl", "test.jsonl")), folder.config)
    prompt = bytes(4 * 100)
    logs = {name: EventLog(folder.events / f"{name}.sqlite") for name in ("head", "rollout-0")}
    for trajectory in range(events // EVENTS_A_TRAJECTORY):
        at = float(trajectory)
        if trajectory % SIBLINGS == 0:
            group = trajectory // SIBLINGS
            start = StartGroup(group, "train", f"q:{group}", "1", prompt, SIBLINGS, trajectory, 1.0, 0)
            _log(logs["rollout-0"], at, "rollout-0", start)
        for number in range(EVENTS_A_TRAJECTORY // 2):
            at += 0.01
            for name, log in logs.items():
                _log(log, at, name, _lease(trajectory, number))
    for log in logs.values():
        log.close()
    return path


def _lease(trajectory: int, lease: int = 1) -> LeaseGranted:
    return LeaseGranted(trajectory, "generator-17", 4096, lease, 0.25, "the most KV tokens are free there")


def _log(log: EventLog, at: float, actor: str, message: AnyMessage) -> None:
    frame = encode(Envelope("x", actor, message))
    seq = log.append(at, actor, "x", type(message).__name__, subject_of(message), frame, 1, 1)
    log.decided(seq, FINGERPRINT, FINGERPRINT)
    if log.full:
        log.wait_for_room()


# ---------------------------------------------------------------- a step's bytes


def step_bytes(folder: Path, *, compress: bool, share: float = STEP_SHARE) -> float:
    workload, cluster = named("report", 0, share)
    paths = [folder / f"{name}-{compress}.sqlite" for name in ("head", "rollout-0")]
    logs = [EventLog(path, compress=compress) for path in paths]
    _Logged(workload, cluster, *logs).run()
    for log in logs:
        log.close()
    groups = len({plan.group_id for plan in workload.plans})
    return sum(path.stat().st_size for path in paths) * SHAPES["report"].prompts / groups


class _Logged(Simulation):
    """Logs what the deciders receive, with texts and tokens as a model's."""

    def __init__(self, workload: Workload, cluster: Cluster, head: EventLog, rollout: EventLog) -> None:
        super().__init__(workload, cluster, "kv_lookahead")
        self._logs = head, rollout
        self._draws = Draws()

    def _decide_arbiter(self, message: AnyMessage) -> None:
        _log(self._logs[0], self.now, "arbiter", message)
        super()._decide_arbiter(message)

    def _collect(self, message: AnyMessage) -> None:
        _log(self._logs[0], self.now, "buffer", self._draws.filled(message))
        super()._collect(message)

    def _decide_rollout(self, message: AnyMessage) -> None:
        _log(self._logs[1], self.now, "rollout-0", self._draws.filled(message))
        super()._decide_rollout(message)


class Draws:
    """Tokens of a model that is mostly sure: ids by Zipf's law, logprobs as float32 makes them of logits about 20."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(0)

    def filled(self, message: AnyMessage) -> AnyMessage:
        match message:
            case StartGroup():
                return replace(message, prompt_ids=self.ids(len(message.prompt_ids) // 4))
            case TurnGenerated():
                tokens = len(message.token_ids) // 4
                return replace(message, token_ids=self.ids(tokens), **self._told(np.ones(tokens, np.uint8)))
            case TrajectoryFinished():
                mask = np.frombuffer(message.loss_mask, np.uint8)
                return replace(message, token_ids=self.ids(len(mask)), **self._told(mask))
            case CodeFinished(outcome=CodeOk(output=Output(stdout=tokens))):
                return replace(message, outcome=CodeOk(Output(self._printed(int(tokens)))))
            case _:
                return message

    def ids(self, tokens: int) -> bytes:
        drawn = self._random.zipf(1.2, 3 * tokens + 50)
        return (drawn[drawn < VOCABULARY - _ADDED_IDS][:tokens] + _ADDED_IDS).astype("<i4").tobytes()

    def _told(self, mask: np.ndarray[Any, np.dtype[np.uint8]]) -> dict[str, bytes]:
        tokens = len(mask)
        exact = np.log(np.clip(self._random.beta(5, 0.35, tokens), 1e-9, 1))
        logits = (20 + 4 * self._random.standard_normal(tokens)).astype("<f4")
        normalizers = (logits.astype("f8") - exact).astype("<f4")
        logprobs = np.where(mask, np.minimum(logits - normalizers, 0), 0).astype("<f4")
        versions = np.where(mask, 5, -1).astype("<i4")
        return {"logprobs": logprobs.tobytes(), "versions": versions.tobytes()}

    def _printed(self, tokens: int) -> str:
        numbers = self._random.integers(0, 10**6, tokens)
        return "\n".join(f"x = {number}" for number in numbers)[: _CHARACTERS_A_TOKEN * tokens]


def measure(folder: Path, *, quick: bool) -> dict[str, Any]:
    events = 100_000 if quick else 1_000_000
    share = STEP_SHARE / 2 if quick else STEP_SHARE
    run = logged_run(folder / "run", events)
    return {
        "log_events_per_s": round(log_events_per_s(folder)),
        "events": events,
        "story_ms": round(min(story_ms(run, events) for _ in range(3)), 1),
        "story_query_ms": round(min(story_query_ms(run, events) for _ in range(3)), 2),
        "run_bytes": sum(path.stat().st_size for path in RunFolder(run).events.glob("*.sqlite")),
        "step_bytes": round(step_bytes(folder, compress=True, share=share)),
        "step_plain_bytes": round(step_bytes(folder, compress=False, share=share)),
        "step_share": share,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a tenth of the events, half of the simulated part")
    parser.add_argument("--folder", type=Path, help="leave the logs there; else they are removed")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        print(json.dumps(measure(options.folder or Path(scratch), quick=options.quick)))


if __name__ == "__main__":
    main()
