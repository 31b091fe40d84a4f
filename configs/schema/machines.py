"""The tables of engines, sandbox and processes."""

from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from msgspec import Meta

from asterism.configs.choices.engine_kinds import ENGINE_KINDS, list_kinds
from asterism.configs.choices.sink_kinds import SINK_KINDS
from asterism.configs.schema.learner_config import LearnerConfig
from asterism.configs.schema.schema_tree import (
    Count,
    FilePath,
    NonNegativeFloat,
    Port,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
    Section,
    require,
    require_choice,
)


class EngineConfig(Section, frozen=True):
    # embedded; or sglang or openai: one server per engine, with keys in a table of this name. openai only evaluates.
    kind: str = "embedded"
    num_engines: PositiveInt = 1  # engines per node
    kv_tokens: Count = 65_536  # KV cache of one engine, in whole pages; 0: as much as a server has memory for
    page_tokens: PositiveInt = 16  # tokens per page of the KV cache; equal prefixes share pages
    prefill_tokens: PositiveInt = 512  # maximum prompt tokens per step, in addition to the decoded tokens
    max_running: PositiveInt = 256  # limit of decoding sequences, or of concurrent requests to a server of [openai]
    threads: PositiveInt = 1  # CPU threads of one engine
    dtype: Literal["float32", "bfloat16"] = "float32"  # dtype of weights and KV cache
    device: Literal["cpu", "cuda"] = "cpu"  # device of engines; cuda: one GPU each, or shared if too few
    load_timeout_s: PositiveFloat = 600.0  # timeout of a load of new weights; then the engine is restarted
    cuda_graphs: bool = True  # with device = "cuda", launch steps without prefill as one graph
    # Keep published weights on the GPU of a single-rank learner for the embedded engine there. auto: if there is one.
    share_gpu_weights: bool | Literal["auto"] = "auto"
    options: dict[str, Any] = {}  # noqa: RUF012  # options of a kind without its own table; msgspec copies the dict

    def __post_init__(self) -> None:
        require_choice("kind", self.kind, ENGINE_KINDS)
        require(
            ENGINE_KINDS[self.kind].has_options or not self.options,
            f'options must be empty: kind = "{self.kind}" has none',
        )
        require(
            self.kv_tokens > 0 or not ENGINE_KINDS[self.kind].in_process,
            f"kv_tokens must be positive; 0 leaves it to the server if kind = {' or '.join(list_kinds(in_process=False))}",
        )


def list_sharing_needs(engine: EngineConfig, learner: LearnerConfig, learner_nodes: int) -> list[str]:
    """List the settings that are missing for sharing the published weights on the learner's GPU, with the reasons.

    With all settings the copy has a reader: engine 0 of node 0 and the only rank use the first GPU of their node.
    """
    needs = {
        'engine.kind = "embedded"': (
            ENGINE_KINDS[engine.kind].in_process,
            "servers have transports of their own, sglang.weights",
        ),
        'engine.device = "cuda"': (engine.device == "cuda", "no engine uses the learner's GPU"),
        'learner.device = "cuda"': (learner.device == "cuda", "the learner has no GPU"),
        "learner.ranks = 1": (learner.ranks == 1, "each rank has only a part of the parameters"),
        "cluster.learner_nodes = 1": (learner_nodes == 1, "each rank has only a part of the parameters"),
        'learner.memory.offload = "none"': (learner.memory.offload != "optimizer", "the parameters are in main memory"),
        'learner.lora.publish = "merged"': (learner.lora.publish == "merged", "adapters are loaded from slots"),
    }
    return [f"{wanted} ({why})" for wanted, (holds, why) in needs.items() if not holds]


def check_gpu_sharing(
    engine: EngineConfig, learner: LearnerConfig, learner_nodes: int, *, only_evaluates: bool
) -> None:
    """Raise ValueError if engine.share_gpu_weights = true has no effect. An evaluation has no learner."""
    needs = list_sharing_needs(engine, learner, learner_nodes)
    require(
        engine.share_gpu_weights is not True or only_evaluates or not needs,
        f'engine.share_gpu_weights = true needs {", and ".join(needs)}; "auto" shares weights only if a run meets this',
    )


