"""Every knob of a run: one frozen Struct per component, each checking only itself.

Paths may begin with `$RUN`, which stands for the run's own folder.
Units are part of a name: `_s` seconds, `_mib` mebibytes, `_tokens` tokens.
"""

from __future__ import annotations

import math
from typing import Literal

from configs.section import Section, require
from configs.sglang import PORTS, SPARE_TOKENS, Sglang, require_rest


class Tiny(Section, frozen=True):
    """The task, the tokenizer and the model that a run makes for itself, so that it needs no download."""

    num_train_questions: int = 4096
    num_test_questions: int = 512
    num_sft_dialogues: int = 16_000
    num_layers: int = 2
    hidden_size: int = 128
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    intermediate_size: int = 384


class Model(Section, frozen=True):
    checkpoint: str = "$RUN/checkpoints/init"  # a transformers folder of a Qwen3-architecture model


class Data(Section, frozen=True):
    """Questions with known answers: JSONL or parquet, in any of the layouts that docs/data.md lists."""

    train: str = "$RUN/data/train.jsonl"
    test: str = "$RUN/data/test.jsonl"


class Dialogue(Section, frozen=True):
    """What the model sees, and how long it may go on (rStar2-Agent, arXiv 2508.20722, section 3)."""

    tools: tuple[Literal["jupyter_code", "python_code_with_standard_io"], ...] = (
        "jupyter_code",
        "python_code_with_standard_io",
    )
    prompt_tokens: int = 1024  # a longer prompt is skipped and counted
    response_tokens: int = 8192  # generated and tool tokens together
    max_turns: int = 10
    max_calls_per_turn: int = 1
    result_characters: int = 2048  # of each of stdout, stderr and the traceback; the middle is cut out
    result_format: Literal["default", "rstar2_release"] = "default"  # rstar2_release: the limit is the whole result's

    def __post_init__(self) -> None:
        require(len(self.tools) > 0, "tools must not be empty")
        for name in ("prompt_tokens", "response_tokens", "max_turns", "max_calls_per_turn", "result_characters"):
            require(getattr(self, name) > 0, f"{name} must be positive")

    @property
    def sequence_tokens(self) -> int:
        """The longest a trajectory can get."""
        return self.prompt_tokens + self.response_tokens


class Sampling(Section, frozen=True):
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 takes all tokens

    def __post_init__(self) -> None:
        require(self.temperature >= 0, "temperature must not be negative")
        require(0 < self.top_p <= 1, "top_p must lie in (0, 1]")
        require(self.top_k >= 0, "top_k must not be negative")


class Sft(Section, frozen=True):
    """The cold start: tool format and answer format only. `steps = 0` leaves it out."""

    data: str = "$RUN/data/sft.jsonl"
    steps: int = 250
    batch_size: int = 64
    lr: float = 3e-3  # AdamW, for vectors and embeddings
    muon_lr: float = 0.02  # Muon, for matrices
    warmup_steps: int = 10
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        require(self.steps >= 0, "steps must not be negative")
        require(self.batch_size > 0, "batch_size must be positive")


class Rl(Section, frozen=True):
    steps: int = 300
    prompts: int = 512  # groups that one step trains on
    rollouts: int = 32  # 2G: trajectories started for each prompt
    refills: int = 512  # further groups that a step may start in place of those with equal rewards
    max_staleness: int = 0  # versions that rollouts may run ahead of the learner: docs/staleness.md
    too_old: Literal["mask", "drop"] = "mask"  # what becomes of a trajectory with older tokens
    oversubscribe: float = 1.0  # so many times `prompts` groups are started, and the first complete ones are taken
    leftovers: Literal["carry", "abort"] = "abort"  # the others go on for the next step, or are stopped

    def __post_init__(self) -> None:
        require(self.steps >= 0, "steps must not be negative")
        require(self.prompts > 0, "prompts must be positive")
        require(self.rollouts >= 2, "rollouts must be at least 2")
        require(
            self.rollouts % 2 == 0, f"rollouts must be even, Resample-on-Correct keeps half of them: {self.rollouts}"
        )
        require(self.refills >= 0, "refills must not be negative")
        require(self.max_staleness >= 0, "max_staleness must not be negative")
        require(1 <= self.oversubscribe < math.inf, "oversubscribe must be at least 1, and finite")
        require(
            self.leftovers == "abort" or self.max_staleness > 0,
            'leftovers = "carry" needs a max_staleness of at least 1: with 0 all trajectories of a step are from one '
            'version, and what an earlier step began is from another; take "abort"',
        )

    @property
    def groups(self) -> int:
        """Started for one step."""
        return math.ceil(round(self.prompts * self.oversubscribe, 6))  # 1.1 * 10 is a little more than 11

    @property
    def live_groups(self) -> int:
        """That may be under way at once. One that is being stopped may add to them for as long as that takes."""
        spare = self.groups - self.prompts
        steps = self.max_staleness + 1
        return steps * self.prompts + (spare if self.leftovers == "carry" else steps * spare)


