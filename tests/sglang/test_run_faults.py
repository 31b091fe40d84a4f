"""Whole runs with an SGLang server. During a step, the server is killed or suspended, or restarted
externally.

No trajectory is lost: turns in flight are requested again.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from asterism.configs.run_folder import RunFolder
from tests.actors.runs.running import from_cold_start_of, list_process_ids, read_log_entries, wait_until
from tests.processes import family
from tests.sglang.bench import SharedServer
from tests.sglang.runs import (
    OWN_SERVER,
    PATIENCE_S,
    attach_to,
    check_cleanup,
    check_run_result,
    count_running_turns,
    find_shared_memory,
    get_loaded_versions,
    get_process_name,
    running,
    stop_in_a_step,
)

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.sglang, pytest.mark.timeout(2 * PATIENCE_S)]

SCHEDULER = "sglang::scheduler"
STOPPED_S = 3.0  # shorter than the timeouts of the run
GROUPS = ("rl.prompts=4", "rl.rollouts=8")
STEPS = 8  # enough steps after the early step in which a server is stopped


def find_scheduler(launcher: subprocess.Popen[str]) -> int:
    """Return the pid of the managed server's scheduler, in the server's process group."""
    [scheduler] = [pid for pid in family(launcher.pid) if get_process_name(pid) == SCHEDULER]
    return scheduler


def get_deaths(folder: RunFolder) -> list[str]:
    return [entry["how"] for entry in read_log_entries(folder, "server.died", "generator-0")]


def check_no_losses(folder: RunFolder, steps: int) -> None:
    check_run_result(folder, steps)
    assert read_log_entries(folder, "turn.failed", "generator-0") == []
    assert set(get_loaded_versions(folder)) == set(range(steps + 1))
    assert get_loaded_versions(folder) == sorted(get_loaded_versions(folder))


def test_killed_and_stopped_servers_are_replaced(tmp_path: Path, cold_start: RunFolder) -> None:
    settings = (*GROUPS, f"rl.steps={STEPS}", "sglang.port=31050", "sglang.health_timeout_s=3")
    with running(tmp_path, *OWN_SERVER, *settings, *from_cold_start_of(cold_start)) as (process, folder):
        wait_until(lambda: count_running_turns(folder, at_least=1) > 0, process, PATIENCE_S)
        processes = family(process.pid)
        killed = find_scheduler(process)
        stop_in_a_step(os.getpgid(killed), folder, 1, process)
        shared = set(find_shared_memory(processes))
        os.kill(killed, signal.SIGKILL)
        wait_until(lambda: len(list_process_ids(folder, "generator-0")) == 2, process, PATIENCE_S)
        wait_until(lambda: 2 in get_loaded_versions(folder), process, PATIENCE_S)
        processes += family(process.pid)
        stop_in_a_step(os.getpgid(find_scheduler(process)), folder, 2, process)
        shared |= set(find_shared_memory(processes))
        wait_until(lambda: 3 in get_loaded_versions(folder), process, PATIENCE_S)
        processes += family(process.pid)
    check_no_losses(folder, STEPS)
    assert get_deaths(folder) == [f"lost its process {SCHEDULER}", "no longer responds"]
    assert len(list_process_ids(folder, "generator-0")) == 3
    check_cleanup(folder, processes, shared)


def test_an_external_server_can_be_suspended_and_restarted(
    tmp_path: Path, cold_start: RunFolder, roomy: SharedServer, loop: asyncio.Runner
) -> None:
    attached = attach_to(roomy.server.url)
    group = os.getpgid(min(roomy.server.list_processes()))
    settings = (*attached, *GROUPS, f"rl.steps={STEPS}", *from_cold_start_of(cold_start))
    with running(tmp_path, *settings) as (process, folder):
        try:
            stop_in_a_step(group, folder, 1, process)
            time.sleep(STOPPED_S)
            os.killpg(group, signal.SIGCONT)
            wait_until(lambda: 2 in get_loaded_versions(folder), process, PATIENCE_S)
            assert len(list_process_ids(folder, "generator-0")) == 1
            stop_in_a_step(group, folder, 2, process)
            loop.run(roomy.close())
            loop.run(roomy.start())
        finally:
            with contextlib.suppress(ProcessLookupError):  # other tests use this server
                os.killpg(group, signal.SIGCONT)
    check_no_losses(folder, STEPS)
    assert get_deaths(folder) == ["silent"]
    assert len(list_process_ids(folder, "generator-0")) == 2
