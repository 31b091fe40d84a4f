"""[sglang]: the servers of `engine.kind = "sglang"`, one for each engine: docs/sglang.md."""

from __future__ import annotations

from typing import Literal
from urllib.parse import urlsplit

from configs.section import Section, require

PORTS = 10  # of each server, from its first one
SPARE_TOKENS = 8  # of a server's context, that no sequence can have
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_OURS = ("--model-path", "--model", "--host", "--port", "--weight-version")


class Sglang(Section, frozen=True):
    python: str = ""  # interpreter that has SGLang; empty: the one of the run
    attach: tuple[str, ...] = ()  # base URLs of servers that run already, one for each engine; then none is started
    port: int = 31_000  # of the first engine's server, on the loopback; each takes 10
    tensor_parallel: int = 1  # GPUs that share one copy of the model
    data_parallel: int = 1  # copies of the model behind one server
    memory_share: float = 0.85  # of a GPU, for weights and cache, where engine.kv_tokens = 0
    arguments: tuple[str, ...] = ()  # further ones of the server's command line; they win over those made of [engine]
    environment: dict[str, str] = {}  # noqa: RUF012  # of the server, beside what the run has; msgspec copies it
    colocate: bool = False  # on the learner's GPUs: a server gives its memory back while the learner computes
    start_s: float = 900.0  # so long a server may take until it is ready
    request_s: float = 600.0  # and to answer a request
    ready_s: float = 10.0  # and to answer /ready: without an answer three times in a row it is dead
    weights: Literal["disk", "tensor", "group"] = "disk"  # how new weights come to it: docs/sglang.md
    group_backend: Literal["gloo", "nccl"] = "gloo"  # of weights = "group"
    bucket_mib: int = 512  # of weights that are handed over at a time

    def __post_init__(self) -> None:
        for name in ("tensor_parallel", "data_parallel", "start_s", "request_s", "ready_s", "bucket_mib"):
            require(getattr(self, name) > 0, f"{name} must be positive")
        require(0 < self.memory_share < 1, "memory_share must lie in (0, 1)")
        require(1024 <= self.port <= 65_535, f"port must lie between 1024 and 65535: {self.port}")
        for url in self.attach:
            wanted = f'attach must hold base URLs, such as "http://127.0.0.1:{self.port}": "{url}"'
            require(url.startswith(("http://", "https://")) and url.rstrip("/").count("/") == 2, wanted)
        require(len(set(self.attach)) == len(self.attach), "attach must not name a server twice")
        for argument in self.arguments:
            flag = argument.partition("=")[0]
            require(flag not in _OURS, f"arguments must leave {flag} to the run")
        for name in self.environment:
            require(name != "" and "=" not in name, f'environment must name variables: "{name}"')
        require(
            self.data_parallel == 1 or self.weights == "disk",
            f'weights must be "disk" where data_parallel = {self.data_parallel}: a server with more than one copy of the '
            "model takes no others",
        )

        require(
            not (self.colocate and self.attach),
            "attach must name no server where colocate = true: what it gives back, a run that ends early leaves lost",
        )

    @property
    def attach_far(self) -> tuple[str, ...]:
        """Those of `attach` that are the same server wherever one asks."""
        return tuple(url for url in self.attach if urlsplit(url).hostname not in _LOOPBACK)


def require_rest(sglang: Sglang, kind: str, max_staleness: int) -> None:
    """Raise ValueError if engines keep memory, or generate, while the learner is to have it."""
    if not sglang.colocate:
        return
    require(kind == "sglang", f'sglang.colocate = true needs engine.kind = "sglang", which gives memory back: "{kind}"')
    require(
        max_staleness == 0,
        f"sglang.colocate = true needs rl.max_staleness = 0, or engines generate while the learner trains: {max_staleness}",
    )
