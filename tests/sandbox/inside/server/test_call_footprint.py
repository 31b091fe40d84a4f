"""Tests of checkpoints that use CPU time, and of shares of the objects that the kernel counts by user."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from asterism.sandbox.inside.server.call_footprint import CallFootprint
from asterism.sandbox.inside.server.call_process_handle import CallProcess

MIB = 1 << 20
NOTEBOOK = cast(CallProcess, object())


def make_call(*, has_cgroup: bool) -> CallProcess:
    return cast(CallProcess, SimpleNamespace(cgroup=object() if has_cgroup else None))


class Machine:
    """A fake machine with a notebook: process 2 is the worker, and process 3 is reported as the checkpoint."""

    def __init__(self, checkpoint_cpu_s: float = 0.0, **objects: int) -> None:
        self.checkpoint_cpu_s = checkpoint_cpu_s
        self.objects = {"lock": 0, "pipe": 0, "watch": 0, "in flight": 0, **objects}

    def find_checkpoint(self, notebook: CallProcess) -> int:
        return 3

    def measure_cpu_s(self, pids: list[int]) -> float:
        return self.checkpoint_cpu_s * (pids == [3])

    def measure_memory(self, pids: list[int], limit: int) -> int:
        return 60 * MIB * (len(pids) - 1)

    def count_kernel_objects(self, pids: list[int], *, by_user: bool) -> dict[str, int]:
        return self.objects


def make_footprint(machine: Machine, *, own_users: bool = True) -> CallFootprint:
    return CallFootprint(100 * MIB, own_users, cast(Any, machine), cast(Any, machine))


@pytest.mark.parametrize(("cpu_s", "found", "is_too_large"), [(0.0, 3, False), (0.004, 3, False), (0.02, None, True)])
def test_a_process_that_computes_is_no_checkpoint(cpu_s: float, found: int | None, is_too_large: bool) -> None:
    footprint = make_footprint(Machine(cpu_s))
    assert footprint.find_checkpoint(NOTEBOOK) == found
    assert footprint.measure_memory(NOTEBOOK, [1, 2, 3]) == (120 * MIB, is_too_large)


@pytest.mark.parametrize(
    ("objects", "own_users", "exceeds"),
    [
        ({"lock": 1024}, True, False),
        ({"lock": 1025}, True, True),
        ({"pipe": 1750, "watch": 250_000, "in flight": 300}, True, False),
        ({"pipe": 64, "watch": 4096, "in flight": 32}, False, False),
        ({"pipe": 65}, False, True),
        ({"watch": 4097}, False, True),
        ({"in flight": 33}, False, True),
    ],
)
def test_a_call_with_a_shared_user_can_hold_a_share(objects: dict[str, int], own_users: bool, exceeds: bool) -> None:
    footprint = make_footprint(Machine(**objects), own_users=own_users)
    assert footprint.exceeds_share(make_call(has_cgroup=True), [1, 2]) is exceeds


@pytest.mark.parametrize(("objects", "exceeds"), [({"watch": 4096, "pipe": 1750}, False), ({"watch": 4097}, True)])
def test_a_call_without_a_cgroup_can_hold_a_share_of_watches(objects: dict[str, int], exceeds: bool) -> None:
    assert make_footprint(Machine(**objects)).exceeds_share(make_call(has_cgroup=False), [1, 2]) is exceeds
