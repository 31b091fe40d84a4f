"""Leases of KV cache: messages between the rollout process, the arbiter and the generators."""

from asterism.bus.messages.message import Message


class EngineJoined(Message, frozen=True):
    """generator -> arbiter, recipe: the engine offers its KV cache in whole pages."""

    engine: str
    kv_tokens: int
    page_tokens: int
    version: int  # policy version of the engine's weights
    incarnation: int = 1  # counts the engine's starts; deciders refuse events of ended incarnations


class EngineLeft(Message, frozen=True):
    """launcher -> arbiter, recipe, rollouts: this incarnation of the engine and all earlier incarnations have ended."""

    engine: str
    cause: str
    incarnation: int = 1


class EngineLoadReported(Message, frozen=True):
    """generator -> arbiter while the load changes, -> recorder after each load of weights: the engine's load.
    The fields are gauges, and counters since the start of the engine."""

    engine: str
    version: int
    running: int  # number of decoding sequences
    waiting: int  # queued requests: 0 unless the engine has less memory than reported
    used_tokens: int  # tokens of the KV cache in pages that are not free
    cached_tokens: int  # part of used_tokens, in pages that no running sequence holds
    decode_steps: int
    generated_tokens: int
    prefilled_tokens: int
    recomputed_tokens: int  # part of prefilled_tokens: computed before, then evicted, preempted or released
    evicted_tokens: int  # cached tokens that the engine evicted for lack of memory
    preempted: int  # running sequences that the engine preempted for lack of memory
    busy_s: float
    incarnation: int = 1  # see EngineJoined


class LeaseRequested(Message, frozen=True):
    """rollout -> arbiter, before each turn and when a lease ends within a turn: request a lease."""

    trajectory_id: int
    group_id: int
    turn: int
    lease: int  # number of the requested lease: counts the trajectory's leases from 1
    tokens: int  # current length of the trajectory, including the prompt
    prompt_tokens: int  # prompt length, shared by the group's trajectories
    max_new_tokens: int  # tokens by which the trajectory can still grow, including tool results


class LeaseGranted(Message, frozen=True):
    """arbiter -> rollout: the trajectory can occupy up to `tokens` of the engine's KV cache."""

    trajectory_id: int
    engine: str
    tokens: int
    lease: int  # see LeaseRequested
    waited_s: float
    reason: str
    incarnation: int = 1  # incarnation of the engine, which ends the lease when it ends


class LeaseDeferred(Message, frozen=True):
    """arbiter -> rollout, only for its log: the request waits."""

    trajectory_id: int
    reason: str


class LeasePaused(Message, frozen=True):
    """rollout -> arbiter: the turn is generated and a tool call runs.
    The lease shrinks to the cached tokens. Until the next request, the arbiter can release this cache."""

    trajectory_id: int
    tokens: int


class LeaseReleased(Message, frozen=True):
    """rollout -> generator, arbiter: the trajectory has ended; the engine releases its cache."""

    trajectory_id: int
    tokens: int  # final length of the trajectory


class CacheReleased(Message, frozen=True):
    """arbiter -> generator: release the cache, unless a request with a later lease has arrived."""

    trajectory_id: int
    lease: int


class AdmissionContinued(Message, frozen=True):
    """arbiter -> arbiter: continue admission, because one decision grants a bounded number of requests."""


class LedgerReported(Message, frozen=True):
    """arbiter -> launcher, only for its log, at each EngineLoadReported: the leases of an engine."""

    engine: str
    leased_tokens: int
    usable_tokens: int  # trusted part of the capacity: smaller for an engine that evicts or preempts
    running: int  # number of trajectories with a lease
    idle: int
    waiting: int  # waiting trajectories with a cache on this engine
    used_tokens: int  # tokens in use, as measured by the engine


EngineEvent = EngineJoined | EngineLeft | EngineLoadReported
TrajectoryLease = LeaseRequested | LeaseGranted | LeaseDeferred | LeasePaused | LeaseReleased
LeaseMessage = EngineEvent | TrajectoryLease | CacheReleased | AdmissionContinued | LedgerReported
