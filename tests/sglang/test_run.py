"""Whole runs of eight RL steps on real SGLang servers, with each weight transport."""

import json
from pathlib import Path

import pytest

from asterism.configs.run_folder import RunFolder
from tests.actors.runs.running import from_cold_start_of, list_process_ids, metrics, wait_until, whole_run
from tests.processes import family
from tests.sglang.bench import SharedServer
from tests.sglang.runs import (
    OWN_SERVER,
    PATIENCE_S,
    attach_to,
    check_cleanup,
    check_run_result,
    find_shared_memory,
    get_loaded_versions,
    running,
)

pytestmark = [pytest.mark.slow, pytest.mark.sglang, pytest.mark.timeout(2 * PATIENCE_S)]

STEPS = 8
SMALL = (f"rl.steps={STEPS}", "rl.prompts=2", "rl.rollouts=6")


def get_memory_events(folder: RunFolder) -> list[str]:
    """Return the server's memory events and weight updates in their order of time."""
    entries = map(json.loads, (folder.logs / "generator-0.jsonl").read_text().splitlines())
    names = ("memory.released", "memory.resumed", "weights.loaded")
    return [entry.get("part", entry["event"]) for entry in entries if entry["event"] in names]


def test_a_managed_colocated_server_loads_every_version_from_disk_and_stops_with_the_run(
    tmp_path: Path, cold_start: RunFolder
) -> None:
    settings = (*SMALL, "sglang.weights=disk", "sglang.colocate=true", "sglang.port=31040")
    with running(tmp_path, *OWN_SERVER, *settings, *from_cold_start_of(cold_start)) as (process, folder):
        wait_until(lambda: bool(metrics(folder, "step")), process, PATIENCE_S)
        processes = family(process.pid)
        shared = set(find_shared_memory(processes))
    check_run_result(folder, STEPS)
    assert get_loaded_versions(folder) == list(range(STEPS + 1))
    assert get_memory_events(folder) == ["memory.released", "weights", "kv_cache", "weights.loaded"] * (STEPS + 1)
    assert "sglang-0.log" in {path.name for path in folder.logs.iterdir()}
    assert list_process_ids(folder, "generator-0")[1:] == []
    check_cleanup(folder, processes, shared)


@pytest.mark.parametrize("transport", [pytest.param("tensor", marks=pytest.mark.nightly), "group"])
def test_an_external_server_loads_every_version_over_the_network(
    tmp_path: Path, cold_start: RunFolder, roomy: SharedServer, transport: str
) -> None:
    settings = (*SMALL, f"sglang.weights={transport}", "sglang.bucket_mib=1")
    attached = attach_to(roomy.server.url)
    folder, _ = whole_run(tmp_path, *attached, *settings, *from_cold_start_of(cold_start), patience_s=PATIENCE_S)
    check_run_result(folder, STEPS)
    assert get_loaded_versions(folder) == list(range(STEPS + 1))
    assert list_process_ids(folder, "generator-0")[1:] == []
    check_cleanup(folder, [], set())
