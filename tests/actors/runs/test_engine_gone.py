"""A separate Docker engine is killed or stopped during runs, and under a sandbox without a run."""

import asyncio
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator

import pytest

from asterism.bus.messages import CallFailed, CodeOk, Output, TrajectoryFailed
from asterism.configs.run_folder import RunFolder
from asterism.sandbox.contract import CodeResult, SandboxFailure
from asterism.sandbox.hosts.docker.docker_api import DockerEngine
from asterism.sandbox.hosts.docker.docker_host import remove_stale_containers
from tests.actors.runs.running import Start, metrics, read_conserved_summary, read_log_entries, read_messages
from tests.chaos.play import find_leftovers
from tests.sandbox.conftest import wait_for_outcome
from tests.sandbox.hosts.docker.containers import list_containers as list_owned_containers
from tests.sandbox.hosts.docker.containers import run_containers
from tests.sandbox.own_engine import Engine, needs_root, own_engine

pytestmark = [pytest.mark.slow, pytest.mark.docker, needs_root]

STEPS = 6
SETTINGS = ("sandbox.backend=docker", f"rl.steps={STEPS}", "rl.prompts=4", "rl.rollouts=8", "evaluation.questions=2")


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """Yield a separate Docker engine; each test leaves the engine running and without containers."""
    with own_engine() as engine, pytest.MonkeyPatch.context() as patch:
        patch.setenv("DOCKER_HOST", engine.address)
        yield engine


def list_containers(engine: Engine) -> list[str]:
    async def list_owned() -> list[str]:
        client = DockerEngine(engine.address)
        try:
            return [container.id for container in await client.list_owned()]
        finally:
            await client.close()

    return asyncio.run(list_owned())


def remove_remaining_containers(engine: Engine) -> list[str]:
    """Remove containers as a run's start does, with retries: Docker can fail for one that died while it was down."""
    for _ in range(30):
        asyncio.run(remove_stale_containers())
        if not list_containers(engine):
            break
        time.sleep(1)
    return list_containers(engine)


def find_lost_twice(folder: RunFolder) -> set[int]:
    """Return the trajectories with a call that failed twice."""
    counted = Counter((each.trajectory_id, each.call) for each in read_messages(folder, "rollout-0", CallFailed))
    return {trajectory for (trajectory, _), count in counted.items() if count > 1}


def test_a_restart_of_the_docker_engine_masks_only_the_lost_calls(start_trained: Start, engine: Engine) -> None:
    """The containers continue without the killed engine; the run removes them when the engine restarts."""
    run = start_trained(*SETTINGS)
    folder = run.folder
    run.wait_for("step")
    engine.stop(signal.SIGKILL)
    run.wait_for("step", 2)
    engine.start()
    run.wait_for("step", 4)
    run.signal("learner", signal.SIGSTOP)  # the run cannot end before the container is replaced
    run.wait_until(lambda: len(read_log_entries(folder, "container.started", "executor-0")) == 2)
    run.signal("learner", signal.SIGCONT)
    run.succeed()
    summary = read_conserved_summary(folder)
    assert summary["trajectories_abandoned"] == 0
    assert [step["step"] for step in metrics(folder, "step")] == list(range(1, STEPS + 1))
    assert len(read_log_entries(folder, "container.lost", "executor-0")) == 1
    assert len(read_log_entries(folder, "container.started", "executor-0")) == 2
    failed = read_messages(folder, "head", TrajectoryFailed)
    # Failed trajectories have no reward, instead of a reward of 0.
    assert {failure.trajectory_id for failure in failed} == find_lost_twice(folder)
    assert len(failed) == summary["trajectories_failed"]
    assert list(find_leftovers(folder)) == []
    assert remove_remaining_containers(engine) == []


@pytest.mark.nightly
def test_a_stopped_docker_engine_ends_the_run_and_is_named(start_trained: Start, engine: Engine) -> None:
    run = start_trained(*SETTINGS, "sandbox.container_timeout_s=2", "supervision.restarts=1")
    folder = run.folder
    run.wait_for("step")
    engine.stop()  # a stopped engine stops its containers too
    output = run.end(1)
    assert "executor-0 ended 2 times in a row, the last time with exit code 2:" in output
    assert engine.address in output
    assert "Traceback" not in output
    assert "no container for 2 s" in (folder.logs / "executor-0.out").read_text()
    failed = read_messages(folder, "head", TrajectoryFailed)  # trajectories with a call that was lost twice
    assert [failure.cause for failure in failed if not re.search("container|executor", failure.cause)] == []
    assert list(find_leftovers(folder)) == []
    engine.start()
    assert list_containers(engine) == []


# The first test of this file kills the engine with SIGKILL in a whole run.
@pytest.mark.parametrize("how", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.nightly)])
@pytest.mark.real_clock
async def test_the_sandbox_continues_after_a_restart_of_the_engine(engine: Engine, how: signal.Signals) -> None:
    async with run_containers() as (client, host):
        code = "import time; time.sleep(0.5); print(1)"
        calls = [client.program(code, trajectory=number) for number in range(100)]
        in_flight = asyncio.gather(*calls, return_exceptions=True)
        await client.program("print(1)", trajectory=1000)
        await asyncio.to_thread(engine.stop, how)
        await asyncio.to_thread(engine.start)
        results = await in_flight
        assert all(isinstance(result, CodeResult | SandboxFailure) for result in results), results
        assert await asyncio.wait_for(wait_for_outcome(client), 60) == CodeOk(Output("42\n"))
        (container,) = host.live_containers
        assert await list_owned_containers(host.gate.owner) == [container.id]
