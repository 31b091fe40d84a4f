"""[sglang]: the servers of `engine.kind = "sglang"`, one per engine: docs/sglang.md."""

from typing import Annotated, Literal
from urllib.parse import urlsplit

from msgspec import Meta

from asterism.configs.schema_tree import Port, PositiveFloat, PositiveInt, Section, require

PORTS_PER_SERVER = 10
SPARE_TOKENS = 8  # of a server's context length, unusable for sequences
_LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")
_RESERVED_FLAGS = ("--model-path", "--model", "--host", "--port", "--weight-version")


class SGLangConfig(Section, frozen=True):
    python: str = ""  # interpreter with SGLang installed; empty: the run's interpreter
    # Base URLs of running servers, one per engine; empty: the run starts its servers.
    external_urls: tuple[str, ...] = ()
    port: Port = 31_000  # of the first engine's server, on the loopback interface; each server takes 10
    tensor_parallel: PositiveInt = 1  # GPUs that share one copy of the model
    data_parallel: PositiveInt = 1  # copies of the model in one server
    memory_share: Annotated[float, Meta(gt=0, lt=1)] = (
        0.85  # of a GPU, for weights and KV cache, if engine.kv_tokens = 0
    )
    arguments: tuple[str, ...] = ()  # further command-line arguments; they override those derived from [engine]
    environment: dict[str, str] = {}  # noqa: RUF012  # further variables of the server; msgspec copies the dict
    colocate: bool = False  # on the learner's GPUs: a server releases its memory while the learner computes
    startup_timeout_s: PositiveFloat = 900.0  # for the start of a server
    request_timeout_s: PositiveFloat = 600.0  # for one turn
    health_timeout_s: PositiveFloat = (
        10.0  # per request of /ready; after three timeouts in a row the server counts as dead
    )
    weights: Literal["disk", "tensor", "group", "ipc"] = "disk"  # transfer of new weights: docs/sglang.md
    group_backend: Literal["gloo", "nccl"] = "gloo"  # of weights = "group"
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
        require(
            self.data_parallel == 1 or self.weights == "disk",
            f'weights must be "disk" if data_parallel = {self.data_parallel}: a server with several copies of the model '
            "supports no other transfer",
        )
        require(
            not (self.colocate and self.external_urls),
            "external_urls must be empty if colocate = true: a run that ends early would leave the server without its memory",
        )

    @property
    def remote_external_urls(self) -> tuple[str, ...]:
        """External URLs that reach the same server from every node."""
        return tuple(url for url in self.external_urls if urlsplit(url).hostname not in _LOOPBACK_HOSTS)


def check_servers(sglang: SGLangConfig, num_engines: int, device: str, cluster_key: str) -> None:
    """Raise ValueError if the servers do not match the engines, or if engines of two nodes would share a server."""
    require(
        len(sglang.external_urls) in (0, num_engines),
        f"sglang.external_urls must name one server per engine, engine.num_engines = {num_engines}, or none:"
        f" it names {len(sglang.external_urls)}",
    )
    require(
        sglang.port + PORTS_PER_SERVER * num_engines <= 65_536,
        f"sglang.port must leave {PORTS_PER_SERVER} ports below 65536 for each of engine.num_engines = {num_engines}"
        f" servers: {sglang.port}",
    )
    require(
        sglang.weights != "group" or sglang.group_backend != "nccl" or device == "cuda",
        f'sglang.group_backend = "nccl" needs engine.device = "cuda"; use "gloo": "{device}"',
    )
    require(
        cluster_key == "" or not sglang.remote_external_urls,
        "sglang.external_urls must name servers on 127.0.0.1, one set per node, if cluster.key is set:"
        f" {', '.join(sglang.remote_external_urls)}",
    )


def check_colocation(sglang: SGLangConfig, kind: str, max_staleness: int) -> None:
    """Raise ValueError if engines would hold memory, or generate, while the learner trains."""
    if not sglang.colocate:
        return
    require(
        kind == "sglang", f'sglang.colocate = true needs engine.kind = "sglang", which can release memory: "{kind}"'
    )
    require(
        max_staleness == 0,
        "sglang.colocate = true needs rl.max_staleness = 0, since otherwise engines generate while the learner trains: "
        f"{max_staleness}",
    )
