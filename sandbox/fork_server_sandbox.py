"""The sandbox: fork servers on a host (this machine or containers) run code and grade answers.

    run()   -> preload of the code -> slot of a fork server (pool/server_pool.py) -> forked process -> CodeOutcome
    grade() -> plain numbers and equal strings in this process, all else in the grader (pool/grader_client.py)

Bounds: beyond `max_queued_calls` waiting or running calls, `run` raises SandboxFailure; a fork server
runs `SLOTS_PER_SERVER` calls concurrently; at most `max_live_notebooks` notebooks, spare ones included,
have a process, and evicted notebooks are rebuilt from their cells when needed. A call's time limit counts
from its start, without queueing.
"""

import asyncio
from collections.abc import Sequence
from typing import NoReturn

from asterism.bus.messages import (
    AnswerSubmitted,
    CodeCrashed,
    CodeOk,
    CodeOutcome,
    CodeOutOfMemory,
    CodeRaised,
    CodeRefused,
    CodeRequested,
    CodeTimedOut,
    Output,
)
from asterism.configs.schema.machines import SandboxConfig as SandboxConfig
from asterism.policies.seeded_random import mix
from asterism.sandbox.call_retries import MAX_ATTEMPTS, CallRetries
from asterism.sandbox.contract import CodeResult, Grade, Isolation, SandboxFailure
from asterism.sandbox.hosts.host import Host
from asterism.sandbox.inside.wire.frames import Frame
from asterism.sandbox.inside.wire.server_settings import MAX_CODE_BYTES, MAX_STDIN_BYTES, ServerSettings
from asterism.sandbox.isolation import build_isolation
from asterism.sandbox.load_gauge import LoadGauge, SandboxLoad
from asterism.sandbox.notebooks import MemoryRelief, Notebook, NotebookTable, SpareNotebooks
from asterism.sandbox.pool.answer_checks import Acceptance
from asterism.sandbox.pool.grader_client import GraderClient
from asterism.sandbox.pool.server_pool import ServerPool
from asterism.sandbox.preloads import Preload, select_preload

_NOTEBOOK_ENDED = "the trajectory ended"
_COMMITTED_KINDS = ("ok", "raised", "memory")  # answers after which the effects of a cell persist
_NO_OUTPUT: Frame = {"stdout": "", "stderr": "", "stdout_cut": 0, "stderr_cut": 0}
_STATE_LOST: Frame = {"kind": "died", "details": ["-9"], "duration_s": 0.0, **_NO_OUTPUT}


