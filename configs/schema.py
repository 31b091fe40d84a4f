"""The configuration of a run: one frozen Struct per table. RunConfig checks across tables.

In a path, `$RUN` is replaced by the run's folder. Names end in units: `_s` seconds, `_mib`
mebibytes, `_tokens` tokens.
"""

import math
from pathlib import PurePosixPath
from typing import Annotated, Literal

from msgspec import Meta
from msgspec.structs import replace

from configs.dialogue_options import DialogueConfig
from configs.schema_tree import (
    Count,
    FilePath,
    ImportPath,
    LearningRate,
    NonNegativeFloat,
    Port,
    PositiveFloat,
    PositiveInt,
    PositiveShare,
    Section,
    SignedFloat,
    require,
)
from configs.sglang_options import SPARE_TOKENS, SGLangConfig, check_colocation, check_servers
from configs.task_options import Acceptance, RewardConfig, TaskConfig, check_tasks


class TinyConfig(Section, frozen=True):
    """Generated questions, dialogues, tokenizer and model, so that a run needs no download."""

    num_train_questions: PositiveInt = 4096  # generated training questions
    num_test_questions: PositiveInt = 512  # generated test questions
    num_sft_dialogues: PositiveInt = 16_000  # generated dialogues for the cold start
    num_layers: PositiveInt = 2  # of the model
    hidden_size: PositiveInt = 128  # of the model
    num_heads: PositiveInt = 4  # query heads
    num_kv_heads: PositiveInt = 2  # key and value heads
    head_dim: PositiveInt = 32  # of each head
    intermediate_size: PositiveInt = 384  # of the feed-forward layers


class ModelConfig(Section, frozen=True):
    checkpoint: FilePath = "$RUN/checkpoints/init"  # a transformers checkpoint of the Qwen3 architecture


class DataConfig(Section, frozen=True):
    """Questions with known answers; docs/data.md lists the layouts."""

    train: FilePath = "$RUN/data/train.jsonl"  # questions for training
    test: FilePath = "$RUN/data/test.jsonl"  # questions for evaluations


class SamplingConfig(Section, frozen=True):
    temperature: NonNegativeFloat = 1.0  # of training and of sampled evaluations
    top_p: PositiveShare = 1.0  # the smallest set of tokens with this probability
    top_k: Count = 0  # 0: all tokens


class SftConfig(Section, frozen=True):
    """The cold start, which teaches only tool format and answer format. `steps = 0` skips it."""

    data: FilePath = "$RUN/data/sft.jsonl"  # dialogues: docs/data.md
    steps: Count = 0  # optimizer updates
    batch_size: PositiveInt = 64  # dialogues per update
    lr: LearningRate = 1e-5  # AdamW, for vectors and embeddings
    muon_lr: LearningRate = 1e-3  # Muon, for matrices
    warmup_steps: Count = 10  # with a linearly rising learning rate
    weight_decay: NonNegativeFloat = 0.0  # of AdamW and Muon


class RlConfig(Section, frozen=True):
    steps: Count = 300  # training steps of the run
    prompts: PositiveInt = 512  # groups per training step
    rollouts: Annotated[int, Meta(ge=2, le=65_536)] = 32  # 2G: trajectories per group
    max_refill_groups: Count = 512  # per step, started to replace groups with equal rewards
    advantage_estimator: ImportPath = "grpo"  # "grpo", "dr_grpo", or a function by import path: docs/losses.md
    group_filter: ImportPath = "unequal_rewards"  # groups to train on; or a function by import path: docs/losses.md
    max_staleness: Count = 0  # versions by which rollouts may be ahead of the learner: docs/staleness.md
    stale_tokens: Literal["mask", "drop"] = "mask"  # mask stale tokens, or drop their trajectory
    group_oversampling: Annotated[float, Meta(ge=1, le=1000)] = (
        1.0  # a step starts this many times `prompts` groups and uses the first complete ones
    )
    surplus_groups: Literal["carry", "abort"] = "abort"  # carry the other groups over to the next step, or abort them

    def __post_init__(self) -> None:
        require(
            self.rollouts % 2 == 0,
            f"rollouts must be even, since Resample-on-Correct keeps half of them: {self.rollouts}",
        )
        require(
            self.surplus_groups == "abort" or self.max_staleness > 0,
            'surplus_groups = "carry" needs a max_staleness of at least 1, since with 0 all trajectories of a step have '
            'the same version; use "abort"',
        )

    @property
    def started_groups(self) -> int:
        """Groups that one step starts."""
        return math.ceil(round(self.prompts * self.group_oversampling, 6))  # 1.1 * 10 is a little more than 11

    @property
    def max_groups_in_flight(self) -> int:
        """Maximum number of unfinished groups, not counting groups that are being aborted."""
        spare = self.started_groups - self.prompts
        steps = self.max_staleness + 1
        return steps * self.prompts + (spare if self.surplus_groups == "carry" else steps * spare)


