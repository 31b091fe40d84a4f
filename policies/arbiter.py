"""The KV-capacity arbiter: leases on engines' KV tokens, first come first served.

A lease covers the worst case of a whole trajectory and is rounded up to the engine's pages, so that what is leased
never exceeds what is there. A request goes to the engine with the most room; one that does not fit anywhere waits, and
nobody behind it is served first, so that large ones do not starve.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from bus.messages import (
    AnyMessage,
    EngineJoined,
    EngineLeft,
    LeaseGranted,
    LeaseReleased,
    LeaseRequested,
    ProtocolError,
    RunStarted,
)
from policies.decider import Send


class EngineLedger(msgspec.Struct, frozen=True):
    kv_tokens: int
    page_tokens: int
    leased_tokens: int = 0

    def rounded(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens) * self.page_tokens

    @property
    def free_tokens(self) -> int:
        return self.kv_tokens - self.leased_tokens


class Lease(msgspec.Struct, frozen=True):
    engine: str
    tokens: int  # whole pages
    holder: str  # address of the rollout process


class Waiting(msgspec.Struct, frozen=True):
    tokens: int
    holder: str


class Ledger(msgspec.Struct):
    engines: dict[str, EngineLedger] = {}
    leases: dict[int, Lease] = {}
    queue: OrderedDict[int, Waiting] = msgspec.field(
        default_factory=OrderedDict[int, Waiting]
    )  # in the order of asking


class Totals(msgspec.Struct, frozen=True):
    """What is cheap to fingerprint after each event, however many leases there are."""

    leased_tokens: dict[str, int]
    num_leases: int
    num_waiting: int


class Arbiter:
    """A decider (policies.decider.Decider)."""

    def __init__(self, holder: str = "rollout-0") -> None:
        self._holder = holder
        self.ledger = Ledger()

    def decide(self, now: float, event: AnyMessage) -> Sequence[Send]:
        match event:
            case RunStarted():  # neither trajectories nor engines outlive the head: engines join again
                self.ledger = Ledger()
                return []
            case EngineJoined():
                return self._join(event)
            case EngineLeft(engine=name):
                return self._leave(name)
            case LeaseRequested():
                return self._request(event)
            case LeaseReleased(trajectory_id=trajectory_id):
                return self._release(trajectory_id)
            case _:
                raise ProtocolError(f"the arbiter has no use for {type(event).__name__}")

    def state_after(self, event: AnyMessage) -> msgspec.Struct | None:
        leased = {name: engine.leased_tokens for name, engine in self.ledger.engines.items()}
        return Totals(leased, len(self.ledger.leases), len(self.ledger.queue))

    def _join(self, event: EngineJoined) -> list[Send]:
        if event.page_tokens <= 0 or event.kv_tokens < event.page_tokens:
            raise ProtocolError(f"{event.engine} offers no whole page: {event.kv_tokens} tokens")
        if event.engine in self.ledger.engines:
            self._forget(event.engine)
        self.ledger.engines[event.engine] = EngineLedger(event.kv_tokens, event.page_tokens)
        return self._admit()

    def _leave(self, engine: str) -> list[Send]:
        if engine not in self.ledger.engines:
            raise ProtocolError(f"{engine} never joined")
        self._forget(engine)
        return []

    def _forget(self, engine: str) -> None:
        del self.ledger.engines[engine]
        self.ledger.leases = {tid: lease for tid, lease in self.ledger.leases.items() if lease.engine != engine}

    def _request(self, event: LeaseRequested) -> list[Send]:
        tid, tokens = event.trajectory_id, event.tokens
        if tid in self.ledger.leases or tid in self.ledger.queue:
            raise ProtocolError(f"trajectory {tid} asked twice for KV tokens")
        if tokens <= 0:
            raise ProtocolError(f"trajectory {tid} asks for {tokens} KV tokens")
        self.ledger.queue[tid] = Waiting(tokens, self._holder)
        return self._admit()

    def _release(self, trajectory_id: int) -> list[Send]:
        if self.ledger.queue.pop(trajectory_id, None) is not None:
            return self._admit()
        lease = self.ledger.leases.pop(trajectory_id, None)
        if lease is None:
            raise ProtocolError(f"trajectory {trajectory_id} holds no lease")
        engine = self.ledger.engines[lease.engine]
        self.ledger.engines[lease.engine] = replace(engine, leased_tokens=engine.leased_tokens - lease.tokens)
        return self._admit()

    def _admit(self) -> list[Send]:
        """Serve the queue from its head for as long as there is room."""
        effects: list[Send] = []
        while self.ledger.queue:
            tid, waiting = next(iter(self.ledger.queue.items()))
            name = self._roomiest(waiting.tokens)
            if name is None:
                break
            self.ledger.queue.popitem(last=False)
            engine = self.ledger.engines[name]
            tokens = engine.rounded(waiting.tokens)
            self.ledger.engines[name] = replace(engine, leased_tokens=engine.leased_tokens + tokens)
            self.ledger.leases[tid] = Lease(name, tokens, waiting.holder)
            effects.append(Send(waiting.holder, LeaseGranted(tid, name, tokens)))
        return effects

    def _roomiest(self, tokens: int) -> str | None:
        fitting = [
            (engine.free_tokens, name)
            for name, engine in self.ledger.engines.items()
            if engine.rounded(tokens) <= engine.free_tokens
        ]
        return max(fitting)[1] if fitting else None
