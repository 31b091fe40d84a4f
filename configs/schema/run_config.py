"""The configuration of a run: one frozen Struct per table. RunConfig checks across tables.

In a path, `$RUN` is replaced by the run's folder. Names end in units: `_s` seconds, `_mib`
mebibytes, `_tokens` tokens.
"""

from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from asterism.configs.choices.engine_kinds import ENGINE_KINDS, Servers, list_kinds
from asterism.configs.choices.optimizer_kinds import OPTIMIZER_KINDS
from asterism.configs.schema.algorithm import (
    EarlyStoppingConfig,
    EvaluationConfig,
    EvaluationSetConfig,
    RlConfig,
    RocConfig,
    Sampling,
    SftConfig,
)
from asterism.configs.schema.dialogue import DialogueConfig
from asterism.configs.schema.health import HealthConfig
from asterism.configs.schema.learner_config import LearnerConfig
from asterism.configs.schema.machines import (
    ArbiterConfig,
    BusConfig,
    ClusterConfig,
    EngineConfig,
    LogConfig,
    MetricsConfig,
    OpenAIConfig,
    SandboxConfig,
    SupervisionConfig,
    check_gpu_sharing,
)
from asterism.configs.schema.schema_tree import Count, FilePath, ImportPath, Section, require
from asterism.configs.schema.sglang import SGLangConfig, check_colocation
from asterism.configs.schema.success import REWARD, SuccessRule, parse_success
from asterism.configs.schema.tasks import (
    GRADER_COMPONENT,
    Acceptance,
    RewardConfig,
    TaskConfig,
    check_tasks,
    may_have_component,
)


class PrepareConfig(Section, frozen=True):
    """A program that writes files below $RUN before the training; docs/tasks.md."""

    import_path: ImportPath = msgspec.field(name="import")  # a class with the parameters as fields
    parameters: dict[str, Any] = {}  # noqa: RUF012  # arguments of the class


class ModelConfig(Section, frozen=True):
    checkpoint: FilePath = "$RUN/checkpoints/init"  # a transformers folder; docs/models.md lists the architectures


class DataConfig(Section, frozen=True):
    """Questions with known answers; docs/data.md lists the layouts."""

    train: FilePath = "$RUN/data/train.jsonl"  # questions for training
    test: FilePath = "$RUN/data/test.jsonl"  # questions for evaluations
    # Limit of unusable rows in a file of training questions, which are skipped and listed; more rows end the run.
    max_bad_rows: Count = 100


