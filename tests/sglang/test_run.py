"""Whole runs of eight RL steps on real SGLang servers: weights reach them each way, numbers add up, nothing is left."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from configs.run_folder import RunFolder
from tests.actors.running import finish, from_cold_start_of, launch, lives, metrics, until, whole_run
from tests.processes import family
from tests.sglang.bench import Shared
from tests.sglang.runs import (
    OWN_SERVER,
    PATIENCE_S,
    attached_to,
    check,
    check_nothing_is_left,
    loaded,
    shared_by,
)

pytestmark = [pytest.mark.slow, pytest.mark.sglang, pytest.mark.timeout(2 * PATIENCE_S)]

STEPS = 8
SMALL = (f"rl.steps={STEPS}", "rl.prompts=2", "rl.rollouts=6")


def of_memory(folder: RunFolder) -> list[str]:
    """What became of the server's memory, and when weights had come."""
    entries = map(json.loads, (folder.logs / "generator-0.jsonl").read_text().splitlines())
    told = ("memory.released", "memory.resumed", "weights.loaded")
    return [entry.get("part", entry["event"]) for entry in entries if entry["event"] in told]


def test_a_server_of_the_run_gets_each_version_from_a_folder_gives_its_memory_back_meanwhile_and_ends_with_the_run(
    tmp_path: Path, cold_start: RunFolder
) -> None:
    settings = (*SMALL, "sglang.weights=disk", "sglang.colocate=true", "sglang.port=31040")
    with launch(tmp_path, *OWN_SERVER, *settings, *from_cold_start_of(cold_start)) as process:
        folder = RunFolder(tmp_path / "demo")
        try:
            until(lambda: bool(metrics(folder, "step")), process, PATIENCE_S)
            took_part = family(process.pid)
            shared = set(shared_by(took_part))
            output = finish(process, PATIENCE_S)
        finally:
            process.kill()
    assert process.returncode == 0, output
    check(folder, STEPS)
    assert loaded(folder) == list(range(STEPS + 1))
    assert of_memory(folder) == ["memory.released", "weights", "kv_cache", "weights.loaded"] * (STEPS + 1)
    assert "sglang-0.log" in {path.name for path in folder.logs.iterdir()}
    assert lives(folder, "generator-0")[1:] == []
    check_nothing_is_left(folder, took_part, shared)


@pytest.mark.parametrize("way", ["tensor", "group"])
def test_a_server_that_is_attached_to_gets_each_version_over_the_network(
    tmp_path: Path, cold_start: RunFolder, servers: tuple[Shared, Shared], way: str
) -> None:
    settings = (*SMALL, f"sglang.weights={way}", "sglang.bucket_mib=1")
    attached = attached_to(servers[0].server.url)
    folder, _ = whole_run(tmp_path, *attached, *settings, *from_cold_start_of(cold_start), patience_s=PATIENCE_S)
    check(folder, STEPS)
    assert loaded(folder) == list(range(STEPS + 1))
    assert lives(folder, "generator-0")[1:] == []
    check_nothing_is_left(folder, [], set())
