"""New weights for a real SGLang server, each way: what it then holds, and what its cache then finds."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from bus.messages import WeightsPublished
from engine.checkpoint import save_model
from engine.contract import WeightsRefused
from engine.sglang.client import SGLangClient
from engine.sglang.memory import ServerMemory
from engine.sglang.protocol import GenerateAnswer, GenerateRequest, SamplingParams
from engine.sglang.weights import WeightsWay, extra_key
from engine.sglang.weights.checksums import Checksums
from engine.sglang.weights.disk import DiskWeights
from engine.sglang.weights.group import GroupWeights
from engine.sglang.weights.published import PublishedLayout
from engine.sglang.weights.tensor import TensorWeights
from engine.weights import WeightsPublisher
from tests.engine.tiny_models import small_config, small_model, write_tokenizer
from tests.sglang.environment import PYTHON

pytestmark = [pytest.mark.slow, pytest.mark.sglang, pytest.mark.timeout(1800)]

SHIMS = Path(__file__).parent / "shims"
PORT = 31_200
VOCABULARY = 280
PROMPT = np.random.default_rng(0).integers(0, VOCABULARY, 100).tolist()
WAYS = ("disk", "tensor", "group")
BUCKET = 32 * 2**10  # several for the model
FLAGS = (
    *(
        "--device",
        "cpu",
        "--attention-backend",
        "torch_native",
        "--sampling-backend",
        "pytorch",
        "--disable-cuda-graph",
    ),
    *("--disable-overlap-schedule", "--grammar-backend", "none", "--skip-server-warmup", "--sleep-on-idle"),
    *("--max-total-tokens", "8192", "--max-running-requests", "16", "--context-length", "2048"),
)


class Served(NamedTuple):
    """A server that was started from a checkpoint with `parameters`, and what it was like before any update."""

    loop: asyncio.Runner
    client: SGLangClient
    ways: dict[str, WeightsWay]
    publisher: WeightsPublisher
    parameters: dict[str, Tensor]
    checksums: dict[str, str]
    logprobs: list[float]  # of the tokens that follow PROMPT greedily

    def published(self, version: int, *, noise: float = 0.0) -> WeightsPublished:
        generator = torch.Generator().manual_seed(version)
        noisy = {
            name: parameter + noise * torch.randn(parameter.shape, generator=generator)
            for name, parameter in self.parameters.items()
        }
        return self.publisher.publish(version, noisy)


@pytest.fixture(
    scope="module", params=[("float32", True), ("bfloat16", False)], ids=["float32-tied", "bfloat16-untied"]
)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    dtype, tied = request.param
    folder = tmp_path_factory.mktemp(dtype)
    write_tokenizer(folder / "tokenizer", VOCABULARY)
    model = small_model(config=small_config(vocab_size=VOCABULARY, tie_word_embeddings=tied))
    save_model(folder / "model", model.config, model.state_dict(), folder / "tokenizer")
    layout = PublishedLayout(folder / "model", getattr(torch, dtype))
    checksums = Checksums(folder / "checksums", "sglang-0")
    ways = {
        "disk": DiskWeights(layout, checksums, folder / "for_server"),
        "tensor": TensorWeights(layout, checksums, BUCKET),
        "group": GroupWeights(layout, checksums, BUCKET, timeout_s=60.0),
    }
    process = start(folder, dtype)
    try:
        with asyncio.Runner() as loop:
            client = SGLangClient(f"http://127.0.0.1:{PORT}")
            loop.run(until_ready(client, process))
            began_with = dict(loop.run(client.checksums())[0].checksums)
            logprobs = logprobs_of(loop.run(client.generate(asked(PROMPT, "before"))))
            publisher = WeightsPublisher(folder / "published")
            yield Served(loop, client, ways, publisher, dict(model.named_parameters()), began_with, logprobs)
            for way in ways.values():
                loop.run(way.close())
            loop.run(client.close())
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def start(folder: Path, dtype: str) -> subprocess.Popen[bytes]:
    command = [PYTHON, "-m", "sglang.launch_server", "--model-path", folder / "model", "--dtype", dtype, *FLAGS]
    environment = os.environ | {"PYTHONPATH": str(SHIMS), "OMP_NUM_THREADS": "1"}
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            [*map(str, command), "--host", "127.0.0.1", "--port", str(PORT)],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


async def until_ready(client: SGLangClient, process: subprocess.Popen[bytes]) -> None:
    while not await client.ready():
        assert process.poll() is None, "the server has ended"
        await asyncio.sleep(0.5)


def asked(ids: list[int], key: str, tokens: int = 4, *, stream: bool = False) -> GenerateRequest:
    return GenerateRequest(
        rid=os.urandom(8).hex(),
        input_ids=ids,
        sampling_params=SamplingParams(max_new_tokens=tokens, temperature=0.0, ignore_eos=True),
        return_logprob=True,
        logprob_start_len=-1,
        stream=stream,
        extra_key=key,
    )


def logprobs_of(answer: GenerateAnswer) -> list[float]:
    return [logprob for logprob, _, _ in answer.meta_info.output_token_logprobs if logprob is not None]


@pytest.mark.parametrize("way", WAYS)
def test_the_server_holds_what_one_that_started_from_these_weights_holds(served: Served, way: str) -> None:
    first = 10 + 2 * WAYS.index(way)
    served.loop.run(served.ways[way].update(served.client, served.published(first, noise=0.1)))
    changed = served.loop.run(served.client.checksums())[0].checksums
    assert all(changed[name] != checksum for name, checksum in served.checksums.items() if "cos_sin" not in name)
    served.loop.run(served.ways[way].update(served.client, served.published(first + 1)))
    assert served.loop.run(served.client.checksums())[0].checksums == served.checksums
    assert served.loop.run(served.client.model_info()).weight_version == str(first + 1)


@pytest.mark.parametrize("way", WAYS)
def test_a_prompt_cached_under_old_weights_is_computed_anew_while_requests_are_held(served: Served, way: str) -> None:
    first = 20 + 2 * WAYS.index(way)
    old, new = served.published(first, noise=0.1), served.published(first + 1)

    async def run() -> tuple[GenerateAnswer, GenerateAnswer, GenerateAnswer]:
        client, update = served.client, served.ways[way].update
        await update(client, old)
        await client.generate(asked(PROMPT, extra_key(old)))
        async with aclosing(client.generate_streamed(asked(PROMPT[::-1], extra_key(old), 1000, stream=True))) as held:
            await anext(held)
            await update(client, new)
            assert not await flushed_while_held(client)
            last = [answer async for answer in held][-1]
        # Alone again: what shares a batch is rounded otherwise.
        stale = await client.generate(asked(PROMPT, extra_key(old)))
        anew = await client.generate(asked(PROMPT, extra_key(new)))
        return last, stale, anew

    last, stale, anew = served.loop.run(run())
    assert [span.version for span in last.meta_info.weight_versions] == [str(first), str(first + 1)]
    assert stale.meta_info.cached_tokens == len(PROMPT) - 1
    assert anew.meta_info.cached_tokens == 0
    assert logprobs_of(stale) != served.logprobs
    assert logprobs_of(anew) == served.logprobs


async def flushed_while_held(client: SGLangClient) -> bool:
    await client.pause("in_place")
    try:
        return await client.flush_cache()
    finally:
        await client.resume()


@pytest.mark.parametrize("way", WAYS)
def test_where_no_request_is_held_the_cache_is_dropped(served: Served, way: str) -> None:
    first = 30 + 2 * WAYS.index(way)
    old, new = served.published(first, noise=0.1), served.published(first + 1)

    async def run() -> GenerateAnswer:
        for weights in (old, new):
            await served.ways[way].update(served.client, weights)
            answer = await served.client.generate(asked(PROMPT, extra_key(old)))
        return answer

    answer = served.loop.run(run())
    assert answer.meta_info.cached_tokens == 0
    assert logprobs_of(answer) == served.logprobs


@pytest.mark.parametrize("way", WAYS)
def test_weights_come_when_there_is_memory_for_them_and_before_that_of_the_cache(served: Served, way: str) -> None:
    """A server on a CPU keeps what it is told to give back: only the order is tested."""
    first, memory = 50 + 2 * WAYS.index(way), ServerMemory()
    old, new = served.published(first, noise=0.1), served.published(first + 1)

    async def run() -> GenerateAnswer:
        client, update = served.client, served.ways[way].update
        await update(client, old)
        await client.generate(asked(PROMPT, extra_key(old)))
        await memory.release(client)
        await memory.resume(client, "weights")
        await update(client, new)
        await memory.resume(client, "kv_cache")
        return await client.generate(asked(PROMPT, extra_key(new)))

    answer = served.loop.run(run())
    assert {span.version for span in answer.meta_info.weight_versions} == {str(first + 1)}
    assert logprobs_of(answer) == served.logprobs


def test_a_server_without_the_group_goes_on_as_it_was_and_gets_another(served: Served) -> None:
    group = served.ways["group"]
    assert isinstance(group, GroupWeights)

    async def run() -> None:
        await group.update(served.client, served.published(40))
        name = group.group_name
        assert name is not None
        await served.client.destroy_group(name)
        with pytest.raises(WeightsRefused, match=name):
            await group.update(served.client, served.published(41, noise=0.1))
        assert (await served.client.model_info()).weight_version == "40"
        assert logprobs_of(await served.client.generate(asked(PROMPT, "41"))) == served.logprobs
        await group.update(served.client, served.published(42, noise=0.1))
        assert (await served.client.model_info()).weight_version == "42"

    served.loop.run(run())
