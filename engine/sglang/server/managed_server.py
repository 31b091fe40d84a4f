"""Starts, monitors and stops one SGLang server, in a separate process group that dies with this
process.

All of its processes write to one log file. When one of them exits, or the server becomes
unresponsive, the server counts as dead and all of its processes are killed.
"""

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import structlog

from asterism.bus.process import parent_death
from asterism.bus.process.waiting import cancel_tasks, wait_for_exit
from asterism.engine.contract import EngineFailure
from asterism.engine.sglang.client import SGLangClient
from asterism.engine.sglang.http_api import ServerInfo
from asterism.engine.sglang.server.compatibility import ServerRequirements, ServerUnusable, check_compatibility
from asterism.engine.sglang.server.interpreter_check import check_interpreter, wait_for_free_port
from asterism.engine.sglang.server.server_arguments import HOST, build_argv, build_environment, compute_port
from asterism.engine.sglang.server.server_process_group import ProcessGroup, read_log_tail

TERM_GRACE_S = 1.5  # time from SIGTERM to SIGKILL; less than the 2 s that the run allows its generators
_READY_POLL_S = 0.2
_USAGE_EXIT_CODE = 2  # exit code of argparse after a wrong argument
PROBE_INTERVAL_S = 2.0
MAX_FAILED_PROBES = 3  # failed probes in a row that make a server unresponsive


