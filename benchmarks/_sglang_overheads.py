"""What the rounds of benchmarks.sglang took, and what the engine costs beside the bare clients: in time, and in processor time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from statistics import median, quantiles
from typing import NamedTuple

WAYS = ("adapter", "bare", "streamed")


class Spent(NamedTuple):
    """On one round."""

    tokens: int
    seconds: float
    client_s: float  # of processor time, of this process
    server_s: Sequence[float]  # of each of the server's; none where they are not ours

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


def overheads(spent: Sequence[Mapping[str, Spent]]) -> dict[str, float]:
    def of_rounds(figure: Callable[[Spent], float], way: str) -> float:
        return median(figure(done[way]) for done in spent)

    def over(way: str, cost: Callable[[Spent], float]) -> list[float]:
        return [1 - cost(done[way]) / cost(done["adapter"]) for done in spent]

    low, middle, high = quantiles(over("bare", attrgetter("us")), n=4)
    figures = {
        "overhead_64": middle,
        "overhead_64_low": low,
        "overhead_64_high": high,
        "overhead_64_streamed": median(over("streamed", attrgetter("us"))),
    }
    ours = bool(spent[0]["bare"].server_s)
    if ours:
        for of, cost in (("all", attrgetter("all_us")), ("busiest", attrgetter("busiest_us"))):
            figures[f"overhead_64_{of}"] = median(over("bare", cost))
            figures[f"overhead_64_streamed_{of}"] = median(over("streamed", cost))
    for way in WAYS:
        end = "" if way == "adapter" else f"_{way}"
        figures[f"tokens_per_s{end}"] = of_rounds(attrgetter("tokens_per_s"), way)
        figures[f"client_us_per_token{end}"] = of_rounds(attrgetter("client_us"), way)
        if ours:
            figures[f"server_us_per_token{end}"] = of_rounds(attrgetter("server_us"), way)
            figures[f"busiest_us_per_token{end}"] = of_rounds(attrgetter("busiest_us"), way)
    return figures
