"""The arbiter's ledger: the KV pages that each trajectory has leased on each engine.

A trajectory has pages on at most one engine. Members of a group share the pages of their prompt on an
engine, and the ledger counts those pages once. Leases never exceed an engine's usable pages, unless
the policy oversells deliberately. The ledger refuses events of an engine's earlier incarnation. Every
operation is O(1); the ledger makes no decisions.
"""

from __future__ import annotations

from collections import OrderedDict
from operator import attrgetter, lt
from typing import Literal, NamedTuple

from asterism.bus.messages import EngineJoined, EngineLeft, EngineLoadReported, LeaseRequested, ProtocolError

AccountState = Literal["waiting", "running", "idle"]

_MAX_ENDED_IDS = 65_536  # ids of ended trajectories that are kept, to refuse their late requests
_CAPACITY_DECAY = 0.95  # factor on an engine's usable pages after evictions or preemptions
_CAPACITY_RECOVERY = 1.01  # factor on an engine's usable pages after a report without evictions or preemptions
_get_counters = attrgetter(
    "decode_steps", "generated_tokens", "prefilled_tokens", "evicted_tokens", "preempted", "busy_s"
)


class EngineAccount:
    """The pages of one engine. `step_s` is the measured time of a decode step, 0 if unknown."""

    def __init__(self, joined: EngineJoined) -> None:
        self.name = joined.engine
        self.incarnation = joined.incarnation
        self.page_tokens = joined.page_tokens
        self.total_pages = joined.kv_tokens // joined.page_tokens
        self.usable_pages = self.total_pages
        self.version = joined.version
        self.leased_pages = 0
        self.running = 0  # trajectories that generate under a lease
        self.accounts: dict[int, KvAccount] = {}  # accounts with pages on this engine
        self.idle: OrderedDict[int, KvAccount] = OrderedDict()  # accounts in tool calls, longest idle first
        self.group_members: dict[int, int] = {}  # number of members with pages on this engine, by group
        self.step_s = 0.0
        self.report: EngineLoadReported | None = None

    @property
    def free_pages(self) -> int:
        return self.usable_pages - self.leased_pages

    def count_free_pages_for(self, account: KvAccount) -> int:
        """Return the pages that `account` can lease: free usable pages, or all pages if it is the only account."""
        free = self.compute_headroom_for(account)
        return free if free > 0 else 0

    def compute_headroom_for(self, account: KvAccount) -> int:
        """Return free pages like `count_free_pages_for`; the number is negative if leases exceed the usable pages."""
        others = len(self.accounts) - (account.engine is self)
        return (self.usable_pages if others else self.total_pages) - self.leased_pages

    def apply_report(self, report: EngineLoadReported) -> None:
        """Reduce the usable pages after evictions or preemptions; otherwise raise them slowly."""
        last = self.report
        if last is not None and any(map(lt, _get_counters(report), _get_counters(last))):
            raise ProtocolError(f"{self.name} reports lower counters than before")
        self.report = report
        if last is None:
            return
        steps = report.decode_steps - last.decode_steps
        if steps > 0:
            self.step_s = (report.busy_s - last.busy_s) / steps
        if report.evicted_tokens > last.evicted_tokens or report.preempted > last.preempted:
            self.usable_pages = int(self.usable_pages * _CAPACITY_DECAY)
        else:
            self.usable_pages = min(self.total_pages, int(self.usable_pages * _CAPACITY_RECOVERY) + 1)


