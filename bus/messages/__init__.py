"""The protocol: all messages between processes, one file per conversation.

    run        launcher and all processes: start, progress and end of a run
    steps      recipe, buffer, learner: StepRequested, GroupAccepted, BatchReady, StepTrained, WeightsPublished,
               WeightsLoaded, WeightsProbed, WeightsSynced;
               if learner and engines share GPUs: GpuMemoryRequested, EngineSleepRequested, EngineAsleep, GpuMemoryGranted
    groups     buffer and rollout: StartGroup ... TrajectoryFinished, GroupJudged
    leases     rollout, arbiter, generators: LeaseRequested, LeaseGranted, LeasePaused, LeaseReleased
    turns      rollout and generators: TurnRequested, TurnGenerated
    tokens     the tokens of a trajectory, within messages of groups and steps
    calls      rollout and executors: CodeRequested, CodeFinished, AnswerSubmitted, AnswerGraded
    environments  rollout and executors: EnvironmentCalled, EnvironmentReturned, EnvironmentRestored
    cluster    the launcher and the launchers of joined nodes: JoinRequested, JoinAccepted ... NodeLeft
    envelope   a message with its sender and its receiver

Messages of a trajectory, in order: StartGroup, LeaseRequested, LeaseGranted, TurnRequested,
TurnGenerated, LeasePaused, CodeRequested, CodeFinished, ... AnswerSubmitted, AnswerGraded,
LeaseReleased, TrajectoryFinished. Messages of a step: StepRequested, GroupAccepted, ... BatchReady,
StepTrained, WeightsPublished, WeightsLoaded.

Token ids travel as raw bytes: little-endian int32; logprobs float32; policy versions int32; masks
uint8.

Import messages from this package. Add a new message to the file of its conversation and to the
union at the end of the file.
"""

from asterism.bus.messages.calls import *
from asterism.bus.messages.cluster import *
from asterism.bus.messages.envelope import *
from asterism.bus.messages.environments import *
from asterism.bus.messages.groups import *
from asterism.bus.messages.leases import *
from asterism.bus.messages.run import *
from asterism.bus.messages.steps import *
from asterism.bus.messages.tokens import *
from asterism.bus.messages.turns import *