class Roc(Section, frozen=True):
    """Resample-on-Correct. The defaults follow the report; configs/presets/rstar2_release.toml follows the release."""

    enabled: bool = True  # false is plain GRPO: the whole group is trained on
    penalty: Literal["report", "release"] = "report"
    positives: Literal["weighted", "lowest"] = "weighted"
    negatives: Literal["uniform", "first"] = "uniform"
    min_per_class: int = 1  # half of each class is kept, but not fewer than so many where there are so many


class Engine(Section, frozen=True):
    kind: Literal["embedded", "sglang"] = "embedded"  # sglang: a server for each engine, of [sglang]
    num_engines: int = 1
    kv_tokens: int = 65_536  # of one engine's KV cache, in whole pages; 0: what an SGLang server has memory for
    page_tokens: int = 16  # every sequence takes whole pages; equal prefixes share them
    prefill_tokens: int = 512  # read of prompts in one step, beside the new tokens of those that run
    max_running: int = 256  # sequences that generate at once; further ones wait
    threads: int = 1
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: Literal["cpu", "cuda"] = "cpu"  # cuda: each engine has a GPU, or shares one where there are fewer
    cuda_graphs: bool = True  # on cuda: a step that reads no prompt is launched as one

    def __post_init__(self) -> None:
        require(self.num_engines > 0, "num_engines must be positive")
        for name in ("page_tokens", "prefill_tokens", "max_running"):
            require(getattr(self, name) > 0, f"{name} must be positive")
        require(
            self.kv_tokens > 0 or (self.kv_tokens == 0 and self.kind == "sglang"),
            'kv_tokens must be positive; 0 leaves it to the server, where kind = "sglang"',
        )


class Arbiter(Section, frozen=True):
    """Who may generate where, and when: policies/scheduling.py."""

    policy: Literal["static", "round_robin", "least_requests", "kv", "kv_lookahead"] = "kv_lookahead"


class Sandbox(Section, frozen=True):
    """Limits of one call. What is in force is in the log, the summary and `asterism doctor`."""

    backend: Literal["auto", "docker", "process"] = "auto"  # auto: containers where an engine and the image are there
    namespaces: Literal["auto", "required", "off"] = "auto"  # auto: where the kernel allows
    executors: int = 1  # processes, each with a sandbox of its own; one that dies is started again
    fork_servers: int = 1
    time_limit_s: float = 4.0
    grade_limit_s: float = 4.0
    memory_mib: int = 512
    max_processes: int = 16
    file_mib: int = 16
    output_kib: int = 64  # kept of each of stdout and stderr; the rest is drained and dropped, and said
    max_queued_calls: int = 65_536
    live_sessions: int = 512  # notebooks that keep a process; one more ends the one that was used longest ago
    session_memory_share: float = 0.8  # of the memory that calls may take; beyond it idle notebooks are ended
    containers: int = 1
    heal_s: float = 120.0  # without any container for so long, an executor ends: docs/faults.md
    container_memory_mib: int = 8192  # of one container; the kernel ends the largest call beyond it
    container_processes: int = 8192
    cpuset: str = ""  # processors of the containers, such as "0-7"; empty: all
    image: str = ""  # empty: the one that `make sandbox-image` builds from this very code

    def __post_init__(self) -> None:
        counts = ("executors", "fork_servers", "max_processes", "max_queued_calls", "live_sessions", "containers")
        for name in (*counts, "memory_mib", "file_mib"):
            require(getattr(self, name) > 0, f"{name} must be positive")
        require(0 < self.session_memory_share <= 1, "session_memory_share must lie in (0, 1]")
        require(
            self.container_memory_mib >= self.memory_mib + 512, "container_memory_mib must exceed memory_mib by 512"
        )
        require(self.time_limit_s > 0, "time_limit_s must be positive")
        require(self.heal_s > 0, "heal_s must be positive")


