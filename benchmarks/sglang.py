"""Measure the overhead of the SGLang engine over a bare HTTP client, and 1,000 concurrent requests. Prints JSON last.

    make sglang-environment && python -m benchmarks.sglang [--quick]             # without a GPU
    python -m benchmarks.sglang --url http://127.0.0.1:30000 [--model FOLDER]    # a running server

A running server must have no other clients. Without --url the benchmark starts a server with the
settings of configs/tiny_sglang.toml and a tiny model of random weights; --python and --port set
its interpreter and port. --model is the local folder of the server's checkpoint, if it differs
from the server's path. --stream-interval is 256 by default, as in a run that reads only finished
turns; a run that updates weights within a turn uses 16.

64 requests are in flight; the next request starts when one ends. Three senders alternate by round:

    bare      the minimum of a client: aiohttp posts a prepared body, reads the answer in one
              piece, and extracts tokens and logprobs
    streamed  the same with a streamed answer, which the engine requires
    adapter   SGLangEngine, as a run drives it: it checks and encodes requests, joins and checks
              streams, and counts

The bodies differ only in `stream` and `rid`. `overhead_64` is 1 - tokens/s of the adapter /
tokens/s of the bare client in the same round: the median of the rounds, with its quartiles.
`overhead_64_streamed` compares the adapter with the streamed sender. Other load on the machine
makes both unreliable. The benchmark therefore also measures processor time:
`client_us_per_token` of this process and `server_us_per_token` of all processes of a server that
it starts. `overhead_64_all` is the overhead in the sum of both: the loss of tokens/s if client
and server share one core. `overhead_64_busiest` is the overhead in the busiest process: the loss
if each has a separate core.

The 1,000 concurrent requests follow. `lost` counts missing answers; `mixed_up` counts answers to
another request's prompt (benchmarks/support/sglang/concurrent_requests.py).
"""

import asyncio
import logging
import os
import resource
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import structlog
from msgspec.structs import replace

from asterism.bus.messages import WeightsPublished
from asterism.configs.errors import UnusableInput
from asterism.configs.schema.machines import EngineConfig
from asterism.configs.schema.sglang import SGLangConfig
from asterism.engine.contract import EngineFailure, GenerationRequest, WeightsRefused
from asterism.engine.model.hf_checkpoint import load_model_config
from asterism.engine.sglang.client import SGLangClient
from asterism.engine.sglang.generate import PendingGeneration, ServedWeights
from asterism.engine.sglang.http_api import ServerInfo
from asterism.engine.sglang.server.compatibility import ServerRequirements
from asterism.engine.sglang.server.external_server import ExternalServer
from asterism.engine.sglang.server.managed_server import SGLangServer
from asterism.engine.sglang.sglang_engine import LONG_STREAM_INTERVAL, SGLangEngine
from benchmarks.support.benchmark_main import SEED, Flag, Options, benchmark_main
from benchmarks.support.process_usage import read_process_cpu_s
from benchmarks.support.sglang.bare_client import BareClient
from benchmarks.support.sglang.concurrent_requests import measure_crowd
from benchmarks.support.sglang.overheads import WAYS, RoundCost, compute_overheads
from benchmarks.support.sglang.tiny_server import SERVER_FLAGS, configure_tiny_server

IN_FLIGHT = 64
CROWD = 1000
PROMPT_TOKENS = 32
MOST_TOKENS = 96  # most new tokens of a request
SEQUENCE_TOKENS = PROMPT_TOKENS + MOST_TOKENS + 1
ROOM_TOKENS = 32_768


class SglangBenchmarkSizes(NamedTuple):
    rounds: int
    requests: int  # requests per round
    fewest: int  # fewest new tokens of a request; unequal requests do not all end at once
    most: int
    crowd_tokens: int  # new tokens of each of the 1,000 requests


FULL, QUICK = SglangBenchmarkSizes(12, 192, 32, MOST_TOKENS, 24), SglangBenchmarkSizes(2, 64, 8, 24, 8)


