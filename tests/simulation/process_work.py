"""The work of each simulated process: the real decider loops, generators and executors, and the simulated learner."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from asterism.actors.executor import Executor
from asterism.actors.generator import Generator
from asterism.actors.runtime.decider_loop import DeciderLoop
from asterism.actors.runtime.decider_process import resume_from_log
from asterism.actors.runtime.recovery import Recovery
from asterism.actors.runtime.wiring import list_executors
from asterism.bus.addresses import ARBITER, HEAD, LAUNCHER, LEARNER, RECIPE, RECORDER, ROLLOUT
from asterism.bus.codec import encode
from asterism.bus.messages import BufferCursor, Envelope, RunStarted
from asterism.engine.learner.engine_gpu_memory import EngineGpuMemory
from asterism.policies.recipe import Recipe
from tests.simulation.engines import ScriptedEngine
from tests.simulation.learner import SimulatedLearner
from tests.simulation.memory_log import MemoryLog
from tests.simulation.sandboxes import NotebookSandbox
from tests.simulation.simulated_tasks import SimulatedTasks

if TYPE_CHECKING:
    from tests.simulation.world import Incarnation, World


async def run_process(world: World, incarnation: Incarnation) -> None:
    """Run the process until it ends or its task is cancelled."""
    if incarnation.name in (HEAD, ROLLOUT):
        await _run_deciders(world, incarnation)
    elif incarnation.name == LEARNER:
        await _run_learner(world, incarnation)
    elif incarnation.name in list_executors(world.run):
        await _run_executor(world, incarnation)
    else:
        await _run_generator(world, incarnation)


async def _delay_start(world: World, per_s: float = 20.0) -> None:
    await asyncio.sleep(world.random.expovariate(per_s))


async def _run_deciders(world: World, incarnation: Incarnation) -> None:
    """Run deciders as asterism.actors.process and asterism.actors.runtime.decider_process do."""
    await _delay_start(world)
    name, deciders = incarnation.name, world.deciders()[incarnation.name]
    begin = [
        encode(Envelope(name, name if actor == name else f"{name}/{actor}", _build_run_started(world, name)))
        for actor in deciders
    ]
    services = {"metrics": world.store_metrics} if name == HEAD else {}
    kept, recovery = world.logs[name], None
    if (first := kept.find_epoch_start(incarnation.epoch)) is not None:
        recovery = Recovery(name, incarnation.epoch, deciders, services, world.run.bus.queue_messages)
        recovery.replay(kept.since(first), begin)
    incarnation.log = log = MemoryLog(kept, world.random, lambda: world.kill_at_random(incarnation))
    bus = world.join(incarnation)
    world.current_deciders[name] = deciders
    if recovery is None:
        for frame in begin:
            await bus.send_frame(name, frame)
    else:
        await resume_from_log(recovery, log, bus, services)
    await DeciderLoop(bus, log, deciders, services, asyncio.get_running_loop().time).run()


def _build_run_started(world: World, name: str) -> RunStarted:
    cursor = world.read_cursors()[world.first_step] if name == HEAD and world.first_step else BufferCursor()
    return RunStarted(world.first_step, cursor)


async def _run_generator(world: World, incarnation: Incarnation) -> None:
    await _delay_start(world)
    engine = world.engines[incarnation.name] = ScriptedEngine(
        world.random,
        world.script,
        world.run.engine.kv_tokens,
        version=-1,
        failure_rate=world.failure_rate,
        evictions=world.faults.evictions,
        oversold=world.run.arbiter.policy not in ("worst_case", "kv_lookahead"),
    )
    receivers = (ARBITER, incarnation.number, asyncio.get_running_loop().time, RECIPE, RECORDER)
    await Generator(incarnation.name, world.join(incarnation), engine, *receivers).run()


async def _run_executor(world: World, incarnation: Incarnation) -> None:
    await _delay_start(world, 2.0)
    sandbox = NotebookSandbox(world.random, world.failure_rate)
    address = f"{incarnation.name}/{incarnation.number}"
    tasks = SimulatedTasks(world.random, world.failure_rate, world.descriptions) if world.descriptions else None
    bus = world.join(incarnation)
    await Executor(bus, sandbox, address=address, slots=2, launcher=LAUNCHER, tasks=tasks).run()


async def _run_learner(world: World, incarnation: Incarnation) -> None:
    """Run the learner as asterism.engine.learner.learner does.

    The first incarnation starts from the step of the launch, a later incarnation from the newest checkpoint.
    """
    await _delay_start(world, 2.0)
    run, bus = world.run, world.join(incarnation)
    learner = SimulatedLearner(
        *(bus, world.disk, world.random, EngineGpuMemory(bus, incarnation.number, is_shared=run.sglang.colocate)),
        steps=run.rl.steps,
        checkpoint_every=run.learner.checkpoints.every,
        staleness=run.rl.max_staleness,
        computing=lambda: _check_loan(world) if run.sglang.colocate else None,
    )
    await learner.run(world.first_step if incarnation.number == 1 else None)


def _check_loan(world: World) -> None:
    """Check that the learner has borrowed the GPU memory, and that each sleeping engine has released its memory."""
    recipe = world.current_deciders[HEAD]["recipe"]
    assert isinstance(recipe, Recipe)
    loan = recipe.state.open_handover
    assert loan is not None and loan.phase == "granted", "the learner computes without a granted loan of memory"
    for name, number in loan.sleeping.items():
        incarnation = world.incarnations[name]
        if incarnation.number == number and incarnation.process.returncode is None:
            world.checked_loans += 1
            assert world.engines[name].released, f"{name} holds memory that it has lent"
