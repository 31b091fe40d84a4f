"""Measure an SGLang server with a cache for a quarter of the demand, under several policies. Prints a JSON line last.

    make sglang-environment && python -m benchmarks.sglang_arbiter [--policies NAME,NAME]
                                                                   [--rounds 3] [--quick]

The benchmark starts the server with the settings of configs/tiny_sglang.toml and a tiny model of
random weights; --python and --port set its interpreter and port. --conservativeness is the
server's --schedule-conservativeness: the share of a request's remaining tokens that the server
reserves when it admits another request. benchmarks/support/sglang/small_cache_server.py
describes the trajectories.

The arbiter's policies alternate by round. Figures of each policy: `tokens_per_s` and
`tokens_per_cpu_s` (per CPU second of the server's processes), the medians of its rounds;
`retractions`, `evicted_tokens` and `recomputed_tokens`, the maxima.
`kv_lookahead_over_least_requests` is the median of the rounds' ratios of tokens/s; `by_cpu` is
the median of the ratios of tokens per CPU second. `differing_trajectories_share` is the share of
trajectories with tokens that differ between rounds.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple, get_args

import structlog
from msgspec.structs import replace

from asterism.analysis.simulation.workload import WorkloadShape, draw_workload
from asterism.configs.errors import UnusableInput
from asterism.configs.schema.machines import EngineConfig
from asterism.engine.contract import EngineFailure
from asterism.engine.sglang.server.compatibility import ServerRequirements
from asterism.engine.sglang.server.managed_server import SGLangServer
from asterism.policies.arbiter.arbiter import PolicyName
from benchmarks.support.benchmark_main import SEED, Flag, Options, benchmark_main, make_policies_flag
from benchmarks.support.process_usage import read_process_cpu_s
from benchmarks.support.sglang.small_cache_server import LONG, ScarceServerOutcome, find_longest
from benchmarks.support.sglang.small_cache_server import measure as measure_policy
from benchmarks.support.sglang.tiny_server import SERVER_FLAGS, configure_tiny_server
from benchmarks.support.two_engines import compute_differing_share

POLICIES: tuple[PolicyName, ...] = ("least_requests", "kv_lookahead")
MAX_RUNNING = 96
PAGE = EngineConfig().page_tokens
SHARE = 1 / 4  # share of the demand that the cache holds


class PolicyRound(NamedTuple):
    outcome: ScarceServerOutcome
    cpu_s: float  # CPU seconds of the server's processes

    @property
    def tokens_per_cpu_s(self) -> float:
        return self.outcome.generated_tokens / self.cpu_s


def build_server_config(options: Options, shape: WorkloadShape, folder: Path) -> ServerRequirements:
    """Configure a server with room for a quarter of the trajectories' final tokens."""
    work = draw_workload(shape, options.seed)
    arguments = ("--enable-deterministic-inference", f"--schedule-conservativeness={options.conservativeness}")
    longest = find_longest(work)
    kv_tokens = max(int(work.demand_tokens * SHARE), longest + PAGE)
    room = {"kv_tokens": kv_tokens, "max_running": MAX_RUNNING, "sequence_tokens": longest}
    return configure_tiny_server(options, folder, arguments, **room)


def read_cpu_s(server: SGLangServer) -> float:
    """Sum the processor seconds of the server's processes."""
    return sum(read_process_cpu_s(pid) for pid in server.list_processes())


async def compare(options: Options, shape: WorkloadShape) -> dict[str, object]:
    work, folder = draw_workload(shape, options.seed), options.scratch
    wants = build_server_config(options, shape, folder)
    print(
        f"{len(work.plans)} trajectories, {work.demand_tokens} tokens held at once at their ends as planned; "
        f"the server's cache holds {wants.engine.kv_tokens}",
        flush=True,
    )
    server = SGLangServer(wants, log=folder / "sglang.log", scratch=folder / "scratch")
    served = wants._replace(sglang=replace(wants.sglang, external_urls=(await server.start(),)))
    found: dict[PolicyName, list[PolicyRound]] = {policy: [] for policy in options.policies}
    try:
        for _ in range(options.rounds):
            for policy in options.policies:
                before = read_cpu_s(server)
                outcome = await measure_policy(served, shape, policy, options.seed)
                found[policy].append(PolicyRound(outcome, read_cpu_s(server) - before))
                print(_format_line(policy, found[policy][-1]), flush=True)
    finally:
        await server.close()
    return {"kv_tokens": wants.engine.kv_tokens, **_build_figures(found)}


def _build_figures(found: dict[PolicyName, list[PolicyRound]]) -> dict[str, object]:
    figures: dict[str, object] = {policy: _summarize_policy(rounds) for policy, rounds in found.items()}
    differing = compute_differing_share([each.outcome.digests for rounds in found.values() for each in rounds])
    figures["differing_trajectories_share"] = round(differing, 4)
    if {"kv_lookahead", "least_requests"} <= found.keys():
        pairs = list(zip(found["kv_lookahead"], found["least_requests"], strict=True))
        by_time = [ours.outcome.tokens_per_s / theirs.outcome.tokens_per_s for ours, theirs in pairs]
        by_cpu = [ours.tokens_per_cpu_s / theirs.tokens_per_cpu_s for ours, theirs in pairs]
        figures["kv_lookahead_over_least_requests"] = round(median(by_time), 3)
        figures["rounds"] = [round(ratio, 3) for ratio in by_time]
        figures["by_cpu"] = round(median(by_cpu), 3)
    return figures


def _summarize_policy(rounds: Sequence[PolicyRound]) -> dict[str, float]:
    outcomes = [each.outcome for each in rounds]
    return {
        "tokens_per_s": round(median(each.tokens_per_s for each in outcomes), 1),
        "tokens_per_cpu_s": round(median(each.tokens_per_cpu_s for each in rounds), 1),
        "retractions": max(each.retractions for each in outcomes),
        "generated_tokens": outcomes[0].generated_tokens,
        "decode_batch": round(median(each.decode_batch for each in outcomes), 1),
        "prefilled_tokens": max(each.prefilled_tokens for each in outcomes),
        "recomputed_tokens": max(each.recomputed_tokens for each in outcomes),
        "evicted_tokens": max(each.evicted_tokens for each in outcomes),
    }


def _format_line(policy: PolicyName, one: PolicyRound) -> str:
    outcome = one.outcome
    return (
        f"{policy:14} {outcome.makespan_s:6.2f} s {outcome.tokens_per_s:7.0f} tokens/s, {one.tokens_per_cpu_s:7.0f} per "
        f"CPU second, batch {outcome.decode_batch:4.1f}, {outcome.retractions:4} retractions, {outcome.prefilled_tokens:6} tokens prefilled, "
        f"{outcome.recomputed_tokens:6} of them again, {outcome.evicted_tokens:6} evicted, "
        f"lease wait {outcome.lease_wait_s:5.2f} s"
    )


async def measure(options: Options) -> dict[str, object]:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    shape = replace(LONG, prompts=LONG.prompts // 3) if options.quick else LONG
    figures = await compare(options, shape)
    return {**figures, "conservativeness": options.conservativeness, "seed": options.seed}


if __name__ == "__main__":
    benchmark_main(
        __doc__,
        measure,
        *SERVER_FLAGS,
        Flag("--conservativeness", 0.3, "SGLang has 1.0, and advises 0.3 if the cache does not fill"),
        make_policies_flag(POLICIES, get_args(PolicyName)),
        *(Flag("--rounds", 3, quick=1), SEED),
        quick="one round, with a third of the groups",
        expected=(UnusableInput, EngineFailure),
    )