class Learner(Section, frozen=True):
    ranks: int = 1
    threads: int = 2
    lr: float = 1e-6
    final_lr_fraction: float = 1.0  # the rate falls linearly to this share of it over the run
    warmup_steps: int = 5
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.0
    clip_low: float = 0.2
    clip_high: float = 0.28
    minibatches: int = 2  # optimizer updates a step
    micro_batch_tokens: int = 16_384  # padded tokens in one forward and backward
    max_grad_norm: float = 1.0
    checkpoint_every: int = 10  # steps; the last step is always saved
    keep_checkpoints: int = 2  # older ones are deleted; the cold start's and the last are kept

    def __post_init__(self) -> None:
        require(self.ranks > 0, "ranks must be positive")
        require(self.minibatches > 0, "minibatches must be positive")
        require(0 <= self.clip_low < 1, "clip_low must lie in [0, 1)")
        require(self.clip_high >= 0, "clip_high must not be negative")
        require(self.checkpoint_every > 0, "checkpoint_every must be positive")


class Evaluation(Section, frozen=True):
    """Before the first RL step and after the last: one sampled and one greedy answer to each question."""

    questions: int = 512

    def __post_init__(self) -> None:
        require(self.questions >= 0, "questions must not be negative")


class Bus(Section, frozen=True):
    queue_messages: int = 65_536  # bound of every queue, sending and receiving; a full one makes the sender wait


class Supervision(Section, frozen=True):
    """What becomes of a process that dies or falls silent: docs/faults.md."""

    restarts: int = 5  # of one process in a row; then the run ends
    backoff_s: float = 0.1  # before the first of them; doubled each time
    settled_s: float = 60.0  # a process that has lived so long is forgiven its earlier deaths
    heartbeat_s: float = 1.0
    silent_s: float = 30.0  # without a heartbeat for so long, a process is killed and started again
    start_s: float = 300.0  # so long it may take to the first one
    stall_s: float = 600.0  # without progress for so long, the run says who waits for whom; again after as long

    def __post_init__(self) -> None:
        require(self.restarts >= 0, "restarts must not be negative")
        for name in ("backoff_s", "settled_s", "heartbeat_s", "silent_s", "start_s", "stall_s"):
            require(getattr(self, name) > 0, f"{name} must be positive")
        require(self.silent_s >= 3 * self.heartbeat_s, "silent_s must be at least three heartbeats")


class Cluster(Section, frozen=True):
    """The machines of a run: docs/cluster.md. A run may go on (--resume) on another cluster than it began on."""

    nodes: int = 1  # with so many the run begins; further ones may join at any time
    learner_nodes: int = 1  # of them, those that train, with learner.ranks each
    key: str = ""  # file that `asterism keys` made, not in $RUN, which others may read; without one no node can join
    host: str = ""  # address of node 0 for the others, such as 10.0.0.1; empty: found out
    port: int = 29_700  # every node listens at this one and up to 99 further ones

    def __post_init__(self) -> None:
        require(self.nodes >= 1, "nodes must be positive")
        require(
            1 <= self.learner_nodes <= self.nodes,
            f"learner_nodes must lie between 1 and nodes = {self.nodes}",
        )
        require(
            self.nodes == 1 or self.key != "",
            "nodes beyond the first need a key; `asterism keys FOLDER` makes its file",
        )
        require(1024 <= self.port <= 65_435, "port must lie between 1024 and 65435, since 99 further ones are used")


class Log(Section, frozen=True):
    events: bool = True
    compress: bool = True  # of the event logs: frames of 512 bytes and more
    keep_steps: int = 0  # events of steps older than so many finished ones are removed; 0 keeps all: docs/replay.md
    level: Literal["debug", "info", "warning", "error"] = "info"

    def __post_init__(self) -> None:
        require(self.keep_steps >= 0, "keep_steps must not be negative")


