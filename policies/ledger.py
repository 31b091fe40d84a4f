"""The arbiter's books: whose KV tokens lie on which engine, in whole pages.

A trajectory has pages on one engine at most. Those of its group's prompt are shared by the members that lie there, and
counted once. What is leased never exceeds what an engine is trusted to have, unless the policy oversells on purpose.
Engines have numbered lives: what is of an earlier one, of one that is over, or older than what is known, is refused.
Everything is O(1); nothing is decided here.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Literal, NamedTuple

from bus.messages import EngineJoined, EngineLeft, EngineLoadReported, LeaseRequested, ProtocolError

State = Literal["waiting", "running", "parked"]

_REMEMBERED = 65_536  # trajectories that have ended, so that a late request of theirs is known as one
_TRUST_LOST = 0.95  # of its capacity an engine keeps each time that it had to give up tokens by itself
_TRUST_REGAINED = 1.01  # with each report without that
_STEPS_KEPT = 0.95  # of their weight earlier steps keep with each report: its own are too few to judge a speed by
_COUNTERS = ("decode_steps", "generated_tokens", "prefilled_tokens", "evicted_tokens", "preempted", "busy_s")


class Engine:
    """One engine's account. Pages; `step_s` is the measured time of a decode step, mean of the latest: 0 where none is known."""

    def __init__(self, joined: EngineJoined) -> None:
        self.name = joined.engine
        self.life = joined.life
        self.page_tokens = joined.page_tokens
        self.pages = joined.kv_tokens // joined.page_tokens
        self.usable_pages = self.pages
        self.version = joined.version
        self.leased_pages = 0
        self.running = 0  # trajectories with a lease to generate
        self.holdings: dict[int, Holding] = {}  # with pages here
        self.parked: OrderedDict[int, Holding] = OrderedDict()  # a tool works for them; the longest first
        self.groups: dict[int, int] = {}  # members with pages here
        self.step_s = 0.0
        self._steps = self._steps_s = 0.0  # weighted
        self.report: EngineLoadReported | None = None

    @property
    def free_pages(self) -> int:
        return self.usable_pages - self.leased_pages

    def pages_of(self, tokens: int) -> int:
        return -(-tokens // self.page_tokens)

    def room(self, holding: Holding) -> int:
        """Pages that it may take here beyond what is leased now: alone here, all that the engine ever said."""
        others = len(self.holdings) - (holding.engine is self)
        trusted = self.usable_pages if others else self.pages
        return max(0, trusted - self.leased_pages)

    def note(self, report: EngineLoadReported) -> None:
        """An engine that evicts or preempts has less than it said: it is trusted with less, and with more again later."""
        last = self.report
        if last is not None and any(getattr(report, name) < getattr(last, name) for name in _COUNTERS):
            raise ProtocolError(f"{self.name} reports less than it did before")
        self.report = report
        if last is None:
            return
        steps = report.decode_steps - last.decode_steps
        if steps > 0:
            self._steps = _STEPS_KEPT * self._steps + steps
            self._steps_s = _STEPS_KEPT * self._steps_s + report.busy_s - last.busy_s
            self.step_s = self._steps_s / self._steps
        if report.evicted_tokens > last.evicted_tokens or report.preempted > last.preempted:
            self.usable_pages = int(self.usable_pages * _TRUST_LOST)
        else:
            self.usable_pages = min(self.pages, int(self.usable_pages * _TRUST_REGAINED) + 1)


class Holding:
    """One trajectory's account, from its first request to its end."""

    def __init__(self, request: LeaseRequested, holder: str, order: int) -> None:
        self.trajectory_id = request.trajectory_id
        self.group_id = request.group_id
        self.holder = holder  # address of its rollout process
        self.order = order  # in which it first asked
        self.request = request
        self.tokens = request.tokens
        self.state: State = "waiting"
        self.since = 0.0  # when it began to wait
        self.engine: Engine | None = None  # where it has pages
        self.pages = 0  # its own, without those that it shares
        self.leased_tokens = 0
        self.leases = 0  # it has had
        self.turn_began_at = 0  # tokens that it had when its turn began

    @property
    def is_extension(self) -> bool:
        """It waits in the middle of a turn."""
        return self.tokens > self.turn_began_at

    def own_pages(self, engine: Engine, tokens: int) -> int:
        return engine.pages_of(tokens) - self.shared_pages(engine)

    def shared_pages(self, engine: Engine) -> int:
        """Whole pages of the prompt; the one that it ends in is each member's own."""
        return self.request.prompt_tokens // engine.page_tokens


class Group(NamedTuple):
    """Trajectories that share a prompt."""

    prompt_tokens: int
    members: int


class Ledger:
    """Raises ProtocolError, and has changed nothing then, for what cannot be."""

    def __init__(self, *, shrinks: bool = True) -> None:
        """`shrinks`: a lease between two turns covers what is cached alone; else all that it ever covered."""
        self._shrinks = shrinks
        self.engines: dict[str, Engine] = {}
        self.holdings: dict[int, Holding] = {}
        self.groups: dict[int, Group] = {}  # of the holdings
        self._lives: dict[str, int] = {}  # of each engine's name the last that is known
        self._order = 0
        self._ended: OrderedDict[int, None] = OrderedDict()  # trajectories, the last `_REMEMBERED`

    # ---------------------------------------------------------------- engines

    def join(self, event: EngineJoined) -> list[Holding]:
        """Those that lose their pages, where the engine had joined before."""
        if event.page_tokens <= 0 or event.kv_tokens < event.page_tokens:
            raise ProtocolError(f"{event.engine} offers no whole page: {event.kv_tokens} tokens")
        if event.life <= (last := self._lives.get(event.engine, 0)):
            raise ProtocolError(f"{event.engine} joins for life {event.life}, life {last} is known")
        lost = self._remove(event.engine)
        self._lives[event.engine] = event.life
        self.engines[event.engine] = Engine(event)
        return lost

    def leave(self, event: EngineLeft) -> list[Holding]:
        """Those that had pages there. One that leaves before it has joined never will: the two words travel apart."""
        last = self._lives.get(event.engine, 0)
        if event.life < last or (event.life == last and event.engine not in self.engines):
            raise ProtocolError(f"life {event.life} of {event.engine} was over before")
        self._lives[event.engine] = event.life
        return self._remove(event.engine)

    def reporting(self, event: EngineLoadReported) -> Engine:
        """Whose report it is."""
        engine = self.engines.get(event.engine)
        if engine is None or engine.life != event.life:
            raise ProtocolError(f"life {event.life} of {event.engine} reports its load, and is not here")
        return engine

    def _remove(self, name: str) -> list[Holding]:
        engine = self.engines.pop(name, None)
        lost = list(engine.holdings.values()) if engine is not None else []
        for holding in lost:
            self.drop(holding)
        return lost

    # ---------------------------------------------------------------- trajectories

    def request(self, event: LeaseRequested, holder: str, now: float) -> Holding:
        """It waits from now on; what it has cached stays leased."""
        name = f"trajectory {event.trajectory_id}"
        if event.tokens <= 0 or event.max_new_tokens <= 0 or not 0 <= event.prompt_tokens <= event.tokens:
            raise ProtocolError(f"{name} asks for {event.max_new_tokens} KV tokens behind {event.tokens}")
        holding = self.holdings.get(event.trajectory_id)
        if holding is None:
            holding = self._open(event, holder)
        else:
            self._check_request(holding, event)
            if holding.state == "parked" or event.turn != holding.request.turn:
                holding.turn_began_at = event.tokens
            self._shrink(holding, min(event.tokens, holding.leased_tokens))
        self._enter(holding, "waiting")
        holding.request, holding.tokens, holding.since = event, event.tokens, now
        return holding

    def park(self, trajectory_id: int, tokens: int) -> Holding:
        """A tool works for it: it keeps what is cached."""
        holding = self._running(trajectory_id)
        self._check_growth(holding, tokens)
        if holding.engine is not None and tokens > holding.leased_tokens:
            raise ProtocolError(f"trajectory {trajectory_id} has {tokens} tokens, {holding.leased_tokens} were leased")
        self._shrink(holding, tokens)
        holding.tokens = tokens
        self._enter(holding, "parked")
        return holding

    def release(self, trajectory_id: int, tokens: int) -> Holding:
        """The trajectory has ended, with so many tokens."""
        holding = self.holdings.get(trajectory_id)
        if holding is None:
            raise ProtocolError(f"trajectory {trajectory_id} holds no lease")
        self._check_growth(holding, tokens)
        self.drop(holding)
        holding.tokens = tokens
        del self.holdings[trajectory_id]
        self._ended[trajectory_id] = None
        if len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)
        group = self.groups.pop(holding.group_id)
        if group.members > 1:
            self.groups[holding.group_id] = group._replace(members=group.members - 1)
        return holding

    def missing_pages(self, holding: Holding, engine: Engine, tokens: int) -> int:
        """That a lease of so many tokens there would take beyond what is leased now."""
        own = holding.own_pages(engine, tokens)
        if holding.engine is engine:
            return own - holding.pages
        return own if holding.group_id in engine.groups else own + holding.shared_pages(engine)

    def lease(self, holding: Holding, engine: Engine, tokens: int, *, oversell: bool = False) -> None:
        """It may generate up to so many tokens there. What it has elsewhere is given up."""
        missing = self.missing_pages(holding, engine, tokens)
        room = engine.room(holding)
        if missing > room and not oversell:
            raise ProtocolError(f"{engine.name} has {room} free pages, not {missing}")
        if holding.engine is not engine:
            self.drop(holding)
            engine.holdings[holding.trajectory_id] = holding
            engine.groups[holding.group_id] = engine.groups.get(holding.group_id, 0) + 1
            holding.engine = engine
        engine.leased_pages += missing
        holding.pages = holding.own_pages(engine, tokens)
        holding.leased_tokens = tokens
        holding.leases += 1
        self._enter(holding, "running")

    def drop(self, holding: Holding) -> None:
        """Its pages are free; whether it waits, and for what, stays as it is."""
        engine = holding.engine
        if engine is None:
            return
        engine.running -= holding.state == "running"
        engine.parked.pop(holding.trajectory_id, None)
        engine.leased_pages -= holding.pages
        members = engine.groups[holding.group_id] - 1
        if members:
            engine.groups[holding.group_id] = members
        else:
            del engine.groups[holding.group_id]
            engine.leased_pages -= holding.shared_pages(engine)
        del engine.holdings[holding.trajectory_id]
        holding.engine, holding.pages, holding.leased_tokens = None, 0, 0

    # ---------------------------------------------------------------- inside

    def _open(self, event: LeaseRequested, holder: str) -> Holding:
        if event.trajectory_id in self._ended:
            raise ProtocolError(f"trajectory {event.trajectory_id} has ended")
        group = self.groups.get(event.group_id, Group(event.prompt_tokens, 0))
        if event.lease != 1 or event.prompt_tokens != group.prompt_tokens:
            raise ProtocolError(
                f"trajectory {event.trajectory_id} is new, and asks for lease {event.lease} with a prompt of "
                f"{event.prompt_tokens} tokens, its group's has {group.prompt_tokens}"
            )
        self._order += 1
        self.groups[event.group_id] = group._replace(members=group.members + 1)
        holding = self.holdings[event.trajectory_id] = Holding(event, holder, self._order)
        holding.turn_began_at = event.tokens
        return holding

    def _check_request(self, holding: Holding, event: LeaseRequested) -> None:
        name, last = f"trajectory {event.trajectory_id}", holding.request
        if holding.state == "waiting":
            raise ProtocolError(f"{name} asked twice for KV tokens")
        if event.lease != holding.leases + 1:
            raise ProtocolError(f"{name} asks for lease {event.lease} after {holding.leases}")
        if (event.group_id, event.prompt_tokens) != (last.group_id, last.prompt_tokens):
            raise ProtocolError(f"{name} has changed its group or its prompt")
        if event.turn < last.turn or event.tokens + event.max_new_tokens > last.tokens + last.max_new_tokens:
            raise ProtocolError(f"{name} goes back, or beyond the limit that it began with")
        self._check_growth(holding, event.tokens)  # beyond its lease by what tools said

    def _running(self, trajectory_id: int) -> Holding:
        holding = self.holdings.get(trajectory_id)
        if holding is None or holding.state != "running":
            raise ProtocolError(f"trajectory {trajectory_id} has no lease to generate")
        return holding

    def _check_growth(self, holding: Holding, tokens: int) -> None:
        if tokens < holding.tokens:
            raise ProtocolError(f"trajectory {holding.trajectory_id} has {tokens} tokens after {holding.tokens}")

    def _shrink(self, holding: Holding, tokens: int) -> None:
        engine = holding.engine
        if engine is None or not self._shrinks:
            return
        pages = min(holding.pages, holding.own_pages(engine, tokens))
        engine.leased_pages -= holding.pages - pages
        holding.pages, holding.leased_tokens = pages, tokens

    def _enter(self, holding: Holding, state: State) -> None:
        engine = holding.engine
        if engine is not None:
            engine.running += (state == "running") - (holding.state == "running")
            if state == "parked":
                engine.parked[holding.trajectory_id] = holding
            else:
                engine.parked.pop(holding.trajectory_id, None)
        holding.state = state
