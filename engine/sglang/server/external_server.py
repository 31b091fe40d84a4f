"""Checks and probes an SGLang server that runs outside this run; never starts or stops it."""

import asyncio

import structlog

from asterism.bus.process.waiting import cancel_tasks
from asterism.configs.schema.sglang import SGLangConfig
from asterism.engine.http.errors import InvalidResponse, ServerStatusError, ServerTimeout, ServerUnreachable
from asterism.engine.sglang.client import SGLangClient
from asterism.engine.sglang.http_api import ServerInfo
from asterism.engine.sglang.server.compatibility import ServerRequirements, ServerUnusable, check_compatibility
from asterism.engine.sglang.server.managed_server import PROBE_INTERVAL_S, wait_until_unresponsive


class ExternalServer:
    """A server with the interface of managed_server.SGLangServer. `start` sets `death` and `info`."""

    death: asyncio.Future[str]  # result: why the server is unresponsive; `close` cancels the future
    info: ServerInfo

    def __init__(
        self,
        requirements: ServerRequirements,
        *,
        index: int = 0,
        is_restart: bool = False,
        probe_interval_s: float = PROBE_INTERVAL_S,
    ) -> None:
        """`index`: the engine's index into sglang.external_urls. `is_restart`: an earlier incarnation
        of the engine used the server, which can be restarting now."""
        self._requirements = requirements
        self._is_restart = is_restart
        self.url = requirements.sglang.external_urls[index].rstrip("/")
        self._config_key = format_config_key(requirements.sglang, index)
        self._probe_interval_s = probe_interval_s
        self._client: SGLangClient | None = None
        self._watch_task: asyncio.Task[None] | None = None
        self._logger = structlog.get_logger()

    async def start(self) -> str:
        """Return the base URL. Raises ServerUnusable if the server is unsuitable or does not respond."""
        self.death = asyncio.get_running_loop().create_future()
        self._client = client = SGLangClient(
            self.url, max_in_flight=1, request_timeout_s=self._requirements.sglang.request_timeout_s
        )
        try:
            if self._is_restart:
                await self._wait_until_responsive(client)
            self.info = await fetch_server_info(client, self._config_key)
            check_compatibility(self.info, self._requirements, self._config_key)
        except BaseException:
            await self.close()
            raise
        self._watch_task = asyncio.create_task(self._watch_liveness(client))
        self._logger.info("server.attached", url=self.url, version=self.info.version)
        return self.url

    async def close(self) -> None:
        """Close the client and keep the server running. A second call does nothing."""
        client, self._client = self._client, None
        if client is None:
            return
        await cancel_tasks(self._watch_task)
        self.death.cancel()
        await client.close()

    async def _wait_until_responsive(self, client: SGLangClient) -> None:
        sglang = self._requirements.sglang
        try:
            async with asyncio.timeout(sglang.startup_timeout_s):
                while not await client.is_responsive(sglang.health_timeout_s):  # noqa: ASYNC110
                    await asyncio.sleep(self._probe_interval_s)
        except TimeoutError:
            raise ServerUnusable(
                f"{self._config_key}: no response since the server died, "
                f"within sglang.startup_timeout_s = {sglang.startup_timeout_s:g}"
            ) from None

    async def _watch_liveness(self, client: SGLangClient) -> None:
        await wait_until_unresponsive(client, self._requirements.sglang.health_timeout_s, self._probe_interval_s)
        self._logger.error("server.died", url=self.url, how="silent")
        self.death.set_result(f"{self._config_key} no longer responds")


def format_config_key(sglang: SGLangConfig, index: int) -> str:
    """Return the name of the server in messages."""
    return f"sglang.external_urls[{index}] = {sglang.external_urls[index].rstrip('/')}"


async def fetch_server_info(client: SGLangClient, config_key: str) -> ServerInfo:
    """Fetch a server's info. Raises ServerUnusable if no SGLang of a supported version responds."""
    try:
        return await client.get_server_info()
    except (ServerUnreachable, ServerTimeout, ServerStatusError, InvalidResponse) as failure:
        raise ServerUnusable(f"{config_key}: {failure}") from None
