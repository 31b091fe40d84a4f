"""Describes the pending waits of a simulated run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from asterism.bus.addresses import HEAD, ROLLOUT
from asterism.policies.arbiter.arbiter import Arbiter
from asterism.policies.groups.group_buffer import GroupBuffer
from asterism.policies.recipe import Recipe
from asterism.policies.rollout.rollout import Rollout

if TYPE_CHECKING:
    from tests.simulation.world import World


def describe_waits(world: World) -> str:
    """List the waits of live deciders and the unacknowledged messages."""
    return "; ".join(_list_waits(world)) or "nothing waits"


def _list_waits(world: World) -> Iterator[str]:
    for incarnation in world.incarnations.values():
        if incarnation.process.returncode is not None:
            yield f"{incarnation.name} is dead"
        elif incarnation.bus is not None:
            for peer, held in incarnation.bus.unacknowledged.items():
                yield f"{incarnation.name} waits for {peer} to acknowledge {held}"
            if incarnation.bus.waiting:
                yield f"{incarnation.bus.waiting} frames wait to be read by {incarnation.name}"
    for decider in [each for process in (HEAD, ROLLOUT) for each in world.current_deciders.get(process, {}).values()]:
        yield from _describe_decider(decider)


def _describe_decider(decider: object) -> Iterator[str]:
    if isinstance(decider, Rollout):
        for each in decider.trajectories.values():
            where = each.engine if each.phase == "generating" else each.executor if each.open_calls else "the arbiter"
            yield f"trajectory {each.trajectory_id} is {each.phase} since {each.since:.3f} s, and waits for {where or 'an executor'}"
    elif isinstance(decider, Arbiter):
        for holding in decider.ledger.accounts.values():
            if holding.state == "waiting":
                yield f"trajectory {holding.trajectory_id} waits for room since {holding.waiting_since:.3f} s"
    elif isinstance(decider, GroupBuffer | Recipe):
        yield f"the state of the {type(decider).__name__} is {decider.state}"