class OpenAIConfig(Section, frozen=True):
    """Servers with OpenAI's completions API, which `asterism eval` evaluates: docs/evaluation.md."""

    urls: tuple[str, ...] = ()  # server URLs, one per engine, such as "http://10.0.0.1:8000/v1"
    model: str = ""  # the servers' name of the model; empty: the first model that they list
    api_key_variable: str = "OPENAI_API_KEY"  # environment variable of the API key, which can be unset
    request_timeout_s: PositiveFloat = 600.0  # timeout of each piece of a response

    def __post_init__(self) -> None:
        for url in self.urls:
            parts = urlsplit(url)
            wanted = f'urls must hold URLs of servers, such as "http://127.0.0.1:8000/v1": "{url}"'
            require(parts.scheme in ("http", "https") and bool(parts.hostname), wanted)
        require(len(set(self.urls)) == len(self.urls), "urls must not name a server twice")
        require(self.api_key_variable != "", "api_key_variable must name an environment variable")


class ArbiterConfig(Section, frozen=True):
    """The assignment of trajectories to engines: docs/scheduling.md, policies/arbiter/arbiter.py."""

    # Policy that assigns engines and times to trajectories.
    policy: Literal["static", "round_robin", "least_requests", "worst_case", "kv_lookahead"] = "kv_lookahead"


NUM_PRELOADS = 3  # preloads bare, numpy and scientific; each has its own fork servers


