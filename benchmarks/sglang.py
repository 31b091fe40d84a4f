"""What the SGLang engine costs over a bare HTTP client of the same server, and 1,000 requests in flight at once. JSON last.

    make sglang-environment && python -m benchmarks.sglang [--quick]       # on a machine without a GPU
    python -m benchmarks.sglang --url http://127.0.0.1:30000 [--model FOLDER]    # a server that runs, and serves nobody else

Without --url a server is started as configs/tiny_sglang.toml has it, with the tiny model of random weights; --python and
--port say with which interpreter and where. --model is the folder of the server's checkpoint, if that is not to be read
under the server's own path. --stream-interval is 256, as of a run that looks at turns when they have ended; 16 is what one takes
that gives new weights in their middle.

64 requests are in flight, each followed by the next as it ends. Three ways to send them take turns, a round each:

    bare      what any client needs: aiohttp posts a body that has been made before, reads the answer in one piece, and
              takes tokens and logprobs out of it
    streamed  the same with the pieces of a stream, which the engine cannot do without
    adapter   SGLangEngine, as a run drives it: requests checked and encoded, streams put together and checked, counted

Bodies are the same but for `stream` and `rid`. `overhead_64` is 1 - tokens/s of the adapter / tokens/s of the bare client in the
same round, the median of the rounds, with its quartiles; `overhead_64_streamed` the same beside the bare stream. Where the
machine is busy with other things these say little. So processor time is measured too, of this process (`client_us_per_token`)
and of a server that was started here (`server_us_per_token`, of all of its processes). `..._all` are the overheads in the sum
of both: what tokens/s would lose if client and server had one core together. `..._busiest` are those in the process that has
most to do: what they would lose if each had a core of its own.

Then 1,000 requests at once. What does not come is `lost`; `mixed_up` is what is not the answer to its own prompt:
benchmarks/_sglang_crowd.py.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import resource
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import structlog
import uvloop
from msgspec.structs import replace

from benchmarks._bare_sglang import BareClient
from benchmarks._sglang_crowd import crowd
from benchmarks._sglang_overheads import WAYS, Spent, overheads
from benchmarks._tiny_server import add_options, tiny_server
from benchmarks.weights import cpu_s
from bus.messages import WeightsPublished
from configs.errors import UnusableInput
from configs.schema import Engine
from configs.sglang import Sglang
from engine.contract import EngineFailure, GenerationRequest, WeightsRefused
from engine.sglang.attached import AttachedServer
from engine.sglang.client import SGLangClient
from engine.sglang.engine import SELDOM, SGLangEngine
from engine.sglang.fit import Wanted
from engine.sglang.protocol import ServerInfo
from engine.sglang.server import SGLangServer
from engine.sglang.turns import Turn
from engine.sglang.validation import limits_of

IN_FLIGHT = 64
CROWD = 1000
PROMPT_TOKENS = 32
MOST_TOKENS = 96  # new ones of a request
SEQUENCE_TOKENS = PROMPT_TOKENS + MOST_TOKENS + 1
ROOM_TOKENS = 32_768


class Sizes(NamedTuple):
    rounds: int
    requests: int  # of a round
    fewest: int  # new tokens of each: so many or more, that not all end at once
    most: int
    crowd_tokens: int  # new ones of each of the crowd's requests


WHOLE, QUICK = Sizes(12, 192, 32, MOST_TOKENS, 24), Sizes(2, 64, 8, 24, 8)


class WeightsAsTheyAre:
    """The way of new weights to a server that gets none."""

    def check(self, server: ServerInfo) -> None:
        """Any will do."""

    async def update(self, client: SGLangClient, weights: WeightsPublished) -> None:
        raise WeightsRefused("this server's weights stay")

    async def close(self) -> None:
        """Nothing is open."""


# ---------------------------------------------------------------- the server


class Served(NamedTuple):
    server: SGLangServer | AttachedServer
    model: Path
    version: int  # of the weights that it has


def of_its_own(options: argparse.Namespace, folder: Path) -> Served:
    """Without --enable-deterministic-inference, which is slower, and not needed here."""
    room = {"kv_tokens": ROOM_TOKENS, "max_running": IN_FLIGHT, "sequence_tokens": SEQUENCE_TOKENS}
    wanted = tiny_server(options, folder, (), **room)
    return Served(SGLangServer(wanted, log=folder / "sglang.log", scratch=folder / "scratch"), wanted.model, 0)


async def of_somebody(url: str, model: Path | None) -> Served:
    client = SGLangClient(url)
    try:
        path, named = (await client.server_info()).model_path, (await client.model_info()).weight_version
    finally:
        await client.close()
    model = model or Path(path)
    if not (model / "config.json").exists():
        raise UnusableInput(f"--model: there is no {model}/config.json; name the folder of the server's checkpoint")
    engine, sglang = Engine(kind="sglang", kv_tokens=0), Sglang(attach=(url.rstrip("/"),))
    version = int(named) if named.isdecimal() else 0
    return Served(AttachedServer(Wanted(engine, sglang, model, SEQUENCE_TOKENS)), model, version)


# ---------------------------------------------------------------- what is asked


def drawn(
    draws: np.random.Generator, vocab_size: int, first_id: int, lengths: Sequence[int]
) -> list[GenerationRequest]:
    """One for each of the lengths, with prompts that have nothing in common."""
    prompts = draws.integers(0, vocab_size, (len(lengths), PROMPT_TOKENS), dtype=np.int32)
    return [
        GenerationRequest(sequence_id, prompt, int(length), seed=sequence_id)
        for sequence_id, (prompt, length) in enumerate(zip(prompts, lengths, strict=True), first_id)
    ]


class Ways:
    """To send the same requests, IN_FLIGHT of them at a time."""

    def __init__(
        self, engine: SGLangEngine, server: SGLangServer | AttachedServer, bare: BareClient, stream_interval: int
    ) -> None:
        self._engine, self._bare, self._interval = engine, bare, stream_interval
        self._priority = server.info.enable_priority_scheduling
        self._processes = list(server.processes()) if isinstance(server, SGLangServer) else []
        self._rounds = count()

    async def adapter(self, requests: Sequence[GenerationRequest]) -> Spent:
        async def ask(request: GenerationRequest) -> int:
            generation = await self._engine.generate(request)
            self._engine.forget(request.sequence_id)
            return len(generation.token_ids)

        return await self._sent([partial(ask, request) for request in requests])

    async def bare(self, requests: Sequence[GenerationRequest]) -> Spent:
        return await self._sent([partial(self._bare.whole, body) for body in self._bodies(requests, stream=False)])

    async def streamed(self, requests: Sequence[GenerationRequest]) -> Spent:
        return await self._sent([partial(self._bare.streamed, body) for body in self._bodies(requests, stream=True)])

    def _bodies(self, requests: Sequence[GenerationRequest], *, stream: bool) -> list[bytes]:
        """The engine's."""
        name = f"bare-{os.getpid()}-{next(self._rounds)}"
        turns = [Turn(request, f"{name}-{request.sequence_id}", self._interval) for request in requests]
        sent = [
            turn.request_of_part(turn.prompt(), extra_key=None, rank=None, priority=self._priority) for turn in turns
        ]
        return [msgspec.json.encode(replace(request, stream=stream)) for request in sent]

    async def _sent(self, asks: Sequence[Callable[[], Awaitable[int]]]) -> Spent:
        """Each says how many tokens have come."""
        left = iter(asks)

        async def one_after_the_other() -> int:
            return sum([await ask() for ask in left])

        server_s, client_s, began = self._server_s(), time.process_time(), time.perf_counter()
        tokens = sum(await asyncio.gather(*(one_after_the_other() for _ in range(IN_FLIGHT))))
        seconds, client_s = time.perf_counter() - began, time.process_time() - client_s
        server_s = [now - before for now, before in zip(self._server_s(), server_s, strict=True)]
        return Spent(tokens, seconds, client_s, server_s)

    def _server_s(self) -> list[float]:
        return [cpu_s(pid) for pid in self._processes]


