"""One SGLang server of this process: started, watched, ended. It is a process group of its own, and dies with this process.

What any of its processes prints is in its log file. It is dead as soon as one of them is, or once it does not answer any
more: then all are ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import structlog

from bus import death
from engine.contract import EngineFailure
from engine.sglang.client import SGLangClient
from engine.sglang.command import HOST, argv, environment, port_of
from engine.sglang.fit import ServerUnusable, Wanted, check_fit
from engine.sglang.group import ProcessGroup, words
from engine.sglang.interpreter import check_interpreter, wait_for_port
from engine.sglang.protocol import ServerInfo
from engine.sglang.silence import ASK_EVERY_S, until_silent

ENDS_WITHIN_S = 1.5  # after SIGTERM; then it is killed. The run gives its generators 2 s
_READY_EVERY_S = 0.2
_REFUSES_ARGUMENTS = 2  # exit code, as of any argparse


class SGLangServer:
    def __init__(
        self,
        wanted: Wanted,
        *,
        log: Path,
        scratch: Path,
        index: int = 0,
        version: int = 0,
        ask_every_s: float = ASK_EVERY_S,
    ) -> None:
        """`index` is the engine's among those of the run, `version` that of the model's weights. `scratch` is a folder for
        the server's temporary files, which nobody else uses; its path should be short, since sockets are among them."""
        self._wanted, self._index, self._version = wanted, index, version
        self._log, self._scratch = log, scratch
        self._ask_every_s = ask_every_s
        self._name = f"the SGLang server {log.stem}"
        self._group: ProcessGroup | None = None
        self._watching: list[asyncio.Task[None]] = []
        self._died: asyncio.Future[str] | None = None
        self._info: ServerInfo | None = None
        self._logger = structlog.get_logger()

    @property
    def url(self) -> str:
        return f"http://{HOST}:{port_of(self._wanted.sglang, self._index)}"

    @property
    def died(self) -> asyncio.Future[str]:
        """Why, once it has. Cancelled by `close`."""
        assert self._died is not None, "it has not been started"
        return self._died

    @property
    def info(self) -> ServerInfo:
        assert self._info is not None, "it has not been started"
        return self._info

    def processes(self) -> dict[int, str]:
        """Those that it has now, with the names that they give themselves."""
        return {} if self._group is None else self._group.named()

    async def start(self) -> str:
        """Its base URL, as soon as it is ready. Raises ServerUnusable for what the user can mend, EngineFailure if it
        ends or takes longer than sglang.start_s; nothing of it is left then."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(self._wanted.sglang.start_s):
                self._info = await self._started()
        except TimeoutError:
            await self.close()
            limit_s = self._wanted.sglang.start_s
            raise EngineFailure(
                f"{self._name} was not ready within sglang.start_s = {limit_s:g}:\n{self._last_words()}"
            ) from None
        except BaseException:
            await self.close()
            raise
        self._logger.info("server.started", url=self.url, start_s=time.monotonic() - began)
        return self.url

    async def close(self) -> None:
        """Ends all of its processes. A second call does nothing."""
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        if self._died is not None:
            self._died.cancel()
        group, self._group = self._group, None
        if group is not None and not await group.end(ENDS_WITHIN_S):
            self._logger.info("server.killed", url=self.url)
        await asyncio.to_thread(shutil.rmtree, self._scratch, ignore_errors=True)

    # ---------------------------------------------------------------- its life

    async def _started(self) -> ServerInfo:
        engine, sglang = self._wanted.engine, self._wanted.sglang
        self._died = asyncio.get_running_loop().create_future()
        self._empty_scratch()
        added = environment(engine, sglang, self._scratch)
        python = sglang.python or sys.executable
        await check_interpreter(python, {**os.environ, **added})
        await wait_for_port(HOST, port_of(sglang, self._index))
        group = await self._spawned(python, {**os.environ, **added})
        self._watching = [asyncio.create_task(self._watch_first(group))]
        async with self._client() as client:
            while not await client.ready():
                self._raise_if_dead(group)
                await asyncio.sleep(_READY_EVERY_S)
            info = await client.server_info()
        self._raise_if_dead(group)  # else it may have been another one that answered
        check_fit(info, self._wanted, self._name)
        self._watching += [asyncio.create_task(self._watch(group, pid, name)) for pid, name in group.workers().items()]
        self._watching.append(asyncio.create_task(self._watch_answers(group)))
        return info

    def _empty_scratch(self) -> None:
        """A former life that was killed could not clear it."""
        shutil.rmtree(self._scratch, ignore_errors=True)
        self._scratch.mkdir(parents=True, mode=0o700)

    async def _spawned(self, python: str, variables: Mapping[str, str]) -> ProcessGroup:
        """Cancelled: it is started all the same, and can be ended."""
        starting = asyncio.ensure_future(self._spawn(python, variables))
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            await starting
            raise

    async def _spawn(self, python: str, variables: Mapping[str, str]) -> ProcessGroup:
        wanted = self._wanted
        arguments = argv(
            wanted.engine,
            wanted.sglang,
            model=wanted.model,
            sequence_tokens=wanted.sequence_tokens,
            index=self._index,
            version=self._version,
        )
        with self._log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", death.__file__, python, *arguments),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**variables, death.PARENT: str(os.getpid())},
                start_new_session=True,
            )
        self._group = ProcessGroup(process)
        return self._group

    async def _watch_first(self, group: ProcessGroup) -> None:
        code = await group.first.wait()
        self._note_death(group, f"ended with exit code {code}")

    async def _watch(self, group: ProcessGroup, pid: int, name: str) -> None:
        await group.ended(pid)
        self._note_death(group, f"lost its process {name}")

    async def _watch_answers(self, group: ProcessGroup) -> None:
        async with self._client() as client:
            await until_silent(client, self._wanted.sglang.ready_s, self._ask_every_s)
        self._note_death(group, "does not answer any more")

    @asynccontextmanager
    async def _client(self) -> AsyncGenerator[SGLangClient]:
        client = SGLangClient(self.url, connections=1, request_s=self._wanted.sglang.request_s)
        try:
            yield client
        finally:
            await client.close()

    def _note_death(self, group: ProcessGroup, how: str) -> None:
        group.signal(signal.SIGKILL)
        if not self.died.done():
            self._logger.error("server.died", url=self.url, how=how, log=str(self._log))
            self.died.set_result(f"{self._name} {how}:\n{self._last_words()}")

    def _raise_if_dead(self, group: ProcessGroup) -> None:
        if not self.died.done():
            return
        if group.first.returncode == _REFUSES_ARGUMENTS:
            raise ServerUnusable(f"sglang.arguments: {self.died.result()}")
        raise EngineFailure(self.died.result())

    def _last_words(self) -> str:
        with contextlib.suppress(OSError):
            return f"{words(self._log)}\n({self._log})"
        return f"({self._log})"