class SGLangServer:
    """An SGLang server of this run. `start` sets `death` and `info`."""

    death: asyncio.Future[str]  # result: the cause of the server's death; `close` cancels the future
    info: ServerInfo

    def __init__(
        self,
        requirements: ServerRequirements,
        *,
        log: Path,
        scratch: Path,
        index: int = 0,
        version: int = 0,
        probe_interval_s: float = PROBE_INTERVAL_S,
    ) -> None:
        """`index`: the engine's index in the run. `version`: version of the model's weights. `scratch`:
        a folder only for the server's temporary files; its path should be short, because sockets are in this folder."""
        self.url = f"http://{HOST}:{compute_port(requirements.sglang, index)}"
        self._requirements, self._index, self._version = requirements, index, version
        self._log, self._scratch = log, scratch
        self._probe_interval_s = probe_interval_s
        self._name = f"the SGLang server {log.stem}"
        self._group: ProcessGroup | None = None
        self._watch_tasks: list[asyncio.Task[None]] = []
        self._logger = structlog.get_logger()

    def list_processes(self) -> dict[int, str]:
        """Return the names of the server's live processes by pid."""
        return {} if self._group is None else self._group.get_process_names()

    async def start(self) -> str:
        """Return the base URL once the server is ready.

        Raises ServerUnusable for a configuration error, and EngineFailure if the server exits or
        is not ready within sglang.startup_timeout_s; no process is left then.
        """
        began = time.monotonic()
        try:
            async with asyncio.timeout(self._requirements.sglang.startup_timeout_s):
                self.info = await self._start_and_check()
        except TimeoutError:
            await self.close()
            limit_s = self._requirements.sglang.startup_timeout_s
            raise EngineFailure(
                f"{self._name} was not ready within sglang.startup_timeout_s = {limit_s:g}:\n{self._read_log_tail()}"
            ) from None
        except BaseException:
            await self.close()
            raise
        self._logger.info("server.started", url=self.url, start_s=time.monotonic() - began)
        return self.url

    async def close(self) -> None:
        """Stop all processes. A second call does nothing."""
        await cancel_tasks(*self._watch_tasks)
        group, self._group = self._group, None
        if group is not None:
            self.death.cancel()
            if not await group.terminate(TERM_GRACE_S):
                self._logger.info("server.killed", url=self.url)
        await asyncio.to_thread(shutil.rmtree, self._scratch, ignore_errors=True)

    # ---------------------------------------------------------------- lifecycle

    async def _start_and_check(self) -> ServerInfo:
        engine, sglang = self._requirements.engine, self._requirements.sglang
        self.death = asyncio.get_running_loop().create_future()
        self._clear_scratch()
        variables = {**os.environ, **build_environment(engine, sglang, self._scratch)}
        python = sglang.python or sys.executable
        await check_interpreter(python, variables)
        await wait_for_free_port(HOST, compute_port(sglang, self._index))
        group = await self._spawn_shielded(python, variables)
        self._watch_tasks = [asyncio.create_task(self._watch_leader(group))]
        async with self._make_client() as client:
            while not await client.is_ready():
                self._raise_if_dead(group)
                await asyncio.sleep(_READY_POLL_S)
            info = await client.get_server_info()
        self._raise_if_dead(group)  # otherwise another server on this port can have responded
        check_compatibility(info, self._requirements, self._name)
        self._watch_tasks += [
            asyncio.create_task(self._watch_worker(group, pid, name)) for pid, name in group.find_workers().items()
        ]
        self._watch_tasks.append(asyncio.create_task(self._watch_liveness(group)))
        return info

    def _clear_scratch(self) -> None:
        """Remove the files of an earlier incarnation that was killed."""
        shutil.rmtree(self._scratch, ignore_errors=True)
        self._scratch.mkdir(parents=True, mode=0o700)

    async def _spawn_shielded(self, python: str, variables: Mapping[str, str]) -> ProcessGroup:
        """Finish the start even if cancelled, so that `close` can stop the process."""
        starting = asyncio.ensure_future(self._spawn(python, variables))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            await starting
            raise

    async def _spawn(self, python: str, variables: Mapping[str, str]) -> ProcessGroup:
        requirements = self._requirements
        arguments = build_argv(
            requirements.engine,
            requirements.sglang,
            model=requirements.model,
            sequence_tokens=requirements.sequence_tokens,
            index=self._index,
            version=self._version,
            lora=requirements.lora,
        )
        with self._log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", parent_death.__file__, python, *arguments),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**variables, parent_death.PARENT_PID_VARIABLE: str(os.getpid())},
                start_new_session=True,
            )
        self._group = ProcessGroup(process, self._scratch)
        return self._group

    async def _watch_leader(self, group: ProcessGroup) -> None:
        code = await group.leader.wait()
        self._handle_death(group, f"ended with exit code {code}")

    async def _watch_worker(self, group: ProcessGroup, pid: int, name: str) -> None:
        await wait_for_exit(pid)
        self._handle_death(group, f"lost its process {name}")

    async def _watch_liveness(self, group: ProcessGroup) -> None:
        async with self._make_client() as client:
            await wait_until_unresponsive(client, self._requirements.sglang.health_timeout_s, self._probe_interval_s)
        self._handle_death(group, "no longer responds")

    def _make_client(self) -> SGLangClient:
        return SGLangClient(self.url, max_in_flight=1, request_timeout_s=self._requirements.sglang.request_timeout_s)

    def _handle_death(self, group: ProcessGroup, how: str) -> None:
        group.send_signal(signal.SIGKILL)
        if not self.death.done():
            self._logger.error("server.died", url=self.url, how=how, log=str(self._log))
            self.death.set_result(f"{self._name} {how}:\n{self._read_log_tail()}")

    def _raise_if_dead(self, group: ProcessGroup) -> None:
        if not self.death.done():
            return
        if group.leader.returncode == _USAGE_EXIT_CODE:
            raise ServerUnusable(f"sglang.arguments: {self.death.result()}")
        raise EngineFailure(self.death.result())

    def _read_log_tail(self) -> str:
        with contextlib.suppress(OSError):
            return f"{read_log_tail(self._log)}\n({self._log})"
        return f"({self._log})"


async def wait_until_unresponsive(
    client: SGLangClient, health_timeout_s: float, probe_interval_s: float = PROBE_INTERVAL_S
) -> None:
    """Wait for MAX_FAILED_PROBES probes in a row without a response within `health_timeout_s`.

    Any response counts: the server reports that it is not ready while it is paused or loads
    weights.
    """
    failed_probes = 0
    while failed_probes < MAX_FAILED_PROBES:
        await asyncio.sleep(probe_interval_s)
        failed_probes = 0 if await client.is_responsive(health_timeout_s) else failed_probes + 1