class RocConfig(Section, frozen=True):
    """Resample-on-Correct. The defaults follow the report; presets/rstar2_release.toml, the release."""

    enabled: bool = True  # false is plain GRPO, which trains on the whole group
    penalty: Literal["report", "release"] = "report"  # formula for failed calls and format
    # How correct trajectories are chosen: by weight, or the lowest penalties.
    positives: Literal["weighted", "lowest"] = "weighted"
    negatives: Literal["uniform", "first"] = "uniform"  # how wrong trajectories are chosen
    positive_above: SignedFloat = 0.0  # trajectories with a larger reward are positives ("correct")
    min_per_class: PositiveInt = 1  # half of each class is kept, but at least this many if there are as many


class EngineConfig(Section, frozen=True):
    kind: Literal["embedded", "sglang"] = "embedded"  # sglang: one server per engine, configured in [sglang]
    num_engines: PositiveInt = 1  # per node
    kv_tokens: Count = 65_536  # KV cache of one engine, in whole pages; 0: as much as an SGLang server has memory for
    page_tokens: PositiveInt = 16  # every sequence occupies whole pages; sequences share the pages of equal prefixes
    prefill_tokens: PositiveInt = 512  # maximum prompt tokens per step, in addition to the decoded tokens
    max_running: PositiveInt = 256  # concurrently decoding sequences
    threads: PositiveInt = 1  # of one engine on the CPU
    dtype: Literal["float32", "bfloat16"] = "float32"  # of weights and KV cache
    device: Literal["cpu", "cuda"] = "cpu"  # cuda: one GPU per engine; engines share GPUs if there are fewer
    cuda_graphs: bool = True  # on cuda: launch steps without prefill as one graph

    def __post_init__(self) -> None:
        require(
            self.kv_tokens > 0 or (self.kv_tokens == 0 and self.kind == "sglang"),
            'kv_tokens must be positive; 0 leaves it to the server if kind = "sglang"',
        )


class ArbiterConfig(Section, frozen=True):
    """Assignment of trajectories to engines: docs/scheduling.md, policies/arbiter/registry.py."""

    # Decides which trajectory runs on which engine, and when.
    policy: Literal["static", "round_robin", "least_requests", "worst_case", "kv_lookahead"] = "kv_lookahead"


class SandboxConfig(Section, frozen=True):
    """Isolation and limits of a call. `asterism doctor`, log and summary show the isolation."""

    backend: Literal["auto", "docker", "process"] = "auto"  # auto: docker if a Docker engine and the image exist
    namespaces: Literal["auto", "required", "off"] = "auto"  # auto: if the kernel allows them
    executors: PositiveInt = 1  # processes, each with its own sandbox; restarted when they die
    fork_servers: PositiveInt = 1  # per executor and preload
    time_limit_s: PositiveFloat = 4.0  # of a call
    grade_limit_s: PositiveFloat = 4.0  # CPU time of a grading; an answer that needs more is wrong
    concurrent_gradings: Annotated[int, Meta(ge=1, le=256)] = 4  # per executor
    memory_mib: PositiveInt = 512  # of a call with its processes
    max_processes: PositiveInt = 16  # of a call
    file_mib: PositiveInt = 16  # of the files of a call
    output_kib: PositiveInt = 64  # of each of stdout and stderr; the rest is dropped and the result marked as truncated
    max_queued_calls: PositiveInt = 65_536  # per executor
    max_live_notebooks: PositiveInt = 512  # notebooks with a process; beyond it the least recently used one is ended
    notebook_memory_share: PositiveShare = 0.8  # of the memory for calls; beyond it idle notebooks are ended
    containers: PositiveInt = 1  # per executor
    container_timeout_s: PositiveFloat = 120.0  # without any container for this long an executor exits: docs/faults.md
    container_memory_mib: PositiveInt = 8192  # per container; beyond it the kernel kills the largest call
    container_processes: PositiveInt = 16_384  # per container: max_live_notebooks * (max_processes + 2) + 1024 or more
    cpuset: str = ""  # CPUs of the containers, such as "0-7"; empty: all
    image: str = ""  # empty: the image that `make sandbox-image` builds from this version of the code

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


Beta = Annotated[float, Meta(ge=0, lt=1)]


