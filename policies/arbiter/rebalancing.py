"""Migrations that let all engines finish together: a step ends with its last engine.

The estimate of an engine's remaining time uses the expected remaining tokens of its trajectories and
measured costs (asterism.policies.arbiter.decode_cost):

    end_s = step * (remaining tokens of the longest trajectory) + read * (cached tokens that all
    remaining steps read)
"""

from typing import NamedTuple

from asterism.policies.arbiter.decode_cost import CostCoefficients, DecodeCostModel
from asterism.policies.arbiter.kv_demand import KvDemandForecast, count_kv_reads
from asterism.policies.arbiter.kv_ledger import EngineAccount

# Largest remaining time of the target, including the trajectory, over the remaining time of the source.
_MIGRATE_IF_FINISHES_WITHIN = 0.7
_MIGRATE_IF_SAVES = 0.75  # least share of the recomputation cost that a migration saves


class _RemainingWork(NamedTuple):
    """The remaining work of one engine at its last report, adjusted by later migrations."""

    longest_tokens: float  # remaining tokens of the longest trajectory
    reads: float  # cached tokens that all remaining steps read

    def estimate_end_s(self, costs: CostCoefficients) -> float:
        return costs.step * self.longest_tokens + costs.read * self.reads


class Rebalancer:
    def __init__(self) -> None:
        self._cost_model = DecodeCostModel()
        self._remaining_work: dict[str, _RemainingWork] = {}  # by engine
        self._ends_in_s: dict[str, float] = {}  # seconds from now

    def on_load_reported(self, engine: EngineAccount, forecast: KvDemandForecast) -> None:
        if engine.report is not None:
            self._cost_model.add_report(engine.report)
        self._set_work(engine.name, _RemainingWork(forecast.get_longest_remaining(), forecast.reads))

    def on_engine_left(self, engine: EngineAccount) -> None:
        self._cost_model.remove_engine(engine.name)
        self._remaining_work.pop(engine.name, None)
        self._ends_in_s.pop(engine.name, None)

    def find_migration_target(self, source: str, tokens: int, remaining_tokens: float) -> str | None:
        """Return the target of a migration after which the later of both engines ends earlier, or None."""
        source_end_s = self._ends_in_s.get(source, 0.0)
        if source_end_s <= 0.0 or len(self._ends_in_s) < 2:
            return None
        best = min(self._ends_in_s, key=self._ends_in_s.__getitem__)
        if self._ends_in_s[best] > _MIGRATE_IF_FINISHES_WITHIN * source_end_s:
            return None
        costs = self._cost_model.costs
        migration_s = costs.prefill * tokens + 2 * costs.step
        if costs.read * count_kv_reads(tokens, remaining_tokens) < _MIGRATE_IF_SAVES * migration_s:
            return None
        target_end_s = self._add_work(best, tokens, remaining_tokens).estimate_end_s(costs) + migration_s
        return best if target_end_s < _MIGRATE_IF_FINISHES_WITHIN * source_end_s else None

    def on_migrated(self, source: str, target: str, tokens: int, remaining_tokens: float) -> None:
        self._set_work(target, self._add_work(target, tokens, remaining_tokens))
        load = self._remaining_work[source]
        self._set_work(source, load._replace(reads=load.reads - count_kv_reads(tokens, remaining_tokens)))

    def _add_work(self, name: str, tokens: int, remaining_tokens: float) -> _RemainingWork:
        load = self._remaining_work[name]
        return _RemainingWork(
            max(load.longest_tokens, remaining_tokens), load.reads + count_kv_reads(tokens, remaining_tokens)
        )

    def _set_work(self, name: str, load: _RemainingWork) -> None:
        self._remaining_work[name] = load
        self._ends_in_s[name] = load.estimate_end_s(self._cost_model.costs)
