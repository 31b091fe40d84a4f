"""A running sandbox in which hostile programs run next to a neighbour, several at a time or alone."""

import asyncio
import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from asterism.bus.messages import CodeOk, CodeOutcome, CodeTimedOut, Output
from asterism.sandbox.contract import SandboxFailure
from tests.sandbox.conftest import open_sandbox
from tests.sandbox.hostile import footprint, record
from tests.sandbox.hostile.footprint import Footprint
from tests.sandbox.hostile.record import Form, Hostile

LIMITS: dict[str, Any] = {
    # Fork bombs run until the end of the extension.
    **{"max_call_extension": 20.0, "memory_mib": 128, "max_processes": 16, "file_mib": 4, "output_kib": 64},
    "fork_servers": 1,
    "container_memory_mib": 2048,
    "notebook_memory_share": 1.0,  # no notebook is evicted, even on a full machine
}
_NEIGHBOUR = 1  # trajectory id of the neighbour
MAX_REPEATS = 2  # repeats of a timeout; a busy machine hardly causes three timeouts in a row
_SETTLE_S = 20.0  # time for the removal of a call's leftovers; afterwards the test fails
_MARKER = "secret of a neighbour"
NOTEBOOK_IS_KEPT = CodeOk(Output("['kept']\n"))

_OPEN_NEIGHBOUR = f"""
import os
token = os.urandom(8).hex()
marker = {_MARKER!r}
open('mine', 'w').write('abc')
"""
# This code prints the state that a hostile program could change in the neighbour's process or folder.
_ASK_NEIGHBOUR = "print(token, open('mine').read(), os.listdir(), len(os.sched_getaffinity(0)))"
_PROGRAM = f"""
import json, os, random, string
marker = {_MARKER!r}
print(json.loads(input()), os.listdir(), marker, flush=True)
total = sum(range(200_000))
"""


class Encounter(NamedTuple):
    """The results of a hostile program and of its neighbour."""

    outcomes: dict[Form, CodeOutcome | SandboxFailure]
    later: CodeOutcome | SandboxFailure | None  # outcome of a later cell of the hostile notebook
    neighbours: list[str]  # outcome of each call of the neighbour
    unharmed: list[str]  # outcome of each call of the neighbour without a hostile program
    leftovers: dict[str, Any]

    def is_expected(self, hostile: Hostile) -> bool:
        """Return whether the program ended as its record allows, kept its notebook and harmed nothing."""
        ends = [any(end.fits(found) for end in hostile.list_ends(form)) for form, found in self.outcomes.items()]
        is_kept = self.later in (None, NOTEBOOK_IS_KEPT)
        if not hostile.keeps_notebook:
            is_kept = not isinstance(self.later, SandboxFailure)
        return all(ends) and is_kept and self.neighbours == self.unharmed and not self.leftovers

    def has_unexpected_timeout(self, hostile: Hostile) -> bool:
        own = [] if hostile.reaches_limit else self.outcomes.values()
        later = self.later if hostile.keeps_notebook else None
        return CodeTimedOut.__name__ in repr([*own, later, self.neighbours])