class LearnerConfig(Section, frozen=True):
    ranks: PositiveInt = 1  # processes per node that train
    threads: PositiveInt = 2  # per rank
    loss: ImportPath = "grpo"  # "grpo", or a function by import path: docs/losses.md
    lr: LearningRate = 1e-6  # of AdamW
    final_lr_fraction: Annotated[float, Meta(ge=0, le=1)] = 1.0  # of `lr`, reached linearly at the end of the run
    warmup_steps: Count = 5  # with a linearly rising learning rate
    betas: tuple[Beta, Beta] = (0.9, 0.95)  # of AdamW
    weight_decay: NonNegativeFloat = 0.0  # of AdamW
    # The probability ratio is clipped to [1 - clip_low, 1 + clip_high].
    clip_low: Annotated[float, Meta(ge=0, lt=1)] = 0.2
    clip_high: NonNegativeFloat = 0.28  # see clip_low
    minibatches: PositiveInt = 2  # optimizer updates per step
    micro_batch_tokens: PositiveInt = 16_384  # padded tokens per forward and backward pass
    max_grad_norm: PositiveFloat = 1.0  # larger gradients are scaled down to this norm
    checkpoint_every: PositiveInt = 10  # steps; the last step is always saved
    keep_checkpoints: PositiveInt = 2  # older ones are deleted, except those of the cold start and of the last step


class EvaluationConfig(Section, frozen=True):
    """Before the first RL step and after the last: a sampled and a greedy answer per question."""

    questions: Count = 512  # of data.test; 0: no evaluation


class BusConfig(Section, frozen=True):
    queue_messages: PositiveInt = 65_536  # bound of every send and receive queue; a full queue blocks the sender


class SupervisionConfig(Section, frozen=True):
    """Restarts of processes that die or stop responding: docs/faults.md."""

    restarts: Count = 5  # of one process in a row; after that the run ends
    backoff_s: PositiveFloat = 0.1  # before the first restart; doubled for each further one
    failure_reset_s: PositiveFloat = 60.0  # a process that lives this long starts counting restarts from 0
    heartbeat_s: PositiveFloat = 1.0  # interval of heartbeats
    heartbeat_timeout_s: PositiveFloat = 30.0  # a process without a heartbeat for this long is killed and restarted
    first_heartbeat_timeout_s: PositiveFloat = 300.0  # the same for its first heartbeat
    stall_report_s: PositiveFloat = 600.0  # without progress for this long the run reports which actors wait for which

    def __post_init__(self) -> None:
        require(
            self.heartbeat_timeout_s >= 3 * self.heartbeat_s, "heartbeat_timeout_s must be at least three heartbeats"
        )


class ClusterConfig(Section, frozen=True):
    """The machines of a run: docs/cluster.md. They may change when a run is resumed."""

    nodes: PositiveInt = 1  # the run starts with this many; further nodes may join at any time
    learner_nodes: PositiveInt = 1  # nodes that train, each with learner.ranks
    # Key file that `asterism keys` generates, outside $RUN, which others may read; empty: no node can join.
    key: FilePath = ""
    host: str = ""  # address at which other nodes reach node 0, such as 10.0.0.1; empty: detected
    port: Port = 29_700  # every node listens on this port and up to 99 further ones

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


class LogConfig(Section, frozen=True):
    events: bool = True  # write event logs, which replay and recovery need
    verify: bool = True  # replay the event logs during the run and report whether the decisions are identical
    compress: bool = True  # in event logs: frames of at least 512 bytes
    keep_steps: Count = 0  # number of finished steps to keep in the event logs; 0: all: docs/replay.md
    level: Literal["debug", "info", "warning", "error"] = "info"  # of the structured logs


