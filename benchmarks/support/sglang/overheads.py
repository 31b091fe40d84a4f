"""Computes the engine's overheads in wall and CPU time from the rounds of benchmarks.sglang."""

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from statistics import median, quantiles
from typing import NamedTuple

WAYS = ("adapter", "bare", "streamed")


class RoundCost(NamedTuple):
    """Costs of one round."""

    tokens: int
    seconds: float
    client_s: float  # CPU time of this process
    server_s: Sequence[float]  # CPU time of each server process; empty for an external server

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def us(self) -> float:
        return 1e6 * self.seconds / self.tokens

    @property
    def client_us(self) -> float:
        return 1e6 * self.client_s / self.tokens

    @property
    def server_us(self) -> float:
        return 1e6 * sum(self.server_s) / self.tokens

    @property
    def all_us(self) -> float:
        return self.client_us + self.server_us

    @property
    def busiest_us(self) -> float:
        return 1e6 * max(self.client_s, *self.server_s) / self.tokens


def compute_overheads(spent: Sequence[Mapping[str, RoundCost]]) -> dict[str, float]:
    def compute_median(figure: Callable[[RoundCost], float], way: str) -> float:
        return median(figure(done[way]) for done in spent)

    def compute_overhead(way: str, cost: Callable[[RoundCost], float]) -> list[float]:
        return [1 - cost(done[way]) / cost(done["adapter"]) for done in spent]

    low, middle, high = quantiles(compute_overhead("bare", attrgetter("us")), n=4)
    figures = {
        "overhead_64": middle,
        "overhead_64_low": low,
        "overhead_64_high": high,
        "overhead_64_streamed": median(compute_overhead("streamed", attrgetter("us"))),
    }
    ours = bool(spent[0]["bare"].server_s)
    if ours:
        for of, cost in (("all", attrgetter("all_us")), ("busiest", attrgetter("busiest_us"))):
            figures[f"overhead_64_{of}"] = median(compute_overhead("bare", cost))
            figures[f"overhead_64_streamed_{of}"] = median(compute_overhead("streamed", cost))
    for way in WAYS:
        end = "" if way == "adapter" else f"_{way}"
        figures[f"tokens_per_s{end}"] = compute_median(attrgetter("tokens_per_s"), way)
        figures[f"client_us_per_token{end}"] = compute_median(attrgetter("client_us"), way)
        if ours:
            figures[f"server_us_per_token{end}"] = compute_median(attrgetter("server_us"), way)
            figures[f"busiest_us_per_token{end}"] = compute_median(attrgetter("busiest_us"), way)
    return figures