# ---------------------------------------------------------------- what is measured


async def rounds_of(ways: Ways, requests: Sequence[GenerationRequest], rounds: int) -> list[Mapping[str, Spent]]:
    """By way. One more is not counted: caches fill, connections open."""
    spent: list[Mapping[str, Spent]] = []
    for number in range(rounds + 1):
        first = number % len(WAYS)
        done = {way: await getattr(ways, way)(requests) for way in (*WAYS[first:], *WAYS[:first])}
        assert len({each.tokens for each in done.values()}) == 1, "the ways had not as many tokens"
        print("  ".join(f"{way} {done[way].tokens_per_s:6.0f} tokens/s" for way in WAYS), flush=True)
        spent.append(done)
    return spent[1:]


async def measure(served: Served, sizes: Sizes, stream_interval: int, seed: int) -> dict[str, float]:
    engine = SGLangEngine(
        served.server,
        WeightsAsTheyAre(),
        model=served.model,
        sequence_tokens=SEQUENCE_TOKENS,
        version=served.version,
        max_pending=CROWD,
        stream_interval=stream_interval,
        connect=partial(SGLangClient, connections=CROWD),
    )
    await engine.start()
    bare = BareClient(served.server.url)
    try:
        vocab_size = limits_of(served.model, SEQUENCE_TOKENS, served.server.info).vocab_size
        draws = np.random.default_rng(seed)
        lengths = draws.integers(sizes.fewest, sizes.most, sizes.requests, endpoint=True).tolist()
        requests = drawn(draws, vocab_size, 0, lengths)
        spent = await rounds_of(Ways(engine, served.server, bare, stream_interval), requests, sizes.rounds)
        many = drawn(draws, vocab_size, sizes.requests, [sizes.crowd_tokens] * CROWD)
        return overheads(spent) | await crowd(engine, bare, many)
    finally:
        await bare.close()
        await engine.close()


async def run(options: argparse.Namespace, folder: Path) -> dict[str, float]:
    served = await of_somebody(options.url, options.model) if options.url else of_its_own(options, folder)
    sizes = QUICK if options.quick else WHOLE
    return await measure(
        served, sizes._replace(rounds=options.rounds or sizes.rounds), options.stream_interval, options.seed
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="of a server that runs; without it one is started")
    parser.add_argument("--model", type=Path, help="folder of that server's checkpoint, as it is to be read from here")
    add_options(parser)
    parser.add_argument(
        "--stream-interval", type=int, default=SELDOM, help="tokens from one piece of a stream to the next"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, help="12, or 2 with --quick; no less than 2")
    parser.add_argument("--quick", action="store_true", help="short rounds, and 8 tokens of each of the 1,000")
    options = parser.parse_args()
    if options.rounds is not None and options.rounds < 2:
        parser.error("--rounds: no less than 2")
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    with tempfile.TemporaryDirectory() as name:
        try:
            figures = uvloop.run(run(options, Path(name)))
        except (UnusableInput, EngineFailure) as error:
            sys.exit(str(error))
    for key, value in figures.items():
        print(f"{key:32} {value:14,.4g}")
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
