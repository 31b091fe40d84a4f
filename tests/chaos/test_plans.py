"""The faults that the seeds of `make test-chaos` draw."""

from tests.chaos.plans import (
    HEARTBEAT_TIMEOUT_S,
    HOST,
    HOST_0_TARGETS,
    LAUNCHER,
    MAX_PAUSE_S,
    OTHER_HOST_TARGETS,
    RANK_TARGETS,
    TARGETS,
    draw_num_hosts,
    plan,
    plan_over_hosts,
    plan_ranks,
)

SEEDS = range(400)
PLANNED = {seed: plan_over_hosts(seed, 1000, draw_num_hosts(seed)) for seed in SEEDS}
OVER_HOSTS = [fault for faults in PLANNED.values() for fault in faults]


def test_on_one_machine_each_process_is_killed_and_each_except_the_launcher_stopped() -> None:
    drawn = {(fault.target, fault.action) for seed in SEEDS for fault in plan(seed, 1000)}
    assert drawn == {(target, action) for target in TARGETS for action in ("kill", "stop")} | {(LAUNCHER, "kill")}


def test_each_of_several_learner_ranks_is_killed_and_stopped_too() -> None:
    drawn = {(fault.target, fault.action) for seed in SEEDS for fault in plan_ranks(seed, 1000)}
    targets = (*TARGETS, *RANK_TARGETS)
    assert drawn == {(target, action) for target in targets for action in ("kill", "stop")} | {(LAUNCHER, "kill")}


def test_every_host_gets_all_faults_but_host_0_is_never_switched_off() -> None:
    drawn = {(fault.host > 0, fault.target, fault.action) for fault in OVER_HOSTS}
    to_processes = {
        (other, target, action)
        for other, targets in ((False, HOST_0_TARGETS), (True, OTHER_HOST_TARGETS))
        for target in (*targets, LAUNCHER)
        for action in ("kill", "stop")
    }
    to_hosts = {(other, HOST, action) for other in (False, True) for action in ("kill", "partition")}
    assert drawn == to_processes | to_hosts | {(True, HOST, "switch off")}


def test_some_partitions_and_launcher_stops_outlast_the_heartbeat_timeout() -> None:
    for fault in OVER_HOSTS:
        has_duration = fault.action == "partition" or (fault.target, fault.action) == (LAUNCHER, "stop")
        assert (0 < fault.lasts_s <= MAX_PAUSE_S) if has_duration else fault.lasts_s == 0
    durations = [fault.lasts_s for fault in OVER_HOSTS if fault.lasts_s]
    assert min(durations) < HEARTBEAT_TIMEOUT_S < max(durations)


def test_plans_only_hit_hosts_of_the_run() -> None:
    assert {draw_num_hosts(seed) for seed in SEEDS} == {2, 3}
    assert all(fault.host < draw_num_hosts(seed) for seed, faults in PLANNED.items() for fault in faults)