class RunConfig(Section, frozen=True):
    name: str  # of the folder in runs_folder
    seed: Count = 0  # of all random generators
    determinism: Literal["fast", "strict"] = "fast"  # strict: equal seeds give equal bytes: docs/determinism.md
    runs_folder: str = "runs"  # relative to the current folder
    tiny: TinyConfig | None = None  # generate the demo task
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()  # unused if there are [[tasks]]
    tasks: tuple[TaskConfig, ...] = ()
    dialogue: DialogueConfig = DialogueConfig()
    sampling: SamplingConfig = SamplingConfig()
    sft: SftConfig = SftConfig()
    rl: RlConfig = RlConfig()
    reward: RewardConfig = RewardConfig()
    roc: RocConfig = RocConfig()
    engine: EngineConfig = EngineConfig()
    sglang: SGLangConfig = SGLangConfig()
    arbiter: ArbiterConfig = ArbiterConfig()
    sandbox: SandboxConfig = SandboxConfig()
    learner: LearnerConfig = LearnerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    bus: BusConfig = BusConfig()
    supervision: SupervisionConfig = SupervisionConfig()
    cluster: ClusterConfig = ClusterConfig()
    log: LogConfig = LogConfig()

    def __post_init__(self) -> None:
        require(self.name != "", "name must not be empty")
        parts = PurePosixPath(self.name).parts
        require("/" not in parts and ".." not in parts and parts != (), "name must be a path within runs_folder")
        require(
            self.sampling.temperature > 0 or self.rl.steps == 0,
            "sampling.temperature must be positive for training: with 0 all answers of a group are equal",
        )
        check_tasks(self.resolved_tasks)
        require(
            self.sft.steps == 0 or not any(task.get_dialogue().renderer for task in self.resolved_tasks),
            "sft.steps must be 0 with dialogue.renderer: cold-start dialogues have the texts of ChatML",
        )
        _require_kv_capacity(self.sequence_tokens, self.engine, self.sglang)
        if self.engine.kind == "sglang":
            check_servers(self.sglang, self.engine.num_engines, self.engine.device, self.cluster.key)
        check_colocation(self.sglang, self.engine.kind, self.rl.max_staleness)
        require(
            self.log.keep_steps == 0 or self.log.keep_steps > self.rl.max_staleness,
            f"log.keep_steps must exceed rl.max_staleness = {self.rl.max_staleness}, so that events of unfinished steps are kept",
        )
        # Two processes that wait for each other's full queue would deadlock.
        frames = 4 * max(self.rl.max_groups_in_flight * self.rl.rollouts, self.evaluation.questions)
        require(
            self.bus.queue_messages >= frames,
            f"bus.queue_messages must be at least {frames}, four for each unfinished trajectory",
        )
        if self.determinism == "strict":
            _require_strict_determinism(self.rl, self.engine)

    @property
    def resolved_tasks(self) -> tuple[TaskConfig, ...]:
        """With their dialogues and rewards. Without [[tasks]] it is one task of [data], with the name ""."""
        if not self.tasks:
            data = self.data
            return (TaskConfig(name="", data=data.train, test=data.test, dialogue=self.dialogue, reward=self.reward),)
        return tuple(
            replace(task, dialogue=task.dialogue or self.dialogue, reward=task.reward or self.reward)
            for task in self.tasks
        )

    @property
    def acceptance(self) -> Acceptance:
        """reward.accept, which all tasks share."""
        return self.resolved_tasks[0].get_reward().accept

    @property
    def response_tokens(self) -> int:
        """The maximum of all tasks."""
        return max(task.get_dialogue().response_tokens for task in self.resolved_tasks)

    @property
    def sequence_tokens(self) -> int:
        """Maximum length of a trajectory of any task."""
        return max(task.get_dialogue().sequence_tokens for task in self.resolved_tasks)

    @property
    def engine_startup_allowance_s(self) -> float:
        """Additional time for the start of an engine, if it takes more than seconds."""
        return self.sglang.startup_timeout_s if self.engine.kind == "sglang" else 0.0


def _require_kv_capacity(sequence_tokens: int, engine: EngineConfig, sglang: SGLangConfig) -> None:
    """Raise ValueError if a trajectory of maximum length does not fit into the engine's cache."""
    if engine.kv_tokens == 0:
        return
    has_server = engine.kind == "sglang"
    spare, caches = (SPARE_TOKENS, sglang.data_parallel) if has_server else (0, 1)
    also = f" and {spare} that a server reserves, {caches} times, for sglang.data_parallel," if has_server else ""
    require(
        engine.kv_tokens // caches // engine.page_tokens * engine.page_tokens >= sequence_tokens + spare,
        f"engine.kv_tokens must hold one trajectory, dialogue.prompt_tokens + response_tokens = {sequence_tokens},{also}"
        f" in whole pages of engine.page_tokens = {engine.page_tokens}",
    )


def _require_strict_determinism(rl: RlConfig, engine: EngineConfig) -> None:
    """Raise ValueError with all required values of settings that make a run depend on timing."""
    reasons = {
        "rl.max_staleness = 0": (rl.max_staleness == 0, "the weights that a token is from depend on timing"),
        "rl.group_oversampling = 1.0": (rl.group_oversampling == 1, "a step uses the groups that are complete first"),
        'engine.device = "cpu"': (engine.device == "cpu", "the summation order of CUDA kernels depends on the batch"),
        'engine.dtype = "float32"': (engine.dtype == "float32", "products in bfloat16 depend on the batch"),
        'engine.kind = "embedded"': (engine.kind == "embedded", "results of an SGLang server depend on the batch"),
        "engine.threads = 1": (
            engine.threads == 1,
            "the split of a product among threads depends on the batch; use more engines (engine.num_engines) instead",
        ),
    }
    wrong = [f"{wanted} ({why})" for wanted, (holds, why) in reasons.items() if not holds]
    require(not wrong, 'determinism = "strict" needs ' + ", and ".join(wrong))