class FixedWeights:
    """The weights of a server that never receives new weights."""

    def check(self, server: ServerInfo) -> None:
        """Accept any server."""

    async def update(self, client: SGLangClient, weights: WeightsPublished) -> None:
        raise WeightsRefused("the benchmark's server accepts no weights")

    async def close(self) -> None:
        """Do nothing: no connection is open."""


# ---------------------------------------------------------------- the server


class BenchmarkServer(NamedTuple):
    server: SGLangServer | ExternalServer
    model: Path
    version: int  # version of the server's weights


def prepare_own_server(options: Options) -> BenchmarkServer:
    """Prepare a server without --enable-deterministic-inference, which is slower and not needed here."""
    room = {"kv_tokens": ROOM_TOKENS, "max_running": IN_FLIGHT, "sequence_tokens": SEQUENCE_TOKENS}
    folder = options.scratch
    wanted = configure_tiny_server(options, folder, (), **room)
    return BenchmarkServer(SGLangServer(wanted, log=folder / "sglang.log", scratch=folder / "scratch"), wanted.model, 0)


async def attach_to_server(url: str, model: Path | None) -> BenchmarkServer:
    client = SGLangClient(url)
    try:
        path, named = (await client.get_server_info()).model_path, (await client.get_model_info()).weight_version
    finally:
        await client.close()
    model = model or Path(path)
    if not (model / "config.json").exists():
        raise UnusableInput(f"--model: there is no {model}/config.json; name the folder of the server's checkpoint")
    engine, sglang = EngineConfig(kind="sglang", kv_tokens=0), SGLangConfig(external_urls=(url.rstrip("/"),))
    version = int(named) if named.isdecimal() else 0
    return BenchmarkServer(ExternalServer(ServerRequirements(engine, sglang, model, SEQUENCE_TOKENS)), model, version)


# ---------------------------------------------------------------- requests


def draw_requests(
    draws: np.random.Generator, vocab_size: int, first_id: int, lengths: Sequence[int]
) -> list[GenerationRequest]:
    """Draw one request per length; the prompts share no prefix."""
    prompts = draws.integers(0, vocab_size, (len(lengths), PROMPT_TOKENS), dtype=np.int32)
    return [
        GenerationRequest(sequence_id, prompt, int(length), seed=sequence_id)
        for sequence_id, (prompt, length) in enumerate(zip(prompts, lengths, strict=True), first_id)
    ]


class RequestSenders:
    """Sends the same requests in three ways, IN_FLIGHT at a time."""

    def __init__(
        self, engine: SGLangEngine, server: SGLangServer | ExternalServer, bare: BareClient, stream_interval: int
    ) -> None:
        self._engine, self._bare, self._interval = engine, bare, stream_interval
        self._priority = server.info.enable_priority_scheduling
        self._processes = list(server.list_processes()) if isinstance(server, SGLangServer) else []
        self._rounds = count()

    async def adapter(self, requests: Sequence[GenerationRequest]) -> RoundCost:
        async def ask(request: GenerationRequest) -> int:
            generation = await self._engine.generate(request)
            self._engine.release_cache(request.sequence_id)
            return len(generation.token_ids)

        return await self._run_round([partial(ask, request) for request in requests])

    async def bare(self, requests: Sequence[GenerationRequest]) -> RoundCost:
        return await self._run_round(
            [partial(self._bare.generate, body) for body in self._build_bodies(requests, stream=False)]
        )

    async def streamed(self, requests: Sequence[GenerationRequest]) -> RoundCost:
        return await self._run_round(
            [partial(self._bare.generate_streamed, body) for body in self._build_bodies(requests, stream=True)]
        )

    def _build_bodies(self, requests: Sequence[GenerationRequest], *, stream: bool) -> list[bytes]:
        """Build request bodies with token ids."""
        name = f"bare-{os.getpid()}-{next(self._rounds)}"
        turns = [PendingGeneration(request, f"{name}-{request.sequence_id}", self._interval) for request in requests]
        sent = [
            turn.build_request(turn.build_prompt(), ServedWeights(0), dp_rank=None, use_priority=self._priority)
            for turn in turns
        ]
        return [msgspec.json.encode(replace(request, stream=stream)) for request in sent]

    async def _run_round(self, asks: Sequence[Callable[[], Awaitable[int]]]) -> RoundCost:
        """Run one round of a sender."""
        left = iter(asks)

        async def one_after_the_other() -> int:
            return sum([await ask() for ask in left])

        server_s, client_s, began = self._read_server_cpu_s(), time.process_time(), time.perf_counter()
        tokens = sum(await asyncio.gather(*(one_after_the_other() for _ in range(IN_FLIGHT))))
        seconds, client_s = time.perf_counter() - began, time.process_time() - client_s
        server_s = [now - before for now, before in zip(self._read_server_cpu_s(), server_s, strict=True)]
        return RoundCost(tokens, seconds, client_s, server_s)

    def _read_server_cpu_s(self) -> list[float]:
        return [read_process_cpu_s(pid) for pid in self._processes]


