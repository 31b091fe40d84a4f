"""The protocol: every message that crosses a process border, one file for each conversation.

    run        launcher and everybody: a run begins and ends
    steps      recipe, buffer, learner: StepRequested, BatchReady, StepTrained, WeightsPublished, WeightsLoaded, WeightsHeld;
               where learner and engines share GPUs: MemoryWanted, RestRequested, EngineRested, MemoryLent
    groups     buffer and rollout: StartGroup ... TrajectoryFinished
    leases     rollout, arbiter, generators: LeaseRequested, LeaseGranted, LeaseParked, LeaseReleased
    turns      rollout and generators: TurnRequested, TurnGenerated
    calls      rollout and executors: CodeRequested, CodeFinished, AnswerSubmitted, AnswerGraded
    cluster    the launcher and the launchers of further nodes: NodeArrived, NodeWelcomed ... NodeLeft
    envelope   what travels: one of these, from whom and to whom

Reading order: one trajectory's way is StartGroup, LeaseRequested, LeaseGranted, TurnRequested, TurnGenerated, LeaseParked,
CodeRequested, CodeFinished, ... AnswerSubmitted, AnswerGraded, LeaseReleased, TrajectoryFinished; it is in a step's way,
which is StepRequested, BatchReady, StepTrained, WeightsPublished, WeightsLoaded.

Token ids travel as raw bytes: little-endian int32; logprobs float32; policy versions int32; masks uint8.

Everybody imports from here. A new message stands in its conversation's file, and in the union at that file's end.
"""

from bus.messages.calls import *
from bus.messages.cluster import *
from bus.messages.envelope import *
from bus.messages.groups import *
from bus.messages.leases import *
from bus.messages.run import *
from bus.messages.steps import *
from bus.messages.turns import *
