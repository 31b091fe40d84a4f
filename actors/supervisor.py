"""Keeping processes alive: each is started, and started again when it has died, or was killed since it had fallen silent.

A start is a life. Before the next one comes a pause, which doubles with each death in a row; after too many of them the
run ends. What a life's end means to others is its owner's to tell (`left`), before the next life begins.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import count

import msgspec
import structlog

from actors.children import Child, Children, death_of, threads, words_in_memory
from bus.heartbeat import Heartbeat
from configs.errors import UNUSABLE
from configs.schema import Supervision


def unusable(life: int, child: Child) -> bool:
    """It has said that it cannot use what it was given: a file, a setting, the disk. Another try would say the same.

    The exit code of the learner is torchrun's own, whatever its ranks'.
    """
    return child.process.returncode == UNUSABLE or bool(words_in_memory(child))


class Program(msgspec.Struct, frozen=True):
    """What runs under a name."""

    argv: Callable[[int], Sequence[str]]  # the command line of a life, by its number
    threads: int = 1
    environment: Mapping[str, str] = {}
    forgiven: bool = True  # after it has lived for a while; False: when `proved` is said
    starts_within_s: float = 0.0  # so long it may take until it does what it is for: then that while begins
    ready: Callable[[int], Awaitable[None]] | None = None  # what a life waits for before it begins
    left: Callable[[int, Child], Awaitable[None]] | None = None  # told that a life is over
    helpless: Callable[[int, Child], bool] = unusable  # whether there is to be no further one


class Supervisor:
    def __init__(self, programs: Mapping[str, Program], children: Children, settings: Supervision) -> None:
        self._programs = programs
        self._children = children
        self._settings = settings
        self._lives: dict[str, int] = {}
        self._failures = dict.fromkeys(programs, 0)
        self._heard: dict[str, float] = {}  # when, from the present life
        self._tasks: list[asyncio.Task[None]] = []
        self._logger = structlog.get_logger()

    @property
    def names(self) -> Sequence[str]:
        return list(self._programs)

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._keep(name), name=name) for name in self._programs]

    async def until_given_up(self) -> None:
        """Raises ProcessDied when a process has died too often, or cannot be helped by another try."""
        await asyncio.wait(self._tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in self._tasks:
            if task.done():
                task.result()

    async def stop(self) -> None:
        """Nobody is started any more; those that live are the children's to end."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def heard(self, beat: Heartbeat) -> None:
        if self._lives.get(beat.process) == beat.life:
            self._heard[beat.process] = asyncio.get_running_loop().time()

    def proved(self, name: str) -> None:
        """What it was started for works: its deaths so far are forgiven."""
        self._failures[name] = 0

    # ---------------------------------------------------------------- lives

    async def _keep(self, name: str) -> None:
        """One life after the other. Raises ProcessDied."""
        program, loop = self._programs[name], asyncio.get_running_loop()
        for life in count(1):
            if program.ready is not None:
                await program.ready(life)
            self._lives[name] = life
            self._heard.pop(name, None)
            began = loop.time()
            environment = {**threads(program.threads), **program.environment}
            child = await self._children.spawn(name, program.argv(life), environment)
            await self._until_over(child, began)
            del self._lives[name]
            if program.forgiven and loop.time() - began >= program.starts_within_s + self._settings.settled_s:
                self._failures[name] = 0
            self._failures[name] += 1
            await self._bury(program, life, child)
            await asyncio.sleep(self._settings.backoff_s * 2 ** (self._failures[name] - 1))

    async def _until_over(self, child: Child, began: float) -> None:
        """It ends by itself, or is killed once it has been silent for too long."""
        loop, settings = asyncio.get_running_loop(), self._settings
        watched = loop.time()
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(settings.heartbeat_s):  # wait_for may swallow the word to stop
                    await child.process.wait()
                return
            now, last = loop.time(), self._heard.get(child.name)
            if now - watched > 3 * settings.heartbeat_s:  # this process itself was held up, and has heard nobody
                began = now
                if last is not None:
                    last = self._heard[child.name] = now
            watched = now
            silent_s = now - (began if last is None else last)
            if silent_s > (settings.start_s if last is None else settings.silent_s):
                self._logger.error("process.silent", name=child.name, silent_s=round(silent_s, 1))
                await self._children.kill(child.name)
                return

    async def _bury(self, program: Program, life: int, child: Child) -> None:
        exit_code, failures = child.process.returncode, self._failures[child.name]
        self._logger.error("process.died", name=child.name, life=life, exit_code=exit_code, failures_in_a_row=failures)
        if program.helpless(life, child):
            raise death_of(child)
        if program.left is not None:
            await program.left(life, child)
        if failures > self._settings.restarts:
            raise death_of(child, f"{failures} times in a row, at last ")