# ---------------------------------------------------------------- measurements


async def run_rounds(
    senders: RequestSenders, requests: Sequence[GenerationRequest], rounds: int
) -> list[Mapping[str, RoundCost]]:
    """Return the rounds' costs by sender. An uncounted first round fills caches and opens connections."""
    ways = {"adapter": senders.adapter, "bare": senders.bare, "streamed": senders.streamed}
    spent: list[Mapping[str, RoundCost]] = []
    for number in range(rounds + 1):
        first = number % len(WAYS)
        done = {way: await ways[way](requests) for way in (*WAYS[first:], *WAYS[:first])}
        assert len({each.tokens for each in done.values()}) == 1, "the senders had different numbers of tokens"
        print("  ".join(f"{way} {done[way].tokens_per_s:6.0f} tokens/s" for way in WAYS), flush=True)
        spent.append(done)
    return spent[1:]


async def measure_server(
    served: BenchmarkServer, sizes: SglangBenchmarkSizes, stream_interval: int, seed: int
) -> dict[str, float]:
    engine = SGLangEngine(
        served.server,
        FixedWeights(),
        model=served.model,
        sequence_tokens=SEQUENCE_TOKENS,
        version=served.version,
        max_pending=CROWD,
        stream_interval=stream_interval,
        connect=partial(SGLangClient, max_in_flight=CROWD),
    )
    await engine.start()
    bare = BareClient(served.server.url)
    try:
        vocab_size = load_model_config(served.model).vocab_size
        draws = np.random.default_rng(seed)
        lengths = draws.integers(sizes.fewest, sizes.most, sizes.requests, endpoint=True).tolist()
        requests = draw_requests(draws, vocab_size, 0, lengths)
        spent = await run_rounds(RequestSenders(engine, served.server, bare, stream_interval), requests, sizes.rounds)
        many = draw_requests(draws, vocab_size, sizes.requests, [sizes.crowd_tokens] * CROWD)
        return compute_overheads(spent) | await measure_crowd(engine, bare, many)
    finally:
        await bare.close()
        await engine.close()


async def measure(options: Options) -> dict[str, float]:
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    served = await attach_to_server(options.url, options.model) if options.url else prepare_own_server(options)
    sizes = (QUICK if options.quick else FULL)._replace(rounds=options.rounds)
    return await measure_server(served, sizes, options.stream_interval, options.seed)


if __name__ == "__main__":
    benchmark_main(
        __doc__,
        measure,
        Flag("--url", text="URL of a running server; default: start one"),
        Flag("--model", kind=Path, text="local folder of the server's checkpoint"),
        *(*SERVER_FLAGS, SEED),
        Flag("--stream-interval", LONG_STREAM_INTERVAL, "tokens per piece of a stream"),
        Flag("--rounds", FULL.rounds, quick=QUICK.rounds, least=2),
        quick="short rounds, and 8 tokens of each of the 1,000",
        shows_table=True,
        expected=(UnusableInput, EngineFailure),
    )
