"""Trajectories that go on from where they stand: a rollout and an arbiter decide, an engine and a sandbox work for them.

The same actors as in a run, all in this process. Nothing is learned from what they do, and nobody else hears of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from actors.clock import Clock, steady_clock
from actors.executor import Executor
from actors.generator import Generator
from bus.in_process import Hub
from bus.messages import Envelope, ExecutorJoined, Shutdown, TrajectoryAborted, TrajectoryFailed, TrajectoryFinished
from bus.transport import Bus
from engine.contract import Engine
from policies.arbiter import Arbiter
from policies.decider import Decider
from policies.dialogue import TextTokenizer
from policies.history import End
from policies.rollout import Rollout
from policies.trajectory import Rules, Trajectory
from sandbox.contract import Sandbox

PROCESS, GENERATOR, EXECUTOR = "fork", "generator-0", "executor-0"
_ROLLOUT, _ARBITER, _BUFFER, _OBSERVER = (
    f"{PROCESS}/{actor}" for actor in ("rollout", "arbiter", "buffer", "observer")
)
_EXECUTOR_LIFE = f"{EXECUTOR}/1"
_QUEUE = 65_536


class Ended(NamedTuple):
    trajectory: Trajectory
    end: End


async def go_on(
    rules: Rules,
    tokenizer: TextTokenizer,
    engine: Engine,
    sandbox: Sandbox,
    trajectories: Sequence[Trajectory],
    *,
    strict: bool = False,
) -> list[Ended]:
    """How each of the trajectories, which all are to begin a turn, ends; in their order. `strict` as of the executor.

    Starts engine and sandbox, and closes them. Raises what these raise as they start, in an ExceptionGroup.
    """
    hub = Hub()
    bus, generator_bus, executor_bus = (hub.join(name, _QUEUE) for name in (PROCESS, GENERATOR, EXECUTOR))
    fork = _Fork(bus, rules, tokenizer, steady_clock())
    async with asyncio.TaskGroup() as group:
        group.create_task(Generator(GENERATOR, generator_bus, engine, _ARBITER).run())
        group.create_task(Executor(executor_bus, sandbox, address=_EXECUTOR_LIFE, strict=strict).run())
        ended = await fork.run(trajectories)
        for worker in (GENERATOR, EXECUTOR):
            await bus.send(worker, Shutdown())
    return [ended[trajectory.trajectory_id] for trajectory in trajectories]


class _Fork:
    def __init__(self, bus: Bus, rules: Rules, tokenizer: TextTokenizer, clock: Clock) -> None:
        self._bus = bus
        self._clock = clock
        self._rollout = Rollout(replace(rules, arbiter=_ARBITER, buffer=_BUFFER, launcher=_OBSERVER), tokenizer)
        arbiter = Arbiter("kv", rules.response_tokens, holder=_ROLLOUT, address=_ARBITER, observer=_OBSERVER)
        self._deciders: Mapping[str, Decider] = {_ROLLOUT: self._rollout, _ARBITER: arbiter}
        self._live: dict[int, Trajectory] = {}
        self._ended: dict[int, Ended] = {}

    async def run(self, trajectories: Sequence[Trajectory]) -> Mapping[int, Ended]:
        self._rollout.decide(self._clock(), ExecutorJoined(_EXECUTOR_LIFE, slots=1))
        for trajectory in trajectories:
            self._live[trajectory.trajectory_id] = trajectory
            for effect in self._rollout.adopt(self._clock(), trajectory):
                await self._bus.send(effect.to, effect.message, sender=_ROLLOUT)
        while len(self._ended) < len(trajectories):
            await self._take(await self._bus.receive())
        return self._ended

    async def _take(self, envelope: Envelope) -> None:
        message = envelope.message
        if isinstance(message, TrajectoryFinished | TrajectoryFailed | TrajectoryAborted):
            self._ended[message.trajectory_id] = Ended(self._live.pop(message.trajectory_id), message)
        decider = self._deciders.get(envelope.to)
        if decider is None:
            return
        effects = decider.decide(self._clock(), message)
        changed = self._rollout.state_after(message) if decider is self._rollout else None
        if isinstance(changed, Trajectory):
            self._live[changed.trajectory_id] = changed
        for effect in effects:
            await self._bus.send(effect.to, effect.message, sender=envelope.to)