class RunConfig(Section, frozen=True):
    name: str  # name of the run's folder in runs_folder
    seed: Count = 0  # seed of all random generators
    determinism: Literal["fast", "strict"] = "fast"  # strict: equal seeds give equal bytes: docs/determinism.md
    runs_folder: str = "runs"  # folder of run folders, relative to the current folder
    prepare: PrepareConfig | None = None  # program that makes data or the model; absent: the files exist
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()  # unused if there are [[tasks]]
    tasks: tuple[TaskConfig, ...] = ()
    dialogue: DialogueConfig = DialogueConfig()
    sampling: Sampling = Sampling()
    sft: SftConfig = SftConfig()
    rl: RlConfig = RlConfig()
    early_stopping: EarlyStoppingConfig = EarlyStoppingConfig()
    reward: RewardConfig = RewardConfig()
    roc: RocConfig = RocConfig()
    engine: EngineConfig = EngineConfig()
    sglang: SGLangConfig = SGLangConfig()
    openai: OpenAIConfig = OpenAIConfig()
    arbiter: ArbiterConfig = ArbiterConfig()
    sandbox: SandboxConfig = SandboxConfig()
    learner: LearnerConfig = LearnerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    health: HealthConfig = HealthConfig()
    bus: BusConfig = BusConfig()
    supervision: SupervisionConfig = SupervisionConfig()
    cluster: ClusterConfig = ClusterConfig()
    log: LogConfig = LogConfig()
    metrics: MetricsConfig = MetricsConfig()

    def __post_init__(self) -> None:
        _require_name(self.name)
        require(
            self.sampling.temperature > 0 or self.rl.steps == 0,
            "sampling.temperature must be positive for training: with 0 all answers of a group are equal",
        )
        if self.rl.steps:
            self.sampling.require_full_distribution()
        check_tasks(self.resolved_tasks)
        if self.roc.enabled:
            _require_resampling(self.rl.rollouts, self.roc)
        _require_overlong_buffer(self.rl, self.resolved_tasks)
        _require_known_tasks(self.evaluation, [task.name for task in self.resolved_tasks])
        _require_known_success(self.evaluation, self.roc, self.resolved_tasks)
        _require_trainable(self.engine.kind, only_evaluates=self.evaluation.only)
        servers = self.servers
        _require_kv_capacity(self.sequence_tokens, self.sequence_keys, self.engine, servers)
        _require_single_replica(self.learner, self.engine.kind, servers)
        _require_equal_copies(self.learner, self.cluster.learner_nodes)
        check_colocation(self.sglang, self.engine.kind, self.rl.max_staleness)
        check_gpu_sharing(self.engine, self.learner, self.cluster.learner_nodes, only_evaluates=self.evaluation.only)
        _require_stale_correction(self.rl, self.learner, self.engine.dtype)
        _require_useful_offload(self.learner, self.sft, self.sglang)
        _require_no_cold_start(self.sft, self.learner)
        require(
            self.log.keep_steps == 0 or self.log.keep_steps > self.rl.max_staleness,
            f"log.keep_steps must exceed rl.max_staleness = {self.rl.max_staleness}, so that events of unfinished steps are kept",
        )
        # Two processes that wait for each other's full queue would deadlock.
        trained = self.rl.max_groups_in_flight * self.rl.rollouts
        evaluated = sum(each.questions * each.samples for each in self.resolved_evaluation_sets)
        frames = 4 * (trained + evaluated if any(self.evaluation.intervals) else max(trained, evaluated))
        require(
            self.bus.queue_messages >= frames,
            f"bus.queue_messages must be at least {frames}, four for each unfinished trajectory",
        )
        if self.determinism == "strict":
            _require_strict_determinism(self.rl, self.engine, self.learner)

    @property
    def resolved_tasks(self) -> tuple[TaskConfig, ...]:
        """The tasks with their dialogues and rewards. Without [[tasks]]: one task of [data], with the name ""."""
        if not self.tasks:
            data = self.data
            return (TaskConfig(name="", data=data.train, test=data.test, dialogue=self.dialogue, reward=self.reward),)
        return tuple(
            replace(task, dialogue=task.dialogue or self.dialogue, reward=task.reward or self.reward)
            for task in self.tasks
        )

    def generates(self, path: str) -> bool:
        """Return whether the program of [prepare] writes this file or folder."""
        return self.prepare is not None and path.startswith("$RUN")

    @property
    def kept_trajectories(self) -> int:
        """The number of trajectories of a group that are trained on with roc.enabled."""
        return self.roc.keep or self.rl.rollouts // 2

    @property
    def resolved_evaluation_sets(self) -> tuple[EvaluationSetConfig, ...]:
        """The sets with their tasks and numbers of questions. Without [[evaluation.sets]]: one per task, named ""."""
        options = self.evaluation
        if not options.sets:
            return tuple(
                EvaluationSetConfig(name="", data=task.test, task=task.name, questions=options.questions)
                for task in self.resolved_tasks
            )
        first = self.resolved_tasks[0].name
        return tuple(
            replace(each, task=each.task or first, questions=each.questions or options.questions)
            for each in options.sets
        )

    @property
    def evaluation_sampling(self) -> Sampling:
        """The sampling of sampled evaluations."""
        return self.evaluation.sampling or self.sampling

    @property
    def success(self) -> SuccessRule:
        """The rule for correct answers in evaluations, and for RoC's positives."""
        text = self.evaluation.success
        return parse_success(text) if text else SuccessRule(limit=self.roc.positive_above)

    @property
    def num_weight_versions(self) -> int:
        """The number of versions of the weights in shared memory. An evaluation holds the engines' version, while the
        learner publishes `rl.max_staleness` + 1 further versions."""
        return max(2, self.rl.max_staleness + (2 if any(self.evaluation.intervals) else 1))

    @property
    def optimizer_moments(self) -> int:
        """The largest number of moments that an optimizer of the run keeps for each trained parameter."""
        names = [self.learner.optimizer.name] + [self.sft.optimizer] * self.sft.is_enabled
        return max(OPTIMIZER_KINDS[name].moments for name in names)

    @property
    def acceptance(self) -> Acceptance:
        """The value of reward.accept, which all tasks share."""
        return self.resolved_tasks[0].get_reward().accept

    @property
    def response_tokens(self) -> int:
        """Limit of a response in training: the maximum of all tasks."""
        return max(task.get_dialogue().response_tokens for task in self.resolved_tasks)

    @property
    def trained_sequence_tokens(self) -> int:
        """Maximum length of a trajectory in training, of any task."""
        return max(task.get_dialogue().sequence_tokens for task in self.resolved_tasks)

    @property
    def longest_response_tokens(self) -> int:
        """Limit of any response, in training and in evaluations."""
        return max(map(self.limit_response, self.resolved_tasks))

    @property
    def sequence_tokens(self) -> int:
        """Maximum length of a trajectory in training or evaluation. Engines must support this length."""
        return max(task.get_dialogue().prompt_tokens + self.limit_response(task) for task in self.resolved_tasks)

    @property
    def sequence_keys(self) -> str:
        """The keys that add up to `sequence_tokens`, for messages."""
        is_evaluated = self.evaluation.only or self.sequence_tokens > self.trained_sequence_tokens
        longer = "evaluation." if is_evaluated and self.evaluation.response_tokens else ""
        return f"dialogue.prompt_tokens + {longer}response_tokens"

    def limit_response(self, task: TaskConfig) -> int:
        """Return the limit of the task's responses in training (unless evaluation.only) and in evaluations, if any."""
        trained, evaluated = task.get_dialogue().response_tokens, self.limit_evaluated_response(task)
        if self.evaluation.only:
            return evaluated
        return max(trained, evaluated) if self.evaluation.questions else trained

    def limit_evaluated_response(self, task: TaskConfig) -> int:
        return self.evaluation.response_tokens or task.get_dialogue().response_tokens

    @property
    def servers(self) -> Servers:
        """The servers of the engines. Raises ValueError if their table does not fit the other tables."""
        kind = ENGINE_KINDS[self.engine.kind]
        return Servers() if kind.in_process else kind.load_code().describe_servers(self)


