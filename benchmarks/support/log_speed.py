"""Measures the event log: its write rate, and the time of `asterism log story` on a long log."""

import subprocess
import sys
import time
from pathlib import Path

from asterism.actors.runtime.decider_loop import get_trajectory_ids
from asterism.bus.addresses import ARBITER, HEAD, ROLLOUT
from asterism.bus.codec import encode
from asterism.bus.event_log.writer import EventLog
from asterism.bus.messages import AnyMessage, Envelope, LeaseGranted, StartGroup
from asterism.configs.load import write_resolved
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.algorithm import Sampling
from asterism.configs.schema.run_config import DataConfig, ModelConfig, RunConfig
from asterism.engine.data.task_inputs import write_task_descriptions
from asterism.tasks import DEFAULT_TASK
from asterism.tasks.tiny import tiny_tokenizer as tokenizer

ROOT = Path(__file__).parents[2]
FINGERPRINT = b"12345678"
SIBLINGS, EVENTS_A_TRAJECTORY = 32, 24


def measure_log_events_per_s(folder: Path, events: int = 200_000) -> float:
    frame = encode(Envelope(ARBITER, ROLLOUT, _make_lease(7)))
    log = EventLog(folder / "speed.sqlite", compress=True)
    began = time.perf_counter()
    for number in range(events):
        seq = log.append(float(number), ROLLOUT, ARBITER, "LeaseGranted", number // 24, frame, 1, number)
        log.append_decision(seq, FINGERPRINT, FINGERPRINT)
        if log.is_full:
            log.wait_for_space()
    log.close()
    return events / (time.perf_counter() - began)


def measure_story_ms(folder: Path, events: int = 1_000_000) -> float:
    """Measure the milliseconds of `asterism log story` on a run that this function writes to `folder`."""
    run = folder if (folder / "config.toml").exists() else write_logged_run(folder, events)
    middle = events // EVENTS_A_TRAJECTORY // 2
    command = [sys.executable, "-m", "asterism.actors.cli.main", "log", "story", str(run), str(middle)]
    began = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    took_ms = 1e3 * (time.perf_counter() - began)
    assert len(done.stdout.splitlines()) > EVENTS_A_TRAJECTORY / 2, done.stdout
    return took_ms


def write_logged_run(path: Path, events: int) -> Path:
    """Write a run folder with `events` events that suffice for a story. Half of them are in the head's log."""
    path.mkdir(parents=True, exist_ok=True)
    folder = RunFolder(path)
    (path / "model").mkdir(exist_ok=True)
    tokenizer.save_tokenizer(tokenizer.train_tokenizer(["words " * 100]), path / "model")
    model = ModelConfig(checkpoint=str(path / "model"))
    write_resolved(RunConfig("events", model=model, data=DataConfig("train.jsonl", "test.jsonl")), folder.config)
    write_task_descriptions(folder, {"": DEFAULT_TASK})
    prompt = bytes(4 * 100)
    logs = {name: EventLog(folder.events / f"{name}.sqlite") for name in (HEAD, ROLLOUT)}
    for trajectory in range(events // EVENTS_A_TRAJECTORY):
        at = float(trajectory)
        if trajectory % SIBLINGS == 0:
            group = trajectory // SIBLINGS
            start = StartGroup(group, "train", f"q:{group}", "1", prompt, SIBLINGS, trajectory, Sampling(), 0)
            _log(logs[ROLLOUT], at, ROLLOUT, start)
        for number in range(EVENTS_A_TRAJECTORY // 2):
            at += 0.01
            for name, log in logs.items():
                _log(log, at, name, _make_lease(trajectory, number))
    for log in logs.values():
        log.close()
    return path


def _make_lease(trajectory: int, lease: int = 1) -> LeaseGranted:
    return LeaseGranted(trajectory, "generator-17", 4096, lease, 0.25, "the most KV tokens are free there")


def _log(log: EventLog, at: float, actor: str, message: AnyMessage) -> None:
    frame = encode(Envelope("x", actor, message))
    seq = log.append(at, actor, "x", type(message).__name__, get_trajectory_ids(message), frame, 1, 1)
    log.append_decision(seq, FINGERPRINT, FINGERPRINT)
    if log.is_full:
        log.wait_for_space()