class KvAccount:
    """The account of one trajectory, from its first request to its end."""

    def __init__(self, request: LeaseRequested, rollout_address: str, arrival: int) -> None:
        self.trajectory_id = request.trajectory_id
        self.group_id = request.group_id
        self.rollout_address = rollout_address
        self.arrival = arrival  # rank of the first request among all trajectories
        self.request = request
        self.tokens = request.tokens
        self.state: AccountState = "waiting"
        self.waiting_since = 0.0  # time of the newest request, seconds
        self.engine: EngineAccount | None = None  # the engine that holds the trajectory's pages
        self.pages = 0  # leased pages, without shared pages of the prompt
        self.leased_tokens = 0
        self.num_leases = 0
        self.turn_start_tokens = 0  # tokens at the start of the current turn

    def __str__(self) -> str:
        return f"trajectory {self.trajectory_id}"

    @property
    def is_extension(self) -> bool:
        """True if the trajectory requests a further lease within a turn."""
        return self.tokens > self.turn_start_tokens

    def count_own_pages(self, engine: EngineAccount, tokens: int) -> int:
        page_tokens = engine.page_tokens
        return -(-tokens // page_tokens) - self.request.prompt_tokens // page_tokens

    def count_shared_pages(self, engine: EngineAccount) -> int:
        """Return the number of whole pages of the prompt; each member has its own last, partial page."""
        return self.request.prompt_tokens // engine.page_tokens


class PromptGroup(NamedTuple):
    """The trajectories that share a prompt."""

    prompt_tokens: int
    members: int


class Ledger:
    """The ledger of accounts and engines. An invalid event raises ProtocolError and changes nothing."""

    def __init__(self, *, shrinks_paused_leases: bool = True) -> None:
        """`shrinks_paused_leases`: between turns, leases cover only the cached tokens."""
        self._shrinks_paused_leases = shrinks_paused_leases
        self.engines: dict[str, EngineAccount] = {}
        self.accounts: dict[int, KvAccount] = {}
        self.groups: dict[int, PromptGroup] = {}  # groups of `accounts`
        self._incarnations: dict[str, int] = {}  # newest incarnation of each engine
        self._num_arrivals = 0
        # Indexed by id modulo the size; not a dict, because a growing dict stalls for milliseconds.
        self._ended_ids = [-1] * _MAX_ENDED_IDS

    # ---------------------------------------------------------------- engines

    def add_engine(self, event: EngineJoined) -> list[KvAccount]:
        """Add the engine. Return the accounts that lose their pages on its earlier incarnation."""
        if event.page_tokens <= 0 or event.kv_tokens < event.page_tokens:
            raise ProtocolError(f"{event.engine} offers less than one page: {event.kv_tokens} tokens")
        if event.incarnation <= (last := self._incarnations.get(event.engine, 0)):
            raise ProtocolError(f"incarnation {event.incarnation} of {event.engine} joined after incarnation {last}")
        evicted = self._pop_engine(event.engine)
        self._incarnations[event.engine] = event.incarnation
        self.engines[event.engine] = EngineAccount(event)
        return evicted

    def remove_engine(self, event: EngineLeft) -> list[KvAccount]:
        """Remove the engine and return its accounts. The same incarnation cannot join again."""
        last = self._incarnations.get(event.engine, 0)
        if event.incarnation < last or (event.incarnation == last and event.engine not in self.engines):
            raise ProtocolError(f"incarnation {event.incarnation} of {event.engine} had already left")
        self._incarnations[event.engine] = event.incarnation
        return self._pop_engine(event.engine)

    def find_reporting_engine(self, event: EngineLoadReported) -> EngineAccount:
        engine = self.engines.get(event.engine)
        if engine is None or engine.incarnation != event.incarnation:
            raise ProtocolError(
                f"load report of incarnation {event.incarnation} of {event.engine}, which has not joined"
            )
        return engine

    def _pop_engine(self, name: str) -> list[KvAccount]:
        engine = self.engines.pop(name, None)
        evicted = list(engine.accounts.values()) if engine is not None else []
        for account in evicted:
            self.release_pages(account)
        return evicted

    # ---------------------------------------------------------------- trajectories

    def enqueue_request(self, event: LeaseRequested, rollout_address: str, now: float) -> KvAccount:
        """Mark the trajectory as waiting; its cached tokens stay leased."""
        if event.tokens <= 0 or event.max_new_tokens <= 0 or not 0 <= event.prompt_tokens <= event.tokens:
            raise ProtocolError(
                f"trajectory {event.trajectory_id} requests {event.max_new_tokens} KV tokens after {event.tokens}"
            )
        account = self.accounts.get(event.trajectory_id)
        if account is None:
            account = self._open_account(event, rollout_address)
        else:
            self._check_request(account, event)
            if account.state == "idle" or event.turn != account.request.turn:
                account.turn_start_tokens = event.tokens
            self._shrink_lease(account, event.tokens)
        self._set_state(account, "waiting")
        account.request, account.tokens, account.waiting_since = event, event.tokens, now
        return account

    def mark_idle(self, trajectory_id: int, tokens: int) -> KvAccount:
        """Mark the trajectory as waiting for a tool; its cached tokens stay leased."""
        account = self._get_running(trajectory_id)
        self._check_growth(account, tokens)
        if account.engine is not None and tokens > account.leased_tokens:
            raise ProtocolError(f"{account} has {tokens} tokens, but {account.leased_tokens} were leased")
        self._shrink_lease(account, tokens)
        account.tokens = tokens
        self._set_state(account, "idle")
        return account

    def close_account(self, trajectory_id: int, tokens: int) -> KvAccount:
        """Close the account of a trajectory that ended with `tokens` tokens."""
        account = self.accounts.get(trajectory_id)
        if account is None:
            raise ProtocolError(f"trajectory {trajectory_id} holds no lease")
        self._check_growth(account, tokens)
        self.release_pages(account)
        account.tokens = tokens
        del self.accounts[trajectory_id]
        self._ended_ids[trajectory_id % _MAX_ENDED_IDS] = trajectory_id
        prompt_tokens, members = self.groups[account.group_id]
        if members > 1:
            self.groups[account.group_id] = PromptGroup(prompt_tokens, members - 1)
        else:
            del self.groups[account.group_id]
        return account

    def count_missing_pages(self, account: KvAccount, engine: EngineAccount, tokens: int) -> int:
        """Return the number of further pages that a lease of `tokens` tokens on `engine` needs."""
        own = account.count_own_pages(engine, tokens)
        if account.engine is engine:
            return own - account.pages
        return own if account.group_id in engine.group_members else own + account.count_shared_pages(engine)

    def grant_lease(self, account: KvAccount, engine: EngineAccount, tokens: int, *, oversell: bool = False) -> None:
        """Lease `tokens` tokens on `engine`, and release the account's pages on another engine."""
        missing = self.count_missing_pages(account, engine, tokens)
        free_pages = engine.count_free_pages_for(account)
        if missing > free_pages and not oversell:
            raise ProtocolError(f"{engine.name} has {free_pages} free pages, not {missing}")
        if account.engine is not engine:
            self.release_pages(account)
            engine.accounts[account.trajectory_id] = account
            engine.group_members[account.group_id] = engine.group_members.get(account.group_id, 0) + 1
            account.engine = engine
        engine.leased_pages += missing
        account.pages = account.count_own_pages(engine, tokens)
        account.leased_tokens = tokens
        account.num_leases += 1
        self._set_state(account, "running")

    def release_pages(self, account: KvAccount) -> None:
        """Release the trajectory's pages; its state and its request stay unchanged."""
        engine = account.engine
        if engine is None:
            return
        self._leave_state(account, engine)
        engine.leased_pages -= account.pages
        members = engine.group_members[account.group_id] - 1
        if members:
            engine.group_members[account.group_id] = members
        else:
            del engine.group_members[account.group_id]
            engine.leased_pages -= account.count_shared_pages(engine)
        del engine.accounts[account.trajectory_id]
        account.engine, account.pages, account.leased_tokens = None, 0, 0

    # ---------------------------------------------------------------- internals

    def _open_account(self, event: LeaseRequested, rollout_address: str) -> KvAccount:
        if self._ended_ids[event.trajectory_id % _MAX_ENDED_IDS] == event.trajectory_id:
            raise ProtocolError(f"trajectory {event.trajectory_id} has ended")
        group = self.groups.get(event.group_id, PromptGroup(event.prompt_tokens, 0))
        if event.lease != 1 or event.prompt_tokens != group.prompt_tokens:
            raise ProtocolError(
                f"new trajectory {event.trajectory_id} requests lease {event.lease} with a prompt of "
                f"{event.prompt_tokens} tokens; expected lease 1 and {group.prompt_tokens} tokens"
            )
        self._num_arrivals += 1
        self.groups[event.group_id] = PromptGroup(group.prompt_tokens, group.members + 1)
        account = self.accounts[event.trajectory_id] = KvAccount(event, rollout_address, self._num_arrivals)
        account.turn_start_tokens = event.tokens
        return account

    def _check_request(self, account: KvAccount, event: LeaseRequested) -> None:
        last = account.request
        if account.state == "waiting":
            raise ProtocolError(f"{account} requested KV tokens twice")
        if event.lease != account.num_leases + 1:
            raise ProtocolError(f"{account} requests lease {event.lease} after lease {account.num_leases}")
        if event.group_id != last.group_id or event.prompt_tokens != last.prompt_tokens:
            raise ProtocolError(f"{account} changed its group or its prompt")
        if event.turn < last.turn or event.tokens + event.max_new_tokens > last.tokens + last.max_new_tokens:
            raise ProtocolError(f"{account} requests an earlier turn, or exceeds its first limit")
        self._check_growth(account, event.tokens)  # tool responses may exceed the lease

    def _get_running(self, trajectory_id: int) -> KvAccount:
        account = self.accounts.get(trajectory_id)
        if account is None or account.state != "running":
            raise ProtocolError(f"trajectory {trajectory_id} has no running lease")
        return account

    def _check_growth(self, account: KvAccount, tokens: int) -> None:
        if tokens < account.tokens:
            raise ProtocolError(f"{account} has {tokens} tokens, fewer than the {account.tokens} before")

    def _shrink_lease(self, account: KvAccount, tokens: int) -> None:
        engine = account.engine
        if engine is None or not self._shrinks_paused_leases or tokens >= account.leased_tokens:
            return
        pages = account.count_own_pages(engine, tokens)
        engine.leased_pages -= account.pages - pages
        account.pages, account.leased_tokens = pages, tokens

    def _set_state(self, account: KvAccount, state: AccountState) -> None:
        engine = account.engine
        if engine is not None:
            self._leave_state(account, engine)
            if state == "running":
                engine.running += 1
            elif state == "idle":
                engine.idle[account.trajectory_id] = account
        account.state = state

    def _leave_state(self, account: KvAccount, engine: EngineAccount) -> None:
        if account.state == "running":
            engine.running -= 1
        elif account.state == "idle":
            del engine.idle[account.trajectory_id]
