"""Training steps: messages between the recipe, the group buffer, the learner and the recorder."""

import msgspec

from asterism.bus.messages.groups import Ending, ToolCount
from asterism.bus.messages.message import Message
from asterism.bus.messages.run import BufferCursor
from asterism.bus.messages.tokens import TokenRecord
from asterism.configs.schema.algorithm import Sampling


class StepRequested(Message, frozen=True):
    """recipe -> buffer: collect the groups of one training step."""

    step: int
    version: int
    is_last: bool = False  # last step of a run that ends before rl.steps ([early_stopping])


class EvaluationRequested(Message, frozen=True):
    """recipe -> buffer: one trajectory for each of the first `questions` test questions of each set."""

    label: str  # "start_sampled", "start_greedy", "step_sampled", "step_greedy", "end_sampled", "end_greedy"
    sampling: Sampling
    questions: int
    version: int  # version of the weights


def name_evaluation(label: str, version: int) -> str:
    """Return a name such as "evaluation start_greedy" and "evaluation step_sampled of version 10"."""
    return f"evaluation {label}" + (f" of version {version}" if label.startswith("step_") else "")


class ComponentSum(msgspec.Struct, frozen=True, array_like=True):
    """The sum of a component of the reward over the trajectories that have it."""

    total: float = 0.0
    trajectories: int = 0


class TaskCounts(msgspec.Struct, frozen=True, array_like=True):
    """Sums over groups and trajectories: of a step or an evaluation, or only of one task or evaluation set."""

    groups: int = 0
    groups_rejected: int = 0  # groups that rl.group_filter rejects, for example for equal rewards
    groups_lost: int = 0  # groups with too few trajectories after failures, the staleness limit and filters
    trajectories: int = 0  # number of finished trajectories
    trajectories_failed: int = 0  # number of trajectories with infrastructure failures
    positives: int = 0  # successful trajectories (evaluation.success)
    reward: float = 0.0  # sum of the rewards of all trajectories
    calls: int = 0
    calls_failed: int = 0
    positive_calls: int = 0  # calls of successful trajectories
    positive_calls_failed: int = 0
    response_tokens: int = 0  # generated and tool tokens

    @property
    def ended(self) -> int:
        """Finished and failed trajectories."""
        return self.trajectories + self.trajectories_failed


class EvaluationFinished(Message, frozen=True):
    """buffer -> recipe, recorder: an evaluation has ended. Each trajectory answers one question; groups are not counted."""

    label: str
    version: int  # version of the weights
    totals: TaskCounts
    components: dict[str, ComponentSum] = msgspec.field(default_factory=dict)
    tasks: dict[str, TaskCounts] = msgspec.field(default_factory=dict)  # counts by task; none without [[tasks]]
    sets: dict[str, TaskCounts] = msgspec.field(default_factory=dict)  # counts by set; none without [[evaluation.sets]]
    other_version_tokens: int = 0  # tokens of other weights, generated after all engines of `version` were lost
    first_group_id: int = -1  # the groups of an evaluation have consecutive ids


class TrainingSample(msgspec.Struct, frozen=True, array_like=True):
    """A trajectory for the learner."""

    trajectory_id: int
    group_id: int
    advantage: float
    record: TokenRecord


class StepCounts(msgspec.Struct, frozen=True):
    """Sums until a step's end, over the groups that it started or carried over, including rejected groups.

    LengthsMeasured contains the groups that are aborted at the end of the step.
    """

    totals: TaskCounts = TaskCounts()
    components: dict[str, ComponentSum] = {}  # components of the reward, by name
    endings: dict[Ending, int] = {}  # finished trajectories by ending
    tasks: dict[str, TaskCounts] = {}  # counts by name of the task; empty without [[tasks]]
    sets: dict[str, TaskCounts] = {}  # counts by name of an evaluation set; empty without [[evaluation.sets]]
    generated_tokens: int = 0
    lease_wait_s: float = 0.0  # sum of the waits of all trajectories
    generation_s: float = 0.0
    tools_s: float = 0.0
    grading_s: float = 0.0
    tools: dict[str, ToolCount] = {}  # calls by name of the tool
    dropped: dict[str, int] = {}  # trajectories that a filter keeps out of training, by filter


class StalenessCounts(msgspec.Struct, frozen=True):
    """The staleness of a step's batch: versions between a token's policy and the updated policy."""

    tokens: int = 0  # tokens that are trained on
    versions_behind: int = 0  # sum of the versions over all `tokens`
    max_versions_behind: int = 0
    tokens_masked: int = 0  # stale tokens in trajectories that are trained on
    trajectories_dropped: int = 0  # trajectories with stale tokens only


