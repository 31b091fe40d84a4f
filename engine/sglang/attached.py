"""An SGLang server that somebody else runs: looked at, watched, and never ended by this run."""

from __future__ import annotations

import asyncio

import structlog

from configs.sglang import Sglang
from engine.sglang.client import SGLangClient
from engine.sglang.errors import ServerRefused, ServerSlow, ServerUnreachable, UnknownAnswer
from engine.sglang.fit import ServerUnusable, Wanted, check_fit
from engine.sglang.protocol import ServerInfo
from engine.sglang.silence import ASK_EVERY_S, until_it_answers, until_silent


class AttachedServer:
    """Has the methods and properties of engine.sglang.server.SGLangServer."""

    def __init__(
        self, wanted: Wanted, *, index: int = 0, again: bool = False, ask_every_s: float = ASK_EVERY_S
    ) -> None:
        """`index` is the engine's among those of the run: the server is the one at that place of sglang.attach. `again`:
        a former life of the engine had it, so that whoever runs it may be about to start it anew."""
        self._wanted = wanted
        self._again = again
        self._url = wanted.sglang.attach[index].rstrip("/")
        self._key = key_of(wanted.sglang, index)
        self._ask_every_s = ask_every_s
        self._client: SGLangClient | None = None
        self._watching: asyncio.Task[None] | None = None
        self._died: asyncio.Future[str] | None = None
        self._info: ServerInfo | None = None
        self._logger = structlog.get_logger()

    @property
    def url(self) -> str:
        return self._url

    @property
    def died(self) -> asyncio.Future[str]:
        """Why it is given up. Cancelled by `close`."""
        assert self._died is not None, "it has not been started"
        return self._died

    @property
    def info(self) -> ServerInfo:
        assert self._info is not None, "it has not been started"
        return self._info

    async def start(self) -> str:
        """Its base URL. Raises ServerUnusable where nobody answers there, within sglang.start_s if it is attached to
        again, or no server that fits this run."""
        self._died = asyncio.get_running_loop().create_future()
        self._client = client = SGLangClient(self._url, connections=1, request_s=self._wanted.sglang.request_s)
        try:
            if self._again:
                await self._reached(client)
            self._info = await asked(client, self._key)
            check_fit(self._info, self._wanted, self._key)
        except BaseException:
            await self.close()
            raise
        self._watching = asyncio.create_task(self._watch(client))
        self._logger.info("server.attached", url=self._url, version=self._info.version)
        return self._url

    async def close(self) -> None:
        """The server goes on. A second call does nothing."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        if self._died is not None:
            self._died.cancel()
        client, self._client = self._client, None
        if client is not None:
            await client.close()

    async def _reached(self, client: SGLangClient) -> None:
        sglang = self._wanted.sglang
        try:
            async with asyncio.timeout(sglang.start_s):
                await until_it_answers(client, sglang.ready_s, self._ask_every_s)
        except TimeoutError:
            raise ServerUnusable(
                f"{self._key}: has died, and nobody has answered there for sglang.start_s = {sglang.start_s:g}"
            ) from None

    async def _watch(self, client: SGLangClient) -> None:
        await until_silent(client, self._wanted.sglang.ready_s, self._ask_every_s)
        self._logger.error("server.died", url=self._url, how="silent")
        self.died.set_result(f"{self._key} does not answer any more")


def key_of(sglang: Sglang, index: int) -> str:
    """What messages call the server at that place."""
    return f"sglang.attach[{index}] = {sglang.attach[index].rstrip('/')}"


async def asked(client: SGLangClient, key: str) -> ServerInfo:
    """Raises ServerUnusable where nobody answers, or somebody who is no SGLang server of a version that is known here."""
    try:
        return await client.server_info()
    except (ServerUnreachable, ServerSlow, ServerRefused, UnknownAnswer) as failure:
        raise ServerUnusable(f"{key}: {failure}") from None