def _require_name(name: str) -> None:
    require(name != "", "name must not be empty")
    parts = PurePosixPath(name).parts
    require("/" not in parts and ".." not in parts and parts != (), "name must be a path within runs_folder")


def _require_overlong_buffer(rl: RlConfig, tasks: Sequence[TaskConfig]) -> None:
    for task in tasks:
        limit, table = task.get_dialogue().response_tokens, f"tasks.{task.name}.dialogue" if task.name else "dialogue"
        require(
            rl.overlong_buffer_tokens < limit,
            f"rl.overlong_buffer_tokens = {rl.overlong_buffer_tokens} must be below {table}.response_tokens = {limit}",
        )


def _require_known_success(evaluation: EvaluationConfig, roc: RocConfig, tasks: Sequence[TaskConfig]) -> None:
    """Raise ValueError for a component that no trajectory of a task can have."""
    if not evaluation.success:
        return
    require(
        roc.positive_above == 0,
        "evaluation.success and roc.positive_above both decide on correct answers; remove roc.positive_above",
    )
    rule = parse_success(evaluation.success)
    for task in tasks:
        if rule.name != REWARD and not may_have_component(task, rule.name):
            where = f'of the task "{task.name}" ' if task.name else ""
            known = ", ".join(task.get_reward().functions or (GRADER_COMPONENT,))
            raise ValueError(
                f'evaluation.success = "{evaluation.success}": the reward {where}has no component "{rule.name}"; it has '
                f"{known}, and {REWARD} is their weighted sum"
            )


def _require_known_tasks(evaluation: EvaluationConfig, tasks: Sequence[str]) -> None:
    known = ", ".join(name for name in tasks if name) or "none, as there are no [[tasks]]"
    for each in evaluation.sets:
        require(each.task in ("", *tasks), f'evaluation.sets: "{each.name}": no task "{each.task}"; known: {known}')


def _require_resampling(rollouts: int, roc: RocConfig) -> None:
    """Raise ValueError if a group cannot be resampled to roc.keep trajectories of both classes."""
    require(
        rollouts >= 4,
        f"rl.rollouts must be at least 4 with roc.enabled, which keeps a part of each group: {rollouts}; "
        "set roc.enabled = false for plain GRPO",
    )
    require(
        roc.keep == 0 or 2 <= roc.keep <= rollouts,
        f"roc.keep must be 0 or from 2 to rl.rollouts = {rollouts}: {roc.keep}",
    )
    kept = roc.keep or rollouts // 2
    require(
        roc.min_positives + roc.min_negatives <= kept,
        f"roc.min_positives + roc.min_negatives must be at most the {kept} trajectories that a group keeps "
        "(roc.keep, or half of rl.rollouts)",
    )


def _require_equal_copies(learner: LearnerConfig, num_nodes: int) -> None:
    ranks = learner.ranks * num_nodes
    require(
        ranks % learner.dp_replicate == 0,
        f"learner.dp_replicate must divide the {ranks} ranks (learner.ranks times cluster.learner_nodes): "
        f"{learner.dp_replicate}",
    )


