"""The work of each simulated process: the real decider loops, generators and executors, and the simulated learner."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from actors.executor import Executor
from actors.generator import Generator
from actors.runtime.decider_loop import DeciderLoop
from actors.runtime.decider_process import resume_from_log
from actors.runtime.recovery import Recovery
from actors.runtime.wiring import list_executors
from bus.addresses import HEAD, LAUNCHER, LEARNER, ROLLOUT
from bus.codec import encode
from bus.messages import BufferCursor, Envelope, RunStarted
from engine.learner.learner import EngineGpuMemory
from policies.recipe import Recipe
from tests.simulation.engines import SayingEngine
from tests.simulation.learner import SimulatedLearner
from tests.simulation.memory_log import MemoryLog
from tests.simulation.sandboxes import NotebookSandbox

if TYPE_CHECKING:
    from tests.simulation.world import Life, World


async def run_process(world: World, life: Life) -> None:
    """Run until the process ends or its task is cancelled."""
    if life.name in (HEAD, ROLLOUT):
        await _run_deciders(world, life)
    elif life.name == LEARNER:
        await _run_learner(world, life)
    elif life.name in list_executors(world.run):
        await _run_executor(world, life)
    else:
        await _run_generator(world, life)


async def _delay_start(world: World, per_s: float = 20.0) -> None:
    await asyncio.sleep(world.random.expovariate(per_s))


async def _run_deciders(world: World, life: Life) -> None:
    """Run deciders as actors.process and actors.runtime.decider_process do."""
    await _delay_start(world)
    name, deciders = life.name, world.deciders()[life.name]
    begin = [
        encode(Envelope(name, name if actor == name else f"{name}/{actor}", _build_run_started(world, name)))
        for actor in deciders
    ]
    services = {"metrics": world.store_metrics} if name == HEAD else {}
    kept, recovery = world.logs[name], None
    if (first := kept.find_epoch_start(life.epoch)) is not None:
        recovery = Recovery(name, life.epoch, deciders, services, world.run.bus.queue_messages)
        recovery.replay(kept.since(first), begin)
    life.log = log = MemoryLog(kept, world.random, lambda: world.kill_at_random(life))
    bus = world.join(life)
    world.present[name] = deciders
    if recovery is None:
        for frame in begin:
            await bus.send_frame(name, frame)
    else:
        await resume_from_log(recovery, log, bus, services)
    await DeciderLoop(bus, log, deciders, services, asyncio.get_running_loop().time).run()


def _build_run_started(world: World, name: str) -> RunStarted:
    cursor = world.read_cursors()[world.first_step] if name == HEAD and world.first_step else BufferCursor()
    return RunStarted(world.first_step, cursor)


async def _run_generator(world: World, life: Life) -> None:
    await _delay_start(world)
    engine = world.engines[life.name] = SayingEngine(
        world.random,
        world.script,
        world.run.engine.kv_tokens,
        version=-1,
        trouble=world.trouble,
        evictions=world.faults.evictions,
        oversold=world.run.arbiter.policy not in ("worst_case", "kv_lookahead"),
    )
    clock = asyncio.get_running_loop().time
    await Generator(life.name, world.join(life), engine, f"{HEAD}/arbiter", life.number, clock, f"{HEAD}/recipe").run()


async def _run_executor(world: World, life: Life) -> None:
    await _delay_start(world, 2.0)
    sandbox = NotebookSandbox(world.random, world.trouble)
    address = f"{life.name}/{life.number}"
    await Executor(world.join(life), sandbox, address=address, slots=2, launcher=LAUNCHER).run()


async def _run_learner(world: World, life: Life) -> None:
    """Run the learner as engine.learner.learner does.

    The first life starts from the step of the launch, a later life from the newest checkpoint.
    """
    await _delay_start(world, 2.0)
    run, bus = world.run, world.join(life)
    learner = SimulatedLearner(
        *(bus, world.disk, world.random, EngineGpuMemory(bus, life.number, is_shared=run.sglang.colocate)),
        steps=run.rl.steps,
        checkpoint_every=run.learner.checkpoint_every,
        staleness=run.rl.max_staleness,
        computing=lambda: _check_loan(world) if run.sglang.colocate else None,
    )
    await learner.run(world.first_step if life.number == 1 else None)


def _check_loan(world: World) -> None:
    """Check that the learner holds a granted loan and each sleeping engine is released."""
    recipe = world.present[HEAD]["recipe"]
    assert isinstance(recipe, Recipe)
    loan = recipe.state.open_handover
    assert loan is not None and loan.phase == "granted", "the learner computes without a granted loan of memory"
    for name, number in loan.sleeping.items():
        life = world.lives[name]
        if life.number == number and life.process.returncode is None:
            world.checked_loans += 1
            assert world.engines[name].released, f"{name} holds memory that it has lent"
