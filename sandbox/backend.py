"""The sandbox: fork servers on a host, which is this machine (`process_backend`) or containers (`docker_backend`).

    run()   -> flavour of the code -> a slot of a fork server (sandbox.pool) -> the forked process -> CodeOutcome
    grade() -> plain numbers and equal strings here, else the grader's process (sandbox.grading)

Bounds: `max_queued_calls` calls wait or run at once, beyond which `run` raises SandboxFailure; a fork server runs
`RUNNING_PER_SERVER` side by side; `live_sessions` notebooks have a process, the others are made again from their cells.
A call's time limit counts from its start, never from its arrival.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NoReturn

from bus.messages import (
    AnswerSubmitted,
    CodeDied,
    CodeOk,
    CodeOutcome,
    CodeOutOfMemory,
    CodeRaised,
    CodeRefused,
    CodeRequested,
    CodeTimedOut,
    Output,
)
from configs.schema import Sandbox as SandboxConfig
from policies.draws import mix
from sandbox.contract import CodeResult, Grade, Isolation, SandboxFailure
from sandbox.flavours import Flavour, flavour_of
from sandbox.gauge import Gauge, SandboxLoad
from sandbox.grading import Grader
from sandbox.host import Host
from sandbox.inside.frames import Frame
from sandbox.inside.settings import CODE_BYTES, STDIN_BYTES, Settings
from sandbox.isolation import isolation_of
from sandbox.pool import ServerPool
from sandbox.sessions import Session, Sessions

_SESSION_ENDED = "the trajectory ended"
_MEMORY_LOOK_S = 0.5  # at most so often the memory is looked at
_KEPT = ("ok", "raised", "memory")  # the ends of a cell whose effects stay
_ATTEMPTS = 3  # to bring a notebook's state to where it was and run a cell there
_NO_OUTPUT: Frame = {"stdout": "", "stderr": "", "stdout_cut": 0, "stderr_cut": 0}
_LOST_AGAIN: Frame = {"kind": "died", "details": ["-9"], "duration_s": 0.0, **_NO_OUTPUT}


class ForkServerSandbox:
    """Implements sandbox.contract.Sandbox. `seed` decides, with trajectory and call, what random generators draw."""

    def __init__(self, host: Host, config: SandboxConfig, seed: int = 0) -> None:
        self._host = host
        self._config = config
        self._seed = seed
        self._namespaces = config.namespaces != "off"
        self._pools: dict[Flavour, ServerPool] = {}
        self._sessions = Sessions(config.live_sessions)
        self._memory_looked_at = 0.0
        self._grader: Grader | None = None
        self._calls = 0  # numbers them on the wire
        self._queued = 0
        self._gauge = Gauge()

    @property
    def server_pids(self) -> list[int]:
        """Of the fork servers and the grader, as they were started."""
        pids = [pid for pool in self._pools.values() for pid in pool.server_pids]
        return pids + ([self._grader.pid] if self._grader is not None and self._grader.pid is not None else [])

    async def start(self) -> Isolation:
        try:
            return await self._start()
        except BaseException:
            await self.close()
            raise

    async def _start(self) -> Isolation:
        await self._host.start()
        refusal = None
        try:
            greetings = await self._start_pool()
        except SandboxFailure as error:
            if self._config.namespaces != "auto":
                raise
            refusal, self._namespaces = str(error), False
            greetings = await self._start_pool()
        for flavour in ("numpy", "scientific"):
            self._pools[flavour] = ServerPool(self._host, self._settings(flavour), self._config.fork_servers)
        self._grader = Grader(self._host, self._settings("grader"))
        return isolation_of(greetings[0], refusal, *self._host.about())

    async def run(self, call: CodeRequested) -> CodeResult:
        refused = self._refusal(call)
        if refused is not None:
            return CodeResult(refused, 0.0)
        if self._queued >= self._config.max_queued_calls:
            raise SandboxFailure("the sandbox's queue of calls is full")
        self._queued += 1
        try:
            with self._gauge.call():
                if call.tool == "jupyter_code":
                    return await self._run_cell(call)
                return await self._run_program(call)
        finally:
            self._queued -= 1

    async def grade(self, submission: AnswerSubmitted) -> Grade:
        assert self._grader is not None, "start() comes first"
        with self._gauge.grading():
            return await self._grader.grade(submission.answer, submission.ground_truth)

    async def until_broken(self) -> NoReturn:
        await self._host.until_broken()

    def load(self) -> SandboxLoad:
        return self._gauge.load()

    def restore_session(self, trajectory_id: int, cells: Sequence[CodeRequested]) -> None:
        session = self._sessions.of(trajectory_id, flavour_of(cells[0].code))
        session.done = [(cell.code, self._seed_of(cell)) for cell in cells]

    async def end_session(self, trajectory_id: int) -> None:
        session = self._sessions.remove(trajectory_id)
        if session is not None:
            session.ended = True
            self._drop_process(session)

    async def close(self) -> None:
        try:
            for pool in self._pools.values():
                await pool.close()
            if self._grader is not None:
                await self._grader.close()
        finally:
            await self._host.close()

    # ------------------------------------------------------------ programs

    async def _run_program(self, call: CodeRequested) -> CodeResult:
        pool = await self._pool(flavour_of(call.code))
        server = await pool.take()
        try:
            with self._gauge.slot():
                answer = await server.call(self._frame("run", call.code, call.stdin, self._seed_of(call)))
        finally:
            pool.give_back(server)
        return self._result(answer)

    # ------------------------------------------------------------ notebooks

    async def _run_cell(self, call: CodeRequested) -> CodeResult:
        session = self._sessions.of(call.trajectory_id, flavour_of(call.code))
        async with session.turn:
            seed = self._seed_of(call)
            answer = await self._cell(session, call.code, seed)
            if answer["kind"] in _KEPT and session.held > len(session.done):  # out of memory may also be its end
                session.done.append((call.code, seed))
            elif session.held < len(session.done):
                session.ended_itself = True
            return self._result(answer)

    async def _cell(self, session: Session, code: str, seed: int) -> Frame:
        for _ in range(_ATTEMPTS):
            answer = await self._catch_up(session)
            if answer is None:
                answer = await self._on_process(session, code, seed)
            if answer["kind"] != "lost":
                return answer
            session.ended_itself = True
        return _LOST_AGAIN

    async def _catch_up(self, session: Session) -> Frame | None:
        """Runs the cells that the process's state lacks, unseen by the model, so that what was lost costs no state.

        A cell may come to another end than before. Where the notebook's own code has cost it its state, that end is
        the answer, and the notebook goes on from before that cell; else it is a failure of ours.
        """
        if not session.live:
            session.server, session.held = None, 0
            self._make_room(1)
        while session.held < len(session.done):
            number = session.held
            answer = await self._on_process(session, *session.done[number])
            if answer["kind"] == "lost":
                return answer
            if answer["kind"] == "memory" and session.held == number:
                del session.done[
                    number
                ]  # who asked to restore the notebook cannot know which ends by memory left no trace
                continue
            if answer["kind"] not in _KEPT or session.held == number:
                if not session.ended_itself:
                    self._drop_process(session)
                    raise SandboxFailure("a notebook could not be made again")
                del session.done[number:]
                return {**answer, **_NO_OUTPUT}
        session.ended_itself = False
        return None

    async def _on_process(self, session: Session, code: str, seed: int) -> Frame:
        pool = await self._pool(session.flavour)
        server = await pool.take(session.server)
        try:
            if session.ended:
                raise SandboxFailure(_SESSION_ENDED)
            session.server = server
            with self._gauge.slot():
                answer = await server.call(self._frame("cell", code, "", seed, session.number, session.held))
        except BaseException:
            self._drop_process(session)
            raise
        finally:
            pool.give_back(server)
        if session.ended:
            raise SandboxFailure(_SESSION_ENDED)
        session.held = answer["cells"]
        self._make_room(0)
        return answer

    def _make_room(self, new: int) -> None:
        """For so many notebooks more; and in memory, where it is short. They are made again when they are needed."""
        now = asyncio.get_running_loop().time()
        pressed = False
        if now > self._memory_looked_at + _MEMORY_LOOK_S:
            self._memory_looked_at = now
            pressed = self._host.memory_share() > self._config.session_memory_share
        for idle in self._sessions.to_evict(new, pressed=pressed):
            self._drop_process(idle)

    def _drop_process(self, session: Session) -> None:
        if session.server is not None:
            session.server.end_session(session.number)
            session.server, session.held = None, 0

    # ------------------------------------------------------------ common

    async def _start_pool(self) -> list[Frame]:
        pool = ServerPool(self._host, self._settings("bare"), self._config.fork_servers)
        greetings = await pool.start()
        self._pools["bare"] = pool
        return greetings

    async def _pool(self, flavour: Flavour) -> ServerPool:
        """The scientific servers start when the first code asks for them: a run without numpy does not pay."""
        pool = self._pools[flavour]
        await pool.start()
        return pool

    def _settings(self, flavour: str) -> Settings:
        config = self._config
        return Settings(
            flavour=flavour,
            namespaces=self._namespaces,
            import_folders=(),
            time_limit_s=config.grade_limit_s if flavour == "grader" else config.time_limit_s,
            memory_mib=config.memory_mib,
            max_processes=config.max_processes,
            file_mib=config.file_mib,
            output_bytes=config.output_kib * 1024,
            fork_servers=config.fork_servers,
        )

    def _frame(self, op: str, code: str, stdin: str, seed: int, session: int | None = None, cells: int = 0) -> Frame:
        self._calls += 1
        fields = {"id": self._calls, "op": op, "code": code, "stdin": stdin, "seed": seed}
        return {**fields, "session": session, "cells": cells}

    def _seed_of(self, call: CodeRequested) -> int:
        return mix(self._seed, call.trajectory_id, call.call)

    def _refusal(self, call: CodeRequested) -> CodeRefused | None:
        if call.tool not in ("jupyter_code", "python_code_with_standard_io"):
            return CodeRefused(f"unknown tool {call.tool}")
        if len(call.code) > CODE_BYTES:
            return CodeRefused(f"the code is longer than {CODE_BYTES} characters")
        stdin_limit = min(STDIN_BYTES, self._config.file_mib << 20) // 4  # four bytes a character at most
        if len(call.stdin) > stdin_limit:
            return CodeRefused(f"the input is longer than {stdin_limit} characters")
        return None

    def _result(self, answer: Frame) -> CodeResult:
        return CodeResult(outcome_of(answer, self._config), answer["duration_s"])


def outcome_of(answer: Frame, config: SandboxConfig) -> CodeOutcome:
    """The fork server's answer as a message. Raises KeyError for a kind that it does not know."""
    output = Output(answer["stdout"], answer["stderr"], answer["stdout_cut"], answer["stderr_cut"])
    match answer["kind"]:
        case "ok":
            return CodeOk(output)
        case "raised":
            return CodeRaised(output, *answer["details"])
        case "timeout":
            return CodeTimedOut(output, config.time_limit_s)
        case "memory":
            return CodeOutOfMemory(output, config.memory_mib)
        case "died":
            return CodeDied(output, int(answer["details"][0]))
        case kind:
            raise KeyError(kind)
