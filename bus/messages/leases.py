"""Room in the engines' KV caches: between the rollout process, the arbiter and the generators."""

from __future__ import annotations

from bus.messages.message import Message


class EngineJoined(Message, frozen=True):
    """generator -> arbiter, recipe: it offers its KV cache. Leases on it are rounded up to whole pages."""

    engine: str
    kv_tokens: int
    page_tokens: int
    version: int  # policy version of the weights that it holds
    life: int = 1  # counts the engine's starts; deciders refuse what is of an earlier life, or of one that is over


class EngineLeft(Message, frozen=True):
    """launcher -> arbiter, recipe, rollouts: this life is over, and so are those before it."""

    engine: str
    cause: str
    life: int = 1


class EngineLoadReported(Message, frozen=True):
    """generator -> arbiter, several times a second while it works: what the engine measures. Counters since its start."""

    engine: str
    version: int
    running: int  # sequences that decode
    waiting: int  # requests that the engine could not begin yet: 0 unless it has less room than it said
    used_tokens: int  # KV tokens in pages that are not free
    cached_tokens: int  # of them in pages that no running sequence holds
    decode_steps: int
    generated_tokens: int
    prefilled_tokens: int
    recomputed_tokens: int  # of them those that it had computed before: evicted, preempted or forgotten since
    evicted_tokens: int  # cached tokens that the engine gave up by itself, for lack of room
    preempted: int  # running sequences that it stopped for lack of room
    busy_s: float
    life: int = 1  # as in EngineJoined


class LeaseRequested(Message, frozen=True):
    """rollout -> arbiter: room for the trajectory's next tokens. It is asked for before each turn, and again within a turn
    that its lease has ended."""

    trajectory_id: int
    group_id: int
    turn: int
    lease: int  # the one that it asks for: counts the trajectory's leases from 1
    tokens: int  # so far, prompt included
    prompt_tokens: int  # that the group's trajectories share
    max_new_tokens: int  # the trajectory may get so much longer, tool results included


class LeaseGranted(Message, frozen=True):
    """arbiter -> rollout: the trajectory may have so many tokens in that engine's cache, those so far included."""

    trajectory_id: int
    engine: str
    tokens: int
    lease: int  # counts the trajectory's leases from 1
    waited_s: float
    reason: str
    life: int = 1  # of the engine; with it the lease ends


class LeaseDeferred(Message, frozen=True):
    """arbiter -> rollout, for its log alone: the request waits."""

    trajectory_id: int
    reason: str


class LeaseParked(Message, frozen=True):
    """rollout -> arbiter: the turn has its tokens, and a tool works. The lease shrinks to what is cached, which the arbiter
    may give up until the next request."""

    trajectory_id: int
    tokens: int


class LeaseReleased(Message, frozen=True):
    """rollout -> the engine, which forgets the trajectory's cache, and -> arbiter: the trajectory needs none any more."""

    trajectory_id: int
    tokens: int  # at its end


class CacheReleased(Message, frozen=True):
    """arbiter -> generator: forget the trajectory's cache, unless a request under a later lease has come meanwhile."""

    trajectory_id: int
    lease: int


class AdmissionContinued(Message, frozen=True):
    """arbiter -> arbiter: more requests may be granted than one decision should grant."""


class LedgerReported(Message, frozen=True):
    """arbiter -> launcher, for its log alone, with each report of an engine: the arbiter's books beside the measurement."""

    engine: str
    leased_tokens: int
    usable_tokens: int  # of its capacity, as far as it is trusted: an engine that evicts or preempts has less
    running: int  # trajectories
    parked: int
    waiting: int  # with a cache there
    used_tokens: int  # as the engine measured


LeaseMessage = (
    EngineJoined
    | EngineLeft
    | EngineLoadReported
    | LeaseRequested
    | LeaseGranted
    | LeaseDeferred
    | LeaseParked
    | LeaseReleased
    | CacheReleased
    | AdmissionContinued
    | LedgerReported
)
