"""How new weights reach an SGLang server: through a folder, in the body of a request, or over a process group.

Each way holds the server's requests in place, loads, and lets them go on: their next tokens bear the new version, and
they keep the keys and values that they have. Those must not serve a request that comes later. While requests are held
the server cannot drop them (its /flush_cache is a 400, and an update that asks for it is called a failure although the
weights are loaded), so every request names the weights it was sent under as its `extra_key`: the prefix cache finds
nothing that was computed under another. Where no request is held, the cache is dropped.

Before they go on the server has to say that it holds the version, and the checksum of what it holds (checksums.py).
"""

from __future__ import annotations

from typing import Protocol

from bus.messages import WeightsPublished
from engine.sglang.client import SGLangClient
from engine.sglang.protocol import ServerInfo


class WeightsWay(Protocol):
    def check(self, server: ServerInfo) -> None:
        """Raises UnusableInput, which names the configuration's keys, where this server takes no weights this way."""
        ...

    async def update(self, client: SGLangClient, weights: WeightsPublished) -> None:
        """Raises WeightsRefused, and the server goes on with the weights that it has; or another EngineFailure where it
        cannot: some are loaded, or it does not answer. Then its requests stay held: it has to be started again, or to
        be given whole weights and resumed."""
        ...

    async def close(self) -> None: ...


def extra_key(weights: WeightsPublished) -> str:
    """Of requests that are sent under these weights, from the moment at which their update has succeeded."""
    return f"{weights.version}-{weights.digest}"
