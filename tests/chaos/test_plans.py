"""What the seeds of `make test-chaos` bring."""

from __future__ import annotations

from tests.chaos.plans import (
    HOST,
    LAUNCHER,
    MAX_PAUSE_S,
    OF_HOST_0,
    OF_OTHERS,
    SILENT_S,
    TARGETS,
    num_hosts,
    plan,
    plan_over_hosts,
)

SEEDS = range(400)
PLANNED = {seed: plan_over_hosts(seed, 1000, num_hosts(seed)) for seed in SEEDS}
OVER_HOSTS = [fault for faults in PLANNED.values() for fault in faults]


def test_on_one_machine_all_processes_are_killed_and_all_but_the_launcher_stopped() -> None:
    met = {(fault.target, fault.action) for seed in SEEDS for fault in plan(seed, 1000)}
    assert met == {(target, action) for target in TARGETS for action in ("kill", "stop")} | {(LAUNCHER, "kill")}


def test_over_hosts_everything_happens_to_host_0_and_to_others_but_that_host_0_is_never_switched_off() -> None:
    met = {(fault.host > 0, fault.target, fault.action) for fault in OVER_HOSTS}
    to_processes = {
        (other, target, action)
        for other, targets in ((False, OF_HOST_0), (True, OF_OTHERS))
        for target in (*targets, LAUNCHER)
        for action in ("kill", "stop")
    }
    to_hosts = {(other, HOST, action) for other in (False, True) for action in ("kill", "partition")}
    assert met == to_processes | to_hosts | {(True, HOST, "switch off")}


def test_what_nobody_else_would_end_lasts_for_a_while_shorter_or_longer_than_silence() -> None:
    for fault in OVER_HOSTS:
        ends_by_itself = fault.action == "partition" or (fault.target, fault.action) == (LAUNCHER, "stop")
        assert (0 < fault.lasts_s <= MAX_PAUSE_S) if ends_by_itself else fault.lasts_s == 0
    lasting = [fault.lasts_s for fault in OVER_HOSTS if fault.lasts_s]
    assert min(lasting) < SILENT_S < max(lasting)


def test_a_plan_meets_no_host_that_the_run_does_not_have() -> None:
    assert {num_hosts(seed) for seed in SEEDS} == {2, 3}
    assert all(fault.host < num_hosts(seed) for seed, faults in PLANNED.items() for fault in faults)