class Arena:
    """A sandbox with a neighbour. `backend` and `namespaces` are those of the configuration."""

    def __init__(
        self, runner: asyncio.Runner, backend: str, namespaces: str, time_limit_s: float, folder: Path
    ) -> None:
        self._runner = runner
        self.backend = backend
        self.namespaces = namespaces
        self._time_limit_s = time_limit_s
        self.secret = os.urandom(12).hex()
        self._secret_file = folder / "secret"
        self._trajectories = itertools.count(100)

    def open(self) -> None:
        """Put a secret into the executor's environment and into a world-readable file."""
        os.environ["ASTERISM_HOSTILE_TEST"] = f"asterism_executor {self.secret}"
        self._secret_file.write_text(self.secret)
        self._secret_file.chmod(0o644)
        self._runner.run(self._open())

    def close(self) -> None:
        self._runner.run(self._sandbox.__aexit__(None, None, None))
        os.environ.pop("ASTERISM_HOSTILE_TEST", None)

    @property
    def has_namespaces(self) -> bool:
        return bool(self.client.isolation.namespaces)

    def meet_all(self, programs: Sequence[Hostile]) -> list[Encounter]:
        """Run programs at the same time. After an unexpected encounter, run each program alone instead."""
        encounters = self.run(self._meet(*programs))
        if all(each.is_expected(hostile) for each, hostile in zip(encounters, programs, strict=True)):
            return encounters
        self.record_state()
        return [self.meet(hostile) for hostile in programs]

    def meet(self, hostile: Hostile) -> Encounter:
        """Run a hostile program. Run it again if its call ends with a timeout and the program's record does not expect one."""
        (encounter,) = self.run(self._meet(hostile))
        for _ in range(MAX_REPEATS):
            if not encounter.has_unexpected_timeout(hostile):
                break
            (encounter,) = self.run(self._meet(hostile))
        if encounter.leftovers or encounter.neighbours != encounter.unharmed:
            self.record_state()  # otherwise, the next program would fail for this damage
        return encounter

    def record_state(self) -> None:
        """Record the current state, which later programs must not change."""

        async def record() -> None:
            self._before = await self._wait_until_settled(None)
            self.unharmed = [await self._ask_notebook(), await self._ask_program()] * 2

        self.run(record())

    def inspect_state(self) -> tuple[list[str], dict[str, Any]]:
        """Return (outcomes of the neighbour's calls, leftovers)."""

        async def inspect() -> tuple[list[str], dict[str, Any]]:
            outcomes = [await self._ask_notebook(), await self._ask_program()]
            return outcomes * 2, footprint.find_leftovers(self._before, await self._wait_until_settled(self._before))

        return self.run(inspect())

    def run(self, scenario: Any) -> Any:
        return self._runner.run(asyncio.wait_for(scenario, 120))

    async def _open(self) -> None:
        limits = {"time_limit_s": self._time_limit_s, "namespaces": self.namespaces, **LIMITS}
        self._sandbox = open_sandbox(self.backend, None, **limits)
        self.client = await self._sandbox.__aenter__()
        await self.client.printed(_OPEN_NEIGHBOUR, _NEIGHBOUR)
        await self.client.program("import numpy")  # the call starts the scientific servers
        await self.client.grade("x+1", "1+x")
        self.secrets = [self.secret, *footprint.read_container_secrets(self.client)]

    async def _meet(self, *programs: Hostile) -> list[Encounter]:
        """Run the programs at the same time. Their encounters share the neighbour's outcomes and the leftovers."""
        running = [(self._fill_placeholders(hostile), next(self._trajectories)) for hostile in programs]
        await asyncio.gather(*(self.client.printed("kept = ['kept']", trajectory) for _, trajectory in running))
        concurrent = asyncio.gather(self._ask_notebook(), self._ask_program())
        ended = await asyncio.gather(*(self._run_forms(*each) for each in running))
        neighbours = list(await concurrent)
        later = [
            await self._outcome(self.client.cell("kept", trajectory)) if "cell" in hostile.forms else None
            for hostile, trajectory in running
        ]
        neighbours += [await self._ask_notebook(), await self._ask_program()]
        for _, trajectory in running:
            await self.client.sandbox.end_notebook(trajectory)
        leftovers = footprint.find_leftovers(self._before, await self._wait_until_settled(self._before))
        return [
            Encounter(outcomes, kept, neighbours, self.unharmed, leftovers)
            for outcomes, kept in zip(ended, later, strict=True)
        ]

    async def _run_forms(self, hostile: Hostile, trajectory: int) -> dict[Form, CodeOutcome | SandboxFailure]:
        runs: dict[Form, Any] = {
            "program": lambda: self.client.program(hostile.code, hostile.stdin, trajectory),
            "cell": lambda: self.client.cell(hostile.code + ("" if hostile.shows else "\nNone"), trajectory),
        }
        outcomes = await asyncio.gather(*(self._outcome(runs[form]()) for form in hostile.forms))
        return dict(zip(hostile.forms, outcomes, strict=True))

    async def _outcome(self, result: Any) -> CodeOutcome | SandboxFailure:
        try:
            return (await result).outcome
        except SandboxFailure as failure:
            return failure

    async def _ask_notebook(self) -> str:
        return repr(await self._outcome(self.client.cell(_ASK_NEIGHBOUR, _NEIGHBOUR)))

    async def _ask_program(self) -> str:
        return repr(await self._outcome(self.client.program(_PROGRAM, f'"{_MARKER}"\n', _NEIGHBOUR)))

    async def _wait_until_settled(self, before: Footprint | None) -> Footprint:
        """Wait until there are no leftovers, or if `before` is None, until nothing changes."""
        deadline = asyncio.get_running_loop().time() + _SETTLE_S
        last = None
        while True:
            now = footprint.take(self.client)
            calm = now == last if before is None else not footprint.find_leftovers(before, now)
            if calm or asyncio.get_running_loop().time() > deadline:
                return now
            last = now
            await asyncio.sleep(0.02 if before else 0.3)

    def _fill_placeholders(self, hostile: Hostile) -> Hostile:
        if "@" not in hostile.code:
            return hostile
        neighbours = footprint.find_owners(self.client, "mine")
        # In the call's own namespace, process 1 is the call.
        pids = [*neighbours, *self._before.servers, os.getpid(), *({os.getppid()} - {1})]
        folders = [
            folder for pid in neighbours for folder in (f"/proc/{pid}/cwd", str(Path(f"/proc/{pid}/cwd").readlink()))
        ]
        known = {
            record.SECRET_FILE: str(self._secret_file),
            record.NEIGHBOURS: repr(pids),
            record.NEIGHBOUR_FOLDERS: repr(list(dict.fromkeys(folders))),
        }
        code = hostile.code
        for mark, value in known.items():
            code = code.replace(mark, value)
        return hostile._replace(code=code)