class GroupAccepted(Message, frozen=True):
    """buffer -> learner: selected trajectories of a group, in several parts if necessary. The learner stores them."""

    step: int
    group_id: int
    part: int  # number of the part, from 0
    samples: tuple[TrainingSample, ...]


class BatchGroup(msgspec.Struct, frozen=True, array_like=True):
    group_id: int
    num_parts: int  # parts, each in one GroupAccepted


class BatchReady(Message, frozen=True):
    """buffer -> learner: the groups of a step. Their GroupAccepted messages have been sent before."""

    step: int
    groups: tuple[BatchGroup, ...]  # groups, sorted by group id
    is_last: bool = False  # see StepRequested


class StepCollected(Message, frozen=True):
    """buffer -> recipe, recorder: a step's groups are complete and its batch is sent."""

    step: int
    num_samples: int
    counts: StepCounts
    failures: dict[str, int]  # infrastructure failures by cause
    cursor: BufferCursor
    staleness: StalenessCounts | None = None  # None if rl.max_staleness = 0


class LengthCounts(msgspec.Struct, frozen=True):
    trajectories: int = 0
    response_tokens: int = 0  # sum over all trajectories, including aborted trajectories
    overlong: int = 0  # trajectories that reached the length limit


class LengthsMeasured(Message, frozen=True):
    """buffer -> recorder, possibly after the step: all trajectories of the step have ended."""

    step: int
    completed: LengthCounts  # counts of groups that were complete at the end of the step
    started: LengthCounts  # counts of all groups
    aborted: int  # trajectories that were stopped because their step had ended
    finished_late: int  # trajectories that ended before their abort arrived


class StepTrained(Message, frozen=True):
    """learner -> recipe, recorder: a step is trained; sent again after a restart. Step 0: the cold start."""

    step: int
    metrics: dict[str, float]


class WeightProbe(msgspec.Struct, frozen=True, array_like=True):
    """Fixed prompts, with the learner's log probability of each prompt's most likely next token."""

    chosen_at: int  # the step of the batch that contains the prompts
    prompts: tuple[bytes, ...]  # token ids of each prompt
    logprobs: tuple[float, ...]  # logprobs under the published weights, at temperature 1


class WeightsPublished(Message, frozen=True):
    """learner -> recipe -> generators: new weights are in shared memory, at `path`."""

    version: int
    path: str
    num_bytes: int
    digest: str  # blake2b-128 of the weights' bytes
    incarnation: int = 0  # incarnation of the engine to which the recipe sends the message; 0: from the learner
    probe: WeightProbe | None = None  # None before the first step of a run


class WeightsLoaded(Message, frozen=True):
    """generator -> recipe: the engine has loaded the weights."""

    engine: str
    version: int
    load_s: float
    incarnation: int = 1  # incarnation of the engine
    probe_logprobs: tuple[float, ...] = ()  # the engine's logprobs of the probe; empty if not computed


class WeightsProbed(Message, frozen=True):
    """recipe -> recorder, before WeightsSynced: an engine has loaded these weights and computed their probe."""

    engine: str
    version: int
    chosen_at: int  # see WeightProbe
    learner_logprobs: tuple[float, ...]
    engine_logprobs: tuple[float, ...]


class WeightsSynced(Message, frozen=True):
    """recipe -> recorder: every joined engine has this version or a newer one."""

    version: int


class GpuMemoryRequested(Message, frozen=True):
    """learner -> recipe, before the learner computes on GPUs that it shares with engines: request the engines' memory.
    The learner keeps this memory until it publishes weights."""

    learner_incarnation: int
    version: int  # lower bound of the version that the learner will publish; -1: the learner has just started


class EngineSleepRequested(Message, frozen=True):
    """recipe -> generators: release GPU memory until weights of this version or a newer one arrive.
    The fields are those of GpuMemoryRequested."""

    learner_incarnation: int
    version: int


class EngineAsleep(Message, frozen=True):
    """generator -> recipe: the engine has released its GPU memory."""

    engine: str
    incarnation: int  # incarnation of the engine
    request: EngineSleepRequested


class GpuMemoryGranted(Message, frozen=True):
    """recipe -> learner: every joined engine has released its GPU memory."""

    learner_incarnation: int
    version: int


EvaluationMessage = EvaluationRequested | EvaluationFinished
TrainingMessage = StepRequested | GroupAccepted | BatchReady | StepCollected | LengthsMeasured | StepTrained
WeightsMessage = WeightsPublished | WeightsLoaded | WeightsProbed | WeightsSynced
GpuMemoryMessage = GpuMemoryRequested | EngineSleepRequested | EngineAsleep | GpuMemoryGranted
StepMessage = EvaluationMessage | TrainingMessage | WeightsMessage | GpuMemoryMessage
