"""[sglang]: the servers of `engine.kind = "sglang"`, one per engine: docs/sglang.md."""

from typing import Annotated, Literal
from urllib.parse import urlsplit

from msgspec import Meta

from asterism.configs.choices.engine_kinds import ENGINE_KINDS, list_kinds
from asterism.configs.choices.weight_transfers import WEIGHT_TRANSFERS
from asterism.configs.schema.schema_tree import Port, PositiveFloat, PositiveInt, Section, require, require_choice

PORTS_PER_SERVER = 10
SPARE_TOKENS = 8  # part of a server's context length that sequences cannot use
_LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")
_RESERVED_FLAGS = ("--model-path", "--model", "--host", "--port", "--weight-version")


class SGLangConfig(Section, frozen=True):
    python: str = ""  # interpreter with SGLang installed; empty: the run's interpreter
    # Base URLs of running servers, one per engine; empty: the run starts its servers.
    external_urls: tuple[str, ...] = ()
    port: Port = 31_000  # first server's port on the loopback interface; each server uses 10 ports
    tensor_parallel: PositiveInt = 1  # GPUs that share one copy of the model
    data_parallel: PositiveInt = 1  # copies of the model in one server
    memory_share: Annotated[float, Meta(gt=0, lt=1)] = 0.85  # GPU share for weights and cache if engine.kv_tokens = 0
    arguments: tuple[str, ...] = ()  # further command-line arguments, which override arguments from [engine]
    environment: dict[str, str] = {}  # noqa: RUF012  # further variables of the server; msgspec copies the dict
    colocate: bool = False  # use the learner's GPUs: a server releases its memory while the learner computes
    startup_timeout_s: PositiveFloat = 900.0  # time limit of the start of a server
    request_timeout_s: PositiveFloat = 600.0  # time limit of one turn
    health_timeout_s: PositiveFloat = 10.0  # timeout of /ready; after three timeouts in a row the server counts as dead
    weights: str = "disk"  # transfer of new weights: disk, tensor, group or ipc: docs/sglang.md
    group_backend: Literal["gloo", "nccl"] = "gloo"  # torch backend of weights = "group"
    bucket_mib: PositiveInt = 512  # size of one part of a weight transfer

    def __post_init__(self) -> None:
        for url in self.external_urls:
            wanted = f'external_urls must hold base URLs, such as "http://127.0.0.1:{self.port}": "{url}"'
            require(url.startswith(("http://", "https://")) and url.rstrip("/").count("/") == 2, wanted)
        require(len(set(self.external_urls)) == len(self.external_urls), "external_urls must not name a server twice")
        for argument in self.arguments:
            flag = argument.partition("=")[0]
            require(flag not in _RESERVED_FLAGS, f"arguments must not set {flag}, which the run sets")
        for name in self.environment:
            require(name != "" and "=" not in name, f'environment must name variables: "{name}"')
        require_choice("weights", self.weights, WEIGHT_TRANSFERS)
        reaching = " or ".join(f'"{name}"' for name, each in WEIGHT_TRANSFERS.items() if each.reaches_copies)
        require(
            self.data_parallel == 1 or WEIGHT_TRANSFERS[self.weights].reaches_copies,
            f"weights must be {reaching} if data_parallel = {self.data_parallel}: a server with several copies of the model "
            "supports no other transfer",
        )
        require(
            not (self.colocate and self.external_urls),
            "external_urls must be empty if colocate = true: a run that ends early would leave the server without its memory",
        )

    @property
    def remote_external_urls(self) -> tuple[str, ...]:
        """The external URLs that reach the same server from every node."""
        return tuple(url for url in self.external_urls if urlsplit(url).hostname not in _LOOPBACK_HOSTS)


def check_colocation(sglang: SGLangConfig, kind: str, max_staleness: int) -> None:
    """Raise ValueError if engines would hold memory, or generate, while the learner trains."""
    if not sglang.colocate:
        return
    require(
        ENGINE_KINDS[kind].releases_memory,
        f"sglang.colocate = true needs engine.kind = {' or '.join(list_kinds(releases_memory=True))}, which can release "
        f'memory: "{kind}"',
    )
    require(
        max_staleness == 0,
        "sglang.colocate = true needs rl.max_staleness = 0, since otherwise engines generate while the learner trains: "
        f"{max_staleness}",
    )