def _require_trainable(kind: str, *, only_evaluates: bool) -> None:
    require(
        only_evaluates or ENGINE_KINDS[kind].trains,
        f'engine.kind = "{kind}" is only for `asterism eval`: training needs weight updates, exact token ids and logprobs, '
        f"which these engines do not provide; use {' or '.join(list_kinds(trains=True))}",
    )


def _require_single_replica(learner: LearnerConfig, kind: str, servers: Servers) -> None:
    require(
        learner.lora.publish == "merged" or servers.data_parallel == 1,
        f'learner.lora.publish = "adapters" needs {kind}.data_parallel = 1: a server with {servers.data_parallel} copies of '
        'the model loads no adapters; set learner.lora.publish = "merged", or use more engines instead',
    )


def _require_no_cold_start(sft: SftConfig, learner: LearnerConfig) -> None:
    require(
        not sft.is_enabled or not learner.resume_from,
        "sft.steps and sft.epochs must be 0 with learner.resume_from: RL continues there",
    )


def _require_stale_correction(rl: RlConfig, learner: LearnerConfig, engine_dtype: str) -> None:
    """Raise ValueError if the loss treats tokens of earlier weights as tokens of the current weights."""
    resolved = learner.resolve_auto(engine_dtype).loss
    is_corrected = resolved.old_logprobs == "engine" or resolved.correction != "none"
    require(
        not rl.steps or not rl.max_staleness or is_corrected,
        f"rl.max_staleness = {rl.max_staleness} needs an importance correction for stale tokens, but learner.loss.correction is "
        f'"{resolved.correction}" and learner.loss.old_logprobs is "{resolved.old_logprobs}", so that the ratio of the loss leaves '
        'out the updates since a token was generated: set learner.loss.correction = "tis", learner.loss.old_logprobs = "engine" or '
        "rl.max_staleness = 0",
    )


def _require_useful_offload(learner: LearnerConfig, sft: SftConfig, sglang: SGLangConfig) -> None:
    require(
        learner.memory.offload != "between_steps" or sglang.colocate,
        'learner.memory.offload = "between_steps" needs sglang.colocate = true: no engine would use the freed memory; use '
        '"optimizer" to train in less memory',
    )
    require(
        learner.memory.offload != "optimizer" or not sft.is_enabled or sft.optimizer != "muon",
        'learner.memory.offload = "optimizer" needs sft.optimizer = "adamw": Muon multiplies whole matrices, which takes too long '
        "on a CPU",
    )


def _require_kv_capacity(sequence_tokens: int, sequence_keys: str, engine: EngineConfig, servers: Servers) -> None:
    """Raise ValueError if a trajectory of maximum length does not fit into the engine's cache."""
    if engine.kv_tokens == 0:
        return
    spare, caches = servers.spare_tokens, servers.data_parallel
    copies = f", {caches} times, for {engine.kind}.data_parallel" if caches > 1 else ""
    also = f" and {spare} that a server reserves{copies}," if spare else ""
    require(
        engine.kv_tokens // caches // engine.page_tokens * engine.page_tokens >= sequence_tokens + spare,
        f"engine.kv_tokens must hold one trajectory, {sequence_keys} = {sequence_tokens},{also}"
        f" in whole pages of engine.page_tokens = {engine.page_tokens}",
    )


def _require_strict_determinism(rl: RlConfig, engine: EngineConfig, learner: LearnerConfig) -> None:
    """Raise ValueError with all required values of settings that make a run depend on timing."""
    reasons = {
        "rl.max_staleness = 0": (rl.max_staleness == 0, "the weights that a token is from depend on timing"),
        "rl.group_oversampling = 1.0": (rl.group_oversampling == 1, "a step uses the groups that are complete first"),
        'engine.device = "cpu"': (engine.device == "cpu", "the summation order of CUDA kernels depends on the batch"),
        'learner.device = "cpu"': (learner.device == "cpu", "CUDA kernels of the backward pass add in any order"),
        'engine.dtype = "float32"': (engine.dtype == "float32", "products in bfloat16 depend on the batch"),
        'engine.kind = "embedded"': (ENGINE_KINDS[engine.kind].in_process, "results of a server depend on the batch"),
        "engine.threads = 1": (
            engine.threads == 1,
            "the split of a product among threads depends on the batch; use more engines (engine.num_engines) instead",
        ),
    }
    wrong = [f"{wanted} ({why})" for wanted, (holds, why) in reasons.items() if not holds]
    require(not wrong, 'determinism = "strict" needs ' + ", and ".join(wrong))
