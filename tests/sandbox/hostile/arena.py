"""A running sandbox in which hostile programs meet neighbours, one program after the other."""

from __future__ import annotations

import asyncio
import itertools
import os
from pathlib import Path
from typing import Any, NamedTuple

from bus.messages import CodeOutcome
from configs.schema import Sandbox as SandboxConfig
from sandbox.contract import SandboxFailure
from tests.sandbox.conftest import BACKENDS, Client
from tests.sandbox.hostile import footprint, record
from tests.sandbox.hostile.footprint import Footprint
from tests.sandbox.hostile.record import Form, Hostile

LIMITS: dict[str, Any] = {
    "time_limit_s": 0.5,
    "memory_mib": 128,
    "max_processes": 16,
    "file_mib": 4,
    "output_kib": 64,
    "fork_servers": 1,
    "container_memory_mib": 2048,
    "session_memory_share": 1.0,  # no notebook is evicted, however full the machine is
}
_NEIGHBOUR = 1  # its trajectory
_SETTLE_S = 20.0  # until what a call left has gone; a sandbox that leaves something fails then
_MARKER = "secret of a neighbour"

_OPEN_NEIGHBOUR = f"""
import os
token = os.urandom(8).hex()
marker = {_MARKER!r}
open('mine', 'w').write('abc')
"""
# What its own process, its folder, and whoever may reach them from outside would change.
_ASK_NEIGHBOUR = "print(token, open('mine').read(), os.listdir(), len(os.sched_getaffinity(0)))"
_PROGRAM = f"""
import json, os, random, string
marker = {_MARKER!r}
print(json.loads(input()), os.listdir(), marker, flush=True)
total = sum(range(200_000))
"""


class Met(NamedTuple):
    """What came of a hostile program and of those beside it. A failure of infrastructure is none of the outcomes."""

    outcomes: dict[Form, CodeOutcome | SandboxFailure]
    later: CodeOutcome | SandboxFailure | None  # of a later cell of the hostile notebook
    neighbours: list[str]  # what each of the neighbour's calls said
    unharmed: list[str]  # what it says when nobody harms it
    left: dict[str, Any]  # that was not there before


class Arena:
    """`backend` is a key of BACKENDS; `namespaces` as in the configuration."""

    def __init__(self, backend: str, namespaces: str, folder: Path) -> None:
        self.backend = backend
        self.namespaces = namespaces
        self.secret = os.urandom(12).hex()
        self._secret_file = folder / "secret"
        self._trajectories = itertools.count(100)
        self._runner = asyncio.Runner()

    def open(self) -> None:
        """The executor's environment holds the secret from here on, and so does a file that everybody may read."""
        os.environ["ASTERISM_HOSTILE_TEST"] = f"asterism_executor {self.secret}"
        self._secret_file.write_text(self.secret)
        self._secret_file.chmod(0o644)
        self._runner.run(self._open())

    def close(self) -> None:
        self._runner.run(self.client.sandbox.close())
        self._runner.close()
        os.environ.pop("ASTERISM_HOSTILE_TEST")

    @property
    def has_namespaces(self) -> bool:
        return bool(self.client.isolation.namespaces)

    def meet(self, hostile: Hostile) -> Met:
        return self._runner.run(asyncio.wait_for(self._meet(hostile), 120))

    def look_around(self) -> tuple[list[str], dict[str, Any]]:
        """(what the neighbours say now, what is left that was not there before)"""

        async def look() -> tuple[list[str], dict[str, Any]]:
            said = [await self._ask_notebook(), await self._ask_program()]
            return said * 2, footprint.left_over(self._before, await self._settled(self._before))

        return self.run(look())

    def run(self, scenario: Any) -> Any:
        return self._runner.run(asyncio.wait_for(scenario, 120))

    # ------------------------------------------------------------ parts

    async def _open(self) -> None:
        sandbox = BACKENDS[self.backend](SandboxConfig(namespaces=self.namespaces, **LIMITS), seed=7)  # pyright: ignore
        self.client = Client(sandbox, await sandbox.start())
        await self.client.printed(_OPEN_NEIGHBOUR, _NEIGHBOUR)
        await self.client.program("import numpy")  # the scientific servers start when they are asked for
        await self.client.grade("x+1", "1+x")
        self._before = await self._settled(None)
        self.secrets = [self.secret, *footprint.container_secrets(self.client)]
        self.unharmed = [await self._ask_notebook(), await self._ask_program()] * 2

    async def _meet(self, hostile: Hostile) -> Met:
        trajectory = next(self._trajectories)
        code = self._with_what_is_known(hostile.code)
        await self.client.printed("kept = ['kept']", trajectory)
        forms: list[Form] = [form for form in hostile.forms if form == "program"]
        runs = [self._outcome(self.client.program(code, hostile.stdin, trajectory)) for _ in forms]
        if "cell" in hostile.forms:
            forms.append("cell")
            runs.append(self._outcome(self.client.cell(code if hostile.shows else code + "\nNone", trajectory)))
        beside = asyncio.gather(self._ask_notebook(), self._ask_program())
        outcomes = dict(zip(forms, await asyncio.gather(*runs), strict=True))
        neighbours = list(await beside)
        later = await self._outcome(self.client.cell("kept", trajectory)) if "cell" in forms else None
        neighbours += [await self._ask_notebook(), await self._ask_program()]
        await self.client.sandbox.end_session(trajectory)
        after = await self._settled(self._before)
        met = Met(outcomes, later, neighbours, self.unharmed, footprint.left_over(self._before, after))
        if met.left or neighbours != self.unharmed:  # the next program is not to blame
            self._before, self.unharmed = after, [await self._ask_notebook(), await self._ask_program()] * 2
        return met

    async def _outcome(self, result: Any) -> CodeOutcome | SandboxFailure:
        try:
            return (await result).outcome
        except SandboxFailure as failure:
            return failure

    async def _ask_notebook(self) -> str:
        return repr(await self._outcome(self.client.cell(_ASK_NEIGHBOUR, _NEIGHBOUR)))

    async def _ask_program(self) -> str:
        return repr(await self._outcome(self.client.program(_PROGRAM, f'"{_MARKER}"\n', _NEIGHBOUR)))

    async def _settled(self, before: Footprint | None) -> Footprint:
        """Once nothing is left over, or too late; without `before` once nothing changes any more."""
        deadline = asyncio.get_running_loop().time() + _SETTLE_S
        last = None
        while True:
            now = footprint.take(self.client)
            calm = now == last if before is None else not footprint.left_over(before, now)
            if calm or asyncio.get_running_loop().time() > deadline:
                return now
            last = now
            await asyncio.sleep(0.02 if before else 0.3)

    def _with_what_is_known(self, code: str) -> str:
        neighbours = footprint.owners_of(self.client, "mine")
        pids = [*neighbours, *self._before.servers, os.getpid(), os.getppid()]
        folders = [
            folder for pid in neighbours for folder in (f"/proc/{pid}/cwd", str(Path(f"/proc/{pid}/cwd").readlink()))
        ]
        known = {
            record.SECRET_FILE: str(self._secret_file),
            record.NEIGHBOURS: repr(pids),
            record.NEIGHBOUR_FOLDERS: repr(list(dict.fromkeys(folders))),
        }
        for mark, value in known.items():
            code = code.replace(mark, value)
        return code