class SandboxConfig(Section, frozen=True):
    """Isolation and limits of a tool call. `asterism doctor`, log and summary show the isolation."""

    backend: Literal["auto", "docker", "process"] = "auto"  # sandbox; auto: docker if Docker and the image exist
    namespaces: Literal["auto", "required", "off"] = "auto"  # Linux namespaces; auto: if the kernel allows them
    executors: PositiveInt = 1  # executor processes; each has a sandbox and is restarted when it dies
    fork_servers: PositiveInt = 1  # fork servers per executor and preload
    time_limit_s: PositiveFloat = 4.0  # time limit of a tool call
    # Limit of a call on a busy machine, in multiples of time_limit_s; a longer call fails and masks its trajectory.
    max_call_extension: Annotated[float, Meta(ge=1, le=1000)] = 4.0
    grade_limit_s: PositiveFloat = 4.0  # CPU time of a grading; an answer that needs more is wrong
    concurrent_gradings: Annotated[int, Meta(ge=1, le=256)] = 4  # gradings at the same time, per executor
    memory_mib: PositiveInt = 512  # memory of a call with its processes
    max_processes: PositiveInt = 16  # processes of a call
    file_mib: PositiveInt = 16  # size of the files of a call
    output_kib: PositiveInt = 64  # limit of each of stdout and stderr; longer output is truncated and marked
    max_queued_calls: PositiveInt = 65_536  # queued calls per executor
    max_live_notebooks: PositiveInt = 512  # limit of notebooks with a process; the least recently used one is ended
    spare_notebooks: Count = 8  # notebooks forked before their first cells, per fork server; part of max_live_notebooks
    notebook_memory_share: PositiveShare = 0.8  # used share of the calls' memory above which idle notebooks are ended
    containers: PositiveInt = 1  # containers per executor
    container_timeout_s: PositiveFloat = 120.0  # an executor without a container exits after this time: docs/faults.md
    container_memory_mib: PositiveInt = 8192  # memory of a container; beyond it the kernel kills the largest call
    container_processes: PositiveInt = 16_384  # per container: at least max_live_notebooks * (max_processes + 2) + 1024
    cpuset: str = ""  # CPUs of the containers, such as "0-7"; empty: all
    image: str = ""  # sandbox image; empty: the image that `make sandbox-image` builds from this version of the code

    @property
    def spare_notebooks_per_server(self) -> int:
        """The spare notebooks of one fork server: at most half of the live notebooks are spare."""
        return min(self.spare_notebooks, self.max_live_notebooks // 2 // (NUM_PRELOADS * self.fork_servers))

    @property
    def max_notebooks_in_use(self) -> int:
        """The number of live notebooks that trajectories can use."""
        return self.max_live_notebooks - NUM_PRELOADS * self.fork_servers * self.spare_notebooks_per_server

    def __post_init__(self) -> None:
        require(
            self.container_memory_mib >= self.memory_mib + 512, "container_memory_mib must exceed memory_mib by 512"
        )
        # A notebook has two processes of the sandbox; programs and fork servers need the reserve.
        needed = self.max_live_notebooks * (self.max_processes + 2) + 1024
        require(
            self.container_processes >= needed,
            f"container_processes must be at least max_live_notebooks * (max_processes + 2) + 1024 = {needed}",
        )


class BusConfig(Section, frozen=True):
    queue_messages: PositiveInt = 131_072  # bound of every send and receive queue; a full queue blocks the sender


class SupervisionConfig(Section, frozen=True):
    """Restarts of processes that die or stop responding: docs/faults.md."""

    restarts: Count = 5  # limit of restarts of one process in a row; one more ends the run
    backoff_s: PositiveFloat = 0.1  # wait before the first restart; doubled for each further restart
    failure_reset_s: PositiveFloat = 60.0  # a process that lives this long resets its count of restarts
    heartbeat_s: PositiveFloat = 1.0  # interval of heartbeats
    heartbeat_timeout_s: PositiveFloat = 30.0  # a process without a heartbeat for this long is killed and restarted
    first_heartbeat_timeout_s: PositiveFloat = 300.0  # timeout of a process's first heartbeat
    # Time for a checkpoint after ^C or SIGTERM; exiting takes some seconds more, and Slurm kills after 30 s. 0: none.
    interrupt_grace_s: NonNegativeFloat = 20.0
    stall_report_s: PositiveFloat = 600.0  # after this time without progress, the run reports which actors wait

    def __post_init__(self) -> None:
        require(
            self.heartbeat_timeout_s >= 3 * self.heartbeat_s, "heartbeat_timeout_s must be at least three heartbeats"
        )


class ClusterConfig(Section, frozen=True):
    """The machines of a run: docs/cluster.md. A resumed run can have other machines."""

    nodes: PositiveInt = 1  # nodes with which the run starts; further nodes can join at any time
    learner_nodes: PositiveInt = 1  # nodes that train, each with learner.ranks
    # Key file from `asterism keys`. Keep it outside $RUN, which other users can read. Empty: no node can join.
    key: FilePath = ""
    host: str = ""  # address of node 0 for other nodes, such as 10.0.0.1; empty: detected
    port: Port = 29_700  # first port of every node; a node listens on up to 99 further ports

    def __post_init__(self) -> None:
        require(1 <= self.learner_nodes <= self.nodes, f"learner_nodes must lie between 1 and nodes = {self.nodes}")
        require(
            self.nodes == 1 or self.key != "",
            "more than one node needs a key; generate its file with `asterism keys FOLDER`",
        )
        require(
            self.port <= 65_435,
            "port must be at most 65435, since the 99 following ports are used, too",
        )


class MetricsConfig(Section, frozen=True):
    """Backends that receive the records of metrics.jsonl: docs/metrics.md. A resumed run can have other backends."""

    sinks: tuple[str, ...] = ()  # sinks, such as "tensorboard" or "wandb"; each sink needs the extra of its name
    project: str = "asterism"  # the project of W&B and Trackio, and the experiment of MLflow
    wandb_mode: Literal["online", "offline"] = "online"  # offline: write only files in $RUN/wandb, for `wandb sync`
    mlflow_uri: str = "sqlite:///$RUN/mlflow.db"  # tracking URI: a database, or the URL of a tracking server
    trackio_folder: FilePath = "$RUN/trackio"  # local store of Trackio; several runs can share it
    flush_s: PositiveFloat = 20.0  # time for the sinks to finish at the end of the run; then they are killed

    def __post_init__(self) -> None:
        for number, sink in enumerate(self.sinks):
            require_choice(f"sinks[{number}]", sink, SINK_KINDS)
        require(len(set(self.sinks)) == len(self.sinks), "sinks must not name a sink twice")
        require(self.project.strip() != "", "project must not be empty")
        require(
            not urlsplit(self.mlflow_uri).password,
            "mlflow_uri must not contain a password, which the run's folder would store; set MLFLOW_TRACKING_USERNAME "
            "and MLFLOW_TRACKING_PASSWORD in the environment",
        )


class LogConfig(Section, frozen=True):
    events: bool = True  # write event logs, which replay and recovery need
    verify: bool = True  # replay the event logs during the run and report whether the decisions are identical
    compress: bool = True  # compress frames of at least 512 bytes in event logs
    keep_steps: Count = 0  # finished steps to keep in the event logs; 0: all: docs/replay.md
    level: Literal["debug", "info", "warning", "error"] = "info"  # lowest level of the structured logs
    curves: bool = True  # draw the curves at the end of the run; `asterism report` draws them later
