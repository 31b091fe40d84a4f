"""Sets Hypothesis profiles and the event loop of async tests, and checks that Docker, hosts and SGLang are available.

`make check` uses `--hypothesis-profile=quick`; `make test` uses the default, `thorough`; `make nightly` runs the property
tests with `nightly`. A missing requirement ends the run before its first test; only a marker expression leaves tests out.
"""

import asyncio
import gc
import inspect
import re
from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from asterism.configs.errors import UnusableInput
from asterism.sandbox.hosts.docker.docker_host import compute_image_name
from asterism.sandbox.image.docker_cli import get_engine_architecture, image_exists
from tests.cluster.hosts import find_obstacle
from tests.sglang.environment import missing_for_sglang
from tests.simulation.clock import run_virtually

pytest_plugins = ["tests.actors.runs.fixtures", "tests.longest_first"]

for name, max_examples in {"quick": 5, "thorough": 30, "nightly": 500}.items():
    settings.register_profile(name, max_examples=max_examples, deadline=None, print_blob=True)
settings.load_profile("thorough")

_FOR_DOCKER = """{count} of the tests that were asked for need a Docker engine and the sandbox image; {problem}
To run them (Debian, as root):
    apt-get install docker.io iptables debootstrap
    dockerd &
    make sandbox-image-local
To leave them out on purpose:
    make test-without-docker, which is pytest -m 'not docker and not hosts and not sglang'"""
_FOR_HOSTS = """{count} of the tests that were asked for run on hosts, which are network namespaces; {problem}
To run them (Debian, as root):
    apt-get install iproute2
To leave them out on purpose:
    make test-without-docker, which is pytest -m 'not docker and not hosts and not sglang'"""
_FOR_SGLANG = """{count} of the tests that were asked for start SGLang servers; {problem}
To run them:
    make test-sglang, which makes it first (3 GB)
To leave them out on purpose:
    pytest -m 'not sglang'"""

_SLOW_AS_A_WHOLE = re.compile(r"^pytestmark = .*\bpytest\.mark\.slow\b", re.MULTILINE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """If slow tests are left out, do not import files that have only slow tests: the imports take seconds."""
    if collection_path.suffix != ".py" or not config.option.markexpr.startswith("not slow"):
        return None
    return True if _SLOW_AS_A_WHOLE.search(collection_path.read_text()) else None


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    """Yield the event loop of what the tests of a file share, such as a sandbox, and of the tests that use it."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an `async def` test on a virtual clock, or on the real clock if it is marked `real_clock`.

    A test that uses the fixture `loop` runs on this loop.
    """
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    run = asyncio.run if pyfuncitem.get_closest_marker("real_clock") else run_virtually
    run = getattr(pyfuncitem.funcargs.get("loop"), "run", run)
    run(_run_async_test(pyfuncitem))
    return True


async def _run_async_test(test: pytest.Function) -> None:
    """Run the test. Enter its fixtures that are async context managers, such as an actor with its bus, on its loop."""
    arguments: dict[str, Any] = {}
    async with AsyncExitStack() as stack:
        for name in inspect.signature(test.obj).parameters:
            value = test.funcargs[name]
            is_context = isinstance(value, AbstractAsyncContextManager)
            arguments[name] = await stack.enter_async_context(value) if is_context else value
        await test.obj(**arguments)


@pytest.hookimpl(tryfirst=True)
def pytest_collection() -> None:
    gc.disable()  # objects that imports of torch and other packages create live to the end


def pytest_collection_finish(session: pytest.Session) -> None:
    """End the run before its first test if a requirement is missing."""
    gc.freeze()  # later garbage collections skip the permanent objects of imported packages
    gc.enable()
    if session.config.option.collectonly:
        return
    for marker, missing, what_to_do in (
        ("docker", _missing_for_docker, _FOR_DOCKER),
        ("hosts", find_obstacle, _FOR_HOSTS),
        ("sglang", missing_for_sglang, _FOR_SGLANG),
    ):
        count = sum(item.get_closest_marker(marker) is not None for item in session.items)
        if count and (problem := missing()):
            raise pytest.UsageError(what_to_do.format(count=count, problem=problem))


def _missing_for_docker() -> str:
    try:
        get_engine_architecture()
        return (
            ""
            if image_exists(compute_image_name())
            else f"there is no image {compute_image_name()}, which this code needs."
        )
    except UnusableInput as error:
        return str(error)