class ForkServerSandbox:
    """Implements asterism.sandbox.contract.Sandbox. `seed`, trajectory and call number seed a call's generators."""

    def __init__(self, host: Host, config: SandboxConfig, seed: int = 0, accept: Acceptance = "number") -> None:
        self._host = host
        self._accept: Acceptance = accept
        self._config = config
        self._seed = seed
        self._namespaces = config.namespaces != "off"
        self._pools: dict[Preload, ServerPool] = {}
        self._notebooks = NotebookTable(config.max_notebooks_in_use)
        self._spares = spares = SpareNotebooks(self._pools, config.spare_notebooks_per_server)
        self._memory = MemoryRelief(host, config.notebook_memory_share, self._notebooks, spares, self._drop_process)
        self._retries = CallRetries(spares, self._notebooks, self._drop_process)
        self._memory_watch: asyncio.Task[NoReturn] | None = None
        self._grader: GraderClient | None = None
        self._num_calls = 0  # calls so far, and the last call id on the wire
        self._num_queued = 0
        self._gauge = LoadGauge()

    @property
    def server_pids(self) -> list[int]:
        """Pids of the fork servers and the grader."""
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
        for preload in ("numpy", "scientific"):
            self._pools[preload] = ServerPool(self._host, self._build_settings(preload), self._config.fork_servers)
        self._grader = GraderClient(self._host, self._build_settings("grader"), self._accept)
        self._memory_watch = asyncio.create_task(self._memory.watch())
        return build_isolation(greetings[0], refusal, *self._host.describe())

    async def run(self, call: CodeRequested) -> CodeResult:
        refused = _check_call(call, self._config)
        if refused is not None:
            return CodeResult(refused, 0.0)
        if self._num_queued >= self._config.max_queued_calls:
            raise SandboxFailure("the sandbox's queue of calls is full")
        self._num_queued += 1
        try:
            with self._gauge.track_call():
                result = await (self._run_cell(call) if call.tool == "jupyter_code" else self._run_program(call))
        finally:
            self._num_queued -= 1
        self._gauge.add_code_time(result.duration_s)
        return result

    async def grade(self, submission: AnswerSubmitted) -> Grade:
        assert self._grader is not None, "start() comes first"
        with self._gauge.track_grading():
            return await self._grader.grade(submission.answer, submission.ground_truth)

    async def wait_until_broken(self) -> NoReturn:
        await self._host.wait_until_broken()

    def get_load(self) -> SandboxLoad:
        return self._gauge.get_load()

    def restore_notebook(self, trajectory_id: int, cells: Sequence[CodeRequested]) -> None:
        if not cells:
            return
        notebook = self._notebooks.get_or_create(trajectory_id, select_preload(cells[0].code))
        notebook.completed_cells = [(cell.code, self._derive_seed(cell)) for cell in cells]

    async def end_notebook(self, trajectory_id: int) -> None:
        notebook = self._notebooks.remove(trajectory_id)
        if notebook is not None:
            notebook.ended = True
            self._drop_process(notebook)

    async def close(self) -> None:
        if self._memory_watch is not None:
            self._memory_watch.cancel()
        try:
            for pool in self._pools.values():
                await pool.close()
            if self._grader is not None:
                await self._grader.close()
        finally:
            await self._host.close()

    # ------------------------------------------------------------ programs

    async def _run_program(self, call: CodeRequested) -> CodeResult:
        for attempt in range(MAX_ATTEMPTS):
            pool = await self._get_started_pool(select_preload(call.code))
            await self._memory.make_room()
            server = await pool.acquire()
            try:
                with self._gauge.track_slot():
                    answer = await server.call(self._build_frame("run", call.code, call.stdin, self._derive_seed(call)))
            finally:
                pool.release(server)
            if answer["kind"] != "failed":
                return CodeResult(parse_outcome(answer, self._config), answer["duration_s"])
            await self._retries.prepare(answer["details"][0], attempt)
        raise AssertionError("the last attempt returns or raises")

    # ------------------------------------------------------------ notebooks

    async def _run_cell(self, call: CodeRequested) -> CodeResult:
        notebook = self._notebooks.get_or_create(call.trajectory_id, select_preload(call.code))
        async with notebook.lock:
            seed = self._derive_seed(call)
            answer = await self._run_cell_with_retries(notebook, call.code, seed)
            num_completed = len(notebook.completed_cells)
            # An out-of-memory answer can also mean that the cell left no effects.
            if answer["kind"] in _COMMITTED_KINDS and notebook.num_applied_cells > num_completed:
                notebook.completed_cells.append((call.code, seed))
            elif notebook.num_applied_cells < num_completed:
                notebook.destroyed_own_state = True
            return CodeResult(parse_outcome(answer, self._config), answer["duration_s"])

    async def _run_cell_with_retries(self, notebook: Notebook, code: str, seed: int) -> Frame:
        for attempt in range(MAX_ATTEMPTS):
            answer = await self._replay_cells(notebook)
            if answer is None:
                answer = await self._run_in_process(notebook, code, seed)
            if answer["kind"] == "failed":
                await self._retries.prepare(answer["details"][0], attempt)
                continue
            if answer["kind"] != "lost":
                return answer
            notebook.destroyed_own_state = True
        return _STATE_LOST

    async def _replay_cells(self, notebook: Notebook) -> Frame | None:
        """Run the completed cells that the process has not run yet. The model gets no output.

        A replayed cell may fail. If the notebook's own code has destroyed its state, the failure is the
        answer, and the notebook keeps only the cells before the failed one. Any other failure raises SandboxFailure.
        """
        if not notebook.is_live:
            notebook.server, notebook.num_applied_cells = None, 0
            for idle in self._notebooks.select_evictions(1):
                self._drop_process(idle)
            await self._memory.make_room()
        while notebook.num_applied_cells < len(notebook.completed_cells):
            number = notebook.num_applied_cells
            answer = await self._run_in_process(notebook, *notebook.completed_cells[number])
            if answer["kind"] in ("lost", "failed"):
                return answer
            if answer["kind"] == "memory" and notebook.num_applied_cells == number:
                # `restore_notebook` also gets out-of-memory cells that left no effects.
                del notebook.completed_cells[number]
                continue
            if answer["kind"] not in _COMMITTED_KINDS or notebook.num_applied_cells == number:
                if not notebook.destroyed_own_state:
                    self._drop_process(notebook)
                    raise SandboxFailure("a notebook could not be rebuilt")
                del notebook.completed_cells[number:]
                return {**answer, **_NO_OUTPUT}
        notebook.destroyed_own_state = False
        return None

    async def _run_in_process(self, notebook: Notebook, code: str, seed: int) -> Frame:
        pool = await self._get_started_pool(notebook.preload)
        server = await pool.acquire(notebook.server)
        try:
            if notebook.ended:
                raise SandboxFailure(_NOTEBOOK_ENDED)
            notebook.server = server
            with self._gauge.track_slot():
                answer = await server.call(
                    self._build_frame("cell", code, "", seed, notebook.number, notebook.num_applied_cells)
                )
        except BaseException:
            self._drop_process(notebook)
            raise
        finally:
            pool.release(server)
        if notebook.ended:
            raise SandboxFailure(_NOTEBOOK_ENDED)
        notebook.num_applied_cells = answer["cells"]
        return answer

    def _drop_process(self, notebook: Notebook) -> None:
        if notebook.server is not None:
            notebook.server.end_notebook(notebook.number)
            notebook.server, notebook.num_applied_cells = None, 0

    # ------------------------------------------------------------ common

    async def _start_pool(self) -> list[Frame]:
        pool = ServerPool(self._host, self._build_settings("bare"), self._config.fork_servers)
        greetings = await pool.start()
        self._pools["bare"] = pool
        return greetings

    async def _get_started_pool(self, preload: Preload) -> ServerPool:
        """Return the pool; its servers start on first use, so that a run without numpy has no numpy servers."""
        pool = self._pools[preload]
        await pool.start()
        return pool

    def _build_settings(self, preload: str) -> ServerSettings:
        config = self._config
        return ServerSettings(
            preload=preload,
            namespaces=self._namespaces,
            import_folders=(),
            time_limit_s=config.grade_limit_s if preload == "grader" else config.time_limit_s,
            memory_mib=config.memory_mib,
            max_processes=config.max_processes,
            file_mib=config.file_mib,
            output_bytes=config.output_kib * 1024,
            fork_servers=config.fork_servers,
            spare_notebooks=config.spare_notebooks_per_server,
            concurrent_gradings=config.concurrent_gradings,
            max_call_extension=config.max_call_extension,
        )

    def _build_frame(
        self, op: str, code: str, stdin: str, seed: int, notebook_id: int | None = None, cells: int = 0
    ) -> Frame:
        self._num_calls += 1
        fields = {"id": self._num_calls, "op": op, "code": code, "stdin": stdin, "seed": seed}
        return {**fields, "session": notebook_id, "cells": cells}

    def _derive_seed(self, call: CodeRequested) -> int:
        return mix(self._seed, call.trajectory_id, call.call)


def _check_call(call: CodeRequested, config: SandboxConfig) -> CodeRefused | None:
    if call.tool not in ("jupyter_code", "python_code_with_standard_io"):
        return CodeRefused(f"unknown tool {call.tool}")
    if len(call.code) > MAX_CODE_BYTES:
        return CodeRefused(f"the code is longer than {MAX_CODE_BYTES} characters")
    # A character has at most four bytes.
    stdin_limit = min(MAX_STDIN_BYTES, config.file_mib << 20) // 4
    if len(call.stdin) > stdin_limit:
        return CodeRefused(f"the input is longer than {stdin_limit} characters")
    return None


def parse_outcome(answer: Frame, config: SandboxConfig) -> CodeOutcome:
    """Return the fork server's answer as a message. Raises KeyError for an unknown kind."""
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
            return CodeCrashed(output, int(answer["details"][0]))
        case kind:
            raise KeyError(kind)
