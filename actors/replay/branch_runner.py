"""Branches continue trajectories from a given state, with the actors of a run in one process and without training."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from asterism.actors.executor import Executor
from asterism.actors.generator import Generator
from asterism.actors.runtime.decider_loop import Clock, make_steady_clock
from asterism.bus.addresses import EXECUTOR, GENERATOR
from asterism.bus.bus import Bus
from asterism.bus.messages import Envelope, ExecutorJoined, Shutdown, TrajectoryEnd
from asterism.bus.transport.in_process import Hub
from asterism.engine.contract import Engine
from asterism.policies.arbiter.arbiter import Arbiter
from asterism.policies.decider import Decider
from asterism.policies.rollout.rollout import Rollout
from asterism.policies.rollout.trajectory import Rules, Trajectory
from asterism.policies.seeded_random import BRANCH, mix
from asterism.sandbox.contract import Sandbox
from asterism.tasks.hosting.task_services import TaskServices

PROCESS = "fork"
_ROLLOUT, _ARBITER, _BUFFER, _OBSERVER = (
    f"{PROCESS}/{actor}" for actor in ("rollout", "arbiter", "buffer", "observer")
)
_EXECUTOR_ADDRESS = f"{EXECUTOR}/1"
_QUEUE_MESSAGES = 65_536


class EndedTrajectory(NamedTuple):
    trajectory: Trajectory
    end: TrajectoryEnd


def fork_trajectories(trajectory: Trajectory, count: int, seed: int | None) -> list[Trajectory]:
    """Make `count` copies of the trajectory, each in a group with another seed.

    The first copy has `seed`, or the trajectory's own one; the others have seeds derived from the first.
    """
    group = trajectory.group
    first = group.seed if seed is None else seed
    seeds = [first, *(mix(first, BRANCH, number) for number in range(1, count))]
    return [
        replace(
            trajectory,
            # Each copy has its own notebook; the number seeds the random draws of its calls.
            trajectory_id=trajectory.trajectory_id + number,
            group=replace(group, seed=each, first_trajectory_id=group.first_trajectory_id + number),
        )
        for number, each in enumerate(seeds)
    ]


async def continue_trajectories(
    rules: Mapping[str, Rules],
    engine: Engine,
    sandbox: Sandbox,
    trajectories: Sequence[Trajectory],
    *,
    strict: bool = False,
    tasks: TaskServices | None = None,
) -> list[EndedTrajectory]:
    """Run each trajectory from the start of a turn to its end, and return the ends in the same order.

    Starts and closes engine and sandbox; raises their start-up errors in an ExceptionGroup. Executor documents
    `strict` and `tasks`.
    """
    hub = Hub()
    bus, generator_bus, executor_bus = (hub.join(name, _QUEUE_MESSAGES) for name in (PROCESS, GENERATOR, EXECUTOR))
    fork = _ForkRunner(bus, rules, make_steady_clock())
    async with asyncio.TaskGroup() as group:
        group.create_task(Generator(GENERATOR, generator_bus, engine, _ARBITER).run())
        executor = Executor(executor_bus, sandbox, address=_EXECUTOR_ADDRESS, strict=strict, tasks=tasks)
        group.create_task(executor.run())
        ended = await fork.run(trajectories)
        for worker in (GENERATOR, EXECUTOR):
            await bus.send(worker, Shutdown())
    return [ended[trajectory.trajectory_id] for trajectory in trajectories]


class _ForkRunner:
    def __init__(self, bus: Bus, rules: Mapping[str, Rules], clock: Clock) -> None:
        self._bus = bus
        self._clock = clock
        own = {"arbiter": _ARBITER, "buffer": _BUFFER, "launcher": _OBSERVER}
        self._rollout = Rollout({task: replace(each, **own) for task, each in rules.items()})
        every = (*rules.values(), *(each.of_evaluations for each in rules.values()))
        response_tokens = max(each.response_tokens for each in every)
        arbiter = Arbiter(
            "worst_case", response_tokens, rollout_address=_ROLLOUT, address=_ARBITER, observer_address=_OBSERVER
        )
        self._deciders: Mapping[str, Decider] = {_ROLLOUT: self._rollout, _ARBITER: arbiter}
        self._running: dict[int, Trajectory] = {}
        self._ended: dict[int, EndedTrajectory] = {}

    async def run(self, trajectories: Sequence[Trajectory]) -> Mapping[int, EndedTrajectory]:
        self._rollout.decide(self._clock(), ExecutorJoined(_EXECUTOR_ADDRESS, slots=1))
        for trajectory in trajectories:
            self._running[trajectory.trajectory_id] = trajectory
            for effect in self._rollout.adopt(self._clock(), trajectory):
                await self._bus.send(effect.to, effect.message, sender=_ROLLOUT)
        while len(self._ended) < len(trajectories):
            await self._handle_message(await self._bus.receive())
        return self._ended

    async def _handle_message(self, envelope: Envelope) -> None:
        message = envelope.message
        if isinstance(message, TrajectoryEnd):
            self._ended[message.trajectory_id] = EndedTrajectory(self._running.pop(message.trajectory_id), message)
        decider = self._deciders.get(envelope.to)
        if decider is None:
            return
        effects = decider.decide(self._clock(), message)
        changed = self._rollout.get_state_after(message) if decider is self._rollout else None
        if isinstance(changed, Trajectory):
            self._running[changed.trajectory_id] = changed
        for effect in effects:
            await self._bus.send(effect.to, effect.message, sender=envelope.to)
