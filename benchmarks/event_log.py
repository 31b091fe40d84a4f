"""Measure the event log: write rate, time of `asterism log story`, and bytes per step. Prints a JSON line last.

    python -m benchmarks.event_log [--quick] [--folder FOLDER]

`log_events_per_s`   small events with their decisions, from the first append until all are committed
`story_ms`           the command `asterism log story`, with its start-up, on logs of `events` events
`story_query_ms`     the part of `story_ms` that opens the logs and finds the trajectory's events
`step_bytes`         the logs of head and rollout for a step of the report (512 prompts x 32
                     rollouts). A part of the step is simulated with its share of the engines. Every
                     message is logged with drawn tokens instead of the simulation's zeros, and the
                     bytes are scaled up. `step_plain_bytes` is the size without compression
"""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from asterism.actors.runtime.decider_loop import get_trajectory_ids
from asterism.analysis.event_logs.merged_events import EventFilter, merge_events
from asterism.analysis.simulation.cluster_model import SimulatedCluster
from asterism.analysis.simulation.simulate import Simulation
from asterism.analysis.simulation.workload import Workload
from asterism.analysis.simulation.workloads import SHAPES, draw_named_workload
from asterism.bus.addresses import ARBITER, HEAD, ROLLOUT
from asterism.bus.codec import encode
from asterism.bus.event_log.writer import EventLog
from asterism.bus.messages import (
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
from asterism.configs.load import write_resolved
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.algorithm import Sampling
from asterism.configs.schema.run_config import DataConfig, ModelConfig, RunConfig
from asterism.engine.data.task_inputs import write_task_descriptions
from asterism.tasks import DEFAULT_TASK
from asterism.tasks.tiny import tiny_tokenizer as tokenizer
from benchmarks.support.benchmark_main import Flag, Options, benchmark_main

ROOT = Path(__file__).parents[1]
FINGERPRINT = b"12345678"
SIBLINGS, EVENTS_A_TRAJECTORY = 32, 24
STEP_SHARE = 1 / 32
VOCABULARY = 151_000
_ADDED_IDS = 256  # ids of single bytes, which hardly ever occur as tokens
_CHARACTERS_A_TOKEN = 4


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
    """Measure the milliseconds of the command. The run stays in `folder`."""
    run = folder if (folder / "config.toml").exists() else write_logged_run(folder, events)
    middle = events // EVENTS_A_TRAJECTORY // 2
    command = [sys.executable, "-m", "asterism.actors.cli.main", "log", "story", str(run), str(middle)]
    began = time.perf_counter()
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    took_ms = 1e3 * (time.perf_counter() - began)
    assert len(done.stdout.splitlines()) > EVENTS_A_TRAJECTORY / 2, done.stdout
    return took_ms


def measure_story_query_ms(folder: Path, events: int = 1_000_000) -> float:
    began = time.perf_counter()
    found = list(merge_events(RunFolder(folder), EventFilter(trajectory=events // EVENTS_A_TRAJECTORY // 2)))
    assert found
    return 1e3 * (time.perf_counter() - began)


def write_logged_run(path: Path, events: int) -> Path:
    """Write a run folder with `events` events, half of them in the head's log, sufficient for a story."""
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


# ---------------------------------------------------------------- bytes per step


def measure_step_bytes(folder: Path, *, compress: bool, share: float = STEP_SHARE) -> float:
    workload, cluster = draw_named_workload("report", 0, share)
    paths = [folder / f"{name}-{compress}.sqlite" for name in (HEAD, ROLLOUT)]
    logs = [EventLog(path, compress=compress) for path in paths]
    _LoggedSimulation(workload, cluster, *logs).run()
    for log in logs:
        log.close()
    groups = len({plan.group_id for plan in workload.plans})
    return sum(path.stat().st_size for path in paths) * SHAPES["report"].prompts / groups


class _LoggedSimulation(Simulation):
    """A simulation that logs the deciders' messages with realistic texts and tokens."""

    def __init__(self, workload: Workload, cluster: SimulatedCluster, head: EventLog, rollout: EventLog) -> None:
        super().__init__(workload, cluster, "kv_lookahead")
        self._logs = head, rollout
        self._draws = TokenSampler()

    def _decide_arbiter(self, message: AnyMessage) -> None:
        _log(self._logs[0], self.timeline.now, "arbiter", message)
        super()._decide_arbiter(message)

    def _collect(self, message: AnyMessage) -> None:
        _log(self._logs[0], self.timeline.now, "buffer", self._draws.fill_tokens(message))
        super()._collect(message)

    def _decide_rollout(self, message: AnyMessage) -> None:
        _log(self._logs[1], self.timeline.now, ROLLOUT, self._draws.fill_tokens(message))
        super()._decide_rollout(message)


class TokenSampler:
    """Draws tokens of a confident model: ids by Zipf's law, logprobs with the float32 rounding of logits near 20."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(0)

    def fill_tokens(self, message: AnyMessage) -> AnyMessage:
        match message:
            case StartGroup():
                return replace(message, prompt_ids=self.draw_ids(len(message.prompt_ids) // 4))
            case TurnGenerated():
                tokens = len(message.token_ids) // 4
                return replace(message, token_ids=self.draw_ids(tokens), **self._draw_arrays(np.ones(tokens, np.uint8)))
            case TrajectoryFinished():
                mask = np.frombuffer(message.record.loss_mask, np.uint8)
                arrays = self._draw_arrays(mask)
                return replace(message, record=replace(message.record, token_ids=self.draw_ids(len(mask)), **arrays))
            case CodeFinished(outcome=CodeOk(output=Output(stdout=tokens))):
                return replace(message, outcome=CodeOk(Output(self._draw_text(int(tokens)))))
            case _:
                return message

    def draw_ids(self, tokens: int) -> bytes:
        drawn = self._random.zipf(1.2, 3 * tokens + 50)
        return (drawn[drawn < VOCABULARY - _ADDED_IDS][:tokens] + _ADDED_IDS).astype("<i4").tobytes()

    def _draw_arrays(self, mask: np.ndarray[Any, np.dtype[np.uint8]]) -> dict[str, bytes]:
        tokens = len(mask)
        exact = np.log(np.clip(self._random.beta(5, 0.35, tokens), 1e-9, 1))
        logits = (20 + 4 * self._random.standard_normal(tokens)).astype("<f4")
        normalizers = (logits.astype("f8") - exact).astype("<f4")
        logprobs = np.where(mask, np.minimum(logits - normalizers, 0), 0).astype("<f4")
        versions = np.where(mask, 5, -1).astype("<i4")
        return {"logprobs": logprobs.tobytes(), "versions": versions.tobytes()}

    def _draw_text(self, tokens: int) -> str:
        numbers = self._random.integers(0, 10**6, tokens)
        return "\n".join(f"x = {number}" for number in numbers)[: _CHARACTERS_A_TOKEN * tokens]


def measure(options: Options) -> dict[str, Any]:
    folder = options.folder or options.scratch
    events, share = (100_000, STEP_SHARE / 2) if options.quick else (1_000_000, STEP_SHARE)
    run = write_logged_run(folder / "run", events)
    return {
        "log_events_per_s": round(measure_log_events_per_s(folder)),
        "events": events,
        "story_ms": round(min(measure_story_ms(run, events) for _ in range(3)), 1),
        "story_query_ms": round(min(measure_story_query_ms(run, events) for _ in range(3)), 2),
        "run_bytes": sum(path.stat().st_size for path in RunFolder(run).events.glob("*.sqlite")),
        "step_bytes": round(measure_step_bytes(folder, compress=True, share=share)),
        "step_plain_bytes": round(measure_step_bytes(folder, compress=False, share=share)),
        "step_share": share,
    }


if __name__ == "__main__":
    benchmark_main(
        __doc__,
        measure,
        Flag("--folder", kind=Path, text="keep the logs in this folder"),
        quick="a tenth of the events, half of the simulated part",
    )