class Run(Section, frozen=True):
    name: str
    seed: int = 0
    determinism: Literal["fast", "strict"] = "fast"  # strict: equal seeds give equal bytes: docs/determinism.md
    runs_folder: str = "runs"
    tiny: Tiny | None = None
    model: Model = Model()
    data: Data = Data()
    dialogue: Dialogue = Dialogue()
    sampling: Sampling = Sampling()
    sft: Sft = Sft()
    rl: Rl = Rl()
    roc: Roc = Roc()
    engine: Engine = Engine()
    sglang: Sglang = Sglang()
    arbiter: Arbiter = Arbiter()
    sandbox: Sandbox = Sandbox()
    learner: Learner = Learner()
    evaluation: Evaluation = Evaluation()
    bus: Bus = Bus()
    supervision: Supervision = Supervision()
    cluster: Cluster = Cluster()
    log: Log = Log()

    def __post_init__(self) -> None:
        require(self.name != "", "name must not be empty")
        _require_room(self.dialogue.sequence_tokens, self.engine, self.sglang)
        if self.engine.kind == "sglang":
            _require_servers(self.engine, self.sglang)
            _require_servers_of_nodes(self.sglang, self.cluster)
        require_rest(self.sglang, self.engine.kind, self.rl.max_staleness)
        require(
            self.log.keep_steps == 0 or self.log.keep_steps > self.rl.max_staleness,
            f"log.keep_steps must be more than rl.max_staleness = {self.rl.max_staleness}: what is under way is kept",
        )
        # Two processes that each wait for the other's full queue would wait for ever.
        frames = 4 * max(self.rl.live_groups * self.rl.rollouts, self.evaluation.questions)
        require(
            self.bus.queue_messages >= frames,
            f"bus.queue_messages must be at least {frames}, four for each trajectory that is under way at once",
        )
        if self.determinism == "strict":
            _require_strict(self.rl, self.engine)

    @property
    def engine_starts_within_s(self) -> float:
        """So long a generator's engine may take until it joins, where that is no matter of seconds."""
        return self.sglang.start_s if self.engine.kind == "sglang" else 0.0


def _require_room(need: int, engine: Engine, sglang: Sglang) -> None:
    """Raise ValueError if one trajectory of `need` tokens does not fit into the engine's cache."""
    if engine.kv_tokens == 0:
        return
    served = engine.kind == "sglang"
    spare, caches = (SPARE_TOKENS, sglang.data_parallel) if served else (0, 1)
    also = f" and {spare} that a server keeps for itself, {caches} times, for sglang.data_parallel," if served else ""
    require(
        engine.kv_tokens // caches // engine.page_tokens * engine.page_tokens >= need + spare,
        f"engine.kv_tokens must hold one trajectory, dialogue.prompt_tokens + response_tokens = {need},{also}"
        f" in whole pages of engine.page_tokens = {engine.page_tokens}",
    )


def _require_servers(engine: Engine, sglang: Sglang) -> None:
    """Raise ValueError if the servers cannot be those of these engines."""
    require(
        len(sglang.attach) in (0, engine.num_engines),
        f"sglang.attach must name a server for each engine, engine.num_engines = {engine.num_engines}, or none at all:"
        f" it names {len(sglang.attach)}",
    )
    require(
        sglang.port + PORTS * engine.num_engines <= 65_536,
        f"sglang.port must leave {PORTS} ports below 65536 to each of engine.num_engines = {engine.num_engines} servers:"
        f" {sglang.port}",
    )
    require(
        sglang.weights != "group" or sglang.group_backend != "nccl" or engine.device == "cuda",
        f'sglang.group_backend = "nccl" needs engine.device = "cuda", take "gloo": "{engine.device}"',
    )


def _require_servers_of_nodes(sglang: Sglang, cluster: Cluster) -> None:
    """Raise ValueError if engines of two nodes would have one server."""
    require(
        cluster.key == "" or not sglang.attach_far,
        "sglang.attach must name servers of 127.0.0.1, each node's own, where cluster.key lets nodes join:"
        f" {', '.join(sglang.attach_far)}",
    )


def _require_strict(rl: Rl, engine: Engine) -> None:
    """Raise ValueError with all keys whose values let a run depend on who was faster, and what they have to be."""
    reasons = {
        "rl.max_staleness = 0": (rl.max_staleness == 0, "which weights a token is of depends on when they come"),
        "rl.oversubscribe = 1.0": (rl.oversubscribe == 1, "a step takes the groups that are complete first"),
        'engine.device = "cpu"': (engine.device == "cpu", "kernels for CUDA sum in an order that depends on the batch"),
        'engine.dtype = "float32"': (engine.dtype == "float32", "products in bfloat16 depend on the batch"),
        'engine.kind = "embedded"': (engine.kind == "embedded", "what an SGLang server computes depends on the batch"),
        "engine.threads = 1": (
            engine.threads == 1,
            "how a product is dealt to threads depends on the batch; take more engines (engine.num_engines) instead",
        ),
    }
    wrong = [f"{wanted} ({why})" for wanted, (holds, why) in reasons.items() if not holds]
    require(not wrong, 'determinism = "strict" needs ' + ", and ".join(wrong))
