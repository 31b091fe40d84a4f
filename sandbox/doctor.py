"""What `asterism doctor` asks of the sandbox."""

from __future__ import annotations

import asyncio

from configs.schema import Sandbox as SandboxConfig
from sandbox.choice import sandbox_of
from sandbox.contract import Isolation


def probe_isolation(config: SandboxConfig | None = None) -> Isolation:
    """Starts one bare fork server, asks it what is in force, and ends it: a tenth of a second. Not for a running loop.

    Raises SandboxFailure if nothing can be run here.
    """

    async def probe() -> Isolation:
        sandbox = sandbox_of(config or SandboxConfig())
        try:
            return await sandbox.start()
        finally:
            await sandbox.close()

    return asyncio.run(probe())
