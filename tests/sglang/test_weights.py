"""Weight updates of a real SGLang server with each transport: the server's checksums and cache."""

import asyncio
import os
import pickle
from collections.abc import Iterator, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from asterism.bus.messages import WeightsPublished
from asterism.configs.choices.weight_transfers import WEIGHT_TRANSFERS
from asterism.configs.schema.machines import EngineConfig
from asterism.configs.schema.run_config import RunConfig
from asterism.engine.contract import EngineFailure, WeightsRefused
from asterism.engine.learner.distributed import RankGroup
from asterism.engine.learner.trainer import Trainer
from asterism.engine.model.hf_checkpoint import load_model
from asterism.engine.sglang.client import SGLangClient
from asterism.engine.sglang.http_api import GenerateRequest, GenerateResponse, SamplingParams
from asterism.engine.sglang.server.compatibility import ServerRequirements
from asterism.engine.sglang.server.managed_server import SGLangServer
from asterism.engine.sglang.weights import TransportParts, WeightTransport, build_extra_key, build_transport
from asterism.engine.sglang.weights.checksums import ChecksumRegistry
from asterism.engine.sglang.weights.server_parameters import compute_expected_checksums
from asterism.engine.sglang.weights.transports import ProcessGroupTransport
from asterism.engine.weight_transfer.weight_layout import load_layout
from tests.engine.learner.learner_settings import make_learner
from tests.engine.tiny_models import save_small_model, small_config, small_model
from tests.engine.whole_publisher import WholePublisher
from tests.sglang.serving import sglang

pytestmark = [pytest.mark.slow, pytest.mark.sglang, pytest.mark.timeout(1800)]

PORT = 31_200
SEQUENCE_TOKENS = 2000
VOCABULARY = 280
PROMPT = np.random.default_rng(0).integers(0, VOCABULARY, 100).tolist()
TRANSPORTS = ("disk", "tensor", "group", "ipc")
BUCKET = 32 * 2**10  # bytes; the model needs several buckets
EMBEDDING = "model.embed_tokens.weight"


class Served(NamedTuple):
    """A server started from a checkpoint with `parameters`, and its state before any update."""

    client: SGLangClient
    transports: Mapping[str, WeightTransport]
    publisher: WholePublisher
    parameters: dict[str, Tensor]
    checksums: dict[str, str]
    logprobs: list[float]  # log probabilities of the greedy tokens after PROMPT

    def publish(self, version: int, *, noise: float = 0.0) -> WeightsPublished:
        generator = torch.Generator().manual_seed(version)
        noisy = {
            name: parameter + noise * torch.randn(parameter.shape, generator=generator)
            for name, parameter in self.parameters.items()
        }
        return self.publisher.publish(version, noisy)


@pytest.fixture(
    scope="module", params=[("float32", True), ("bfloat16", False)], ids=["float32-tied", "bfloat16-untied"]
)
def served(
    request: pytest.FixtureRequest, loop: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    dtype, tied = request.param
    folder = tmp_path_factory.mktemp(dtype)
    model = small_model(config=small_config(vocab_size=VOCABULARY, tie_word_embeddings=tied))
    exported = export_in_shards(save_small_model(folder, model), folder / "step_000000", dtype)
    layout = load_layout(exported, getattr(torch, dtype))
    checksums = ChecksumRegistry(folder / "checksums", "sglang-0")
    parts = TransportParts(layout, checksums, folder / "for_server", BUCKET, timeout_s=60.0)
    transports = {name: build_transport(name, parts) for name in WEIGHT_TRANSFERS}
    engine = EngineConfig(kind="sglang", kv_tokens=8192, max_running=16, page_tokens=1, dtype=dtype)
    requirements = ServerRequirements(engine, sglang(PORT), exported, SEQUENCE_TOKENS)
    server = SGLangServer(requirements, log=folder / "log", scratch=folder / "scratch")
    client = SGLangClient(loop.run(server.start()))
    try:
        initial_checksums = dict(loop.run(client.compute_checksums())[0].checksums)
        logprobs = get_logprobs(loop.run(client.generate(make_request(PROMPT, "before"))))
        publisher = WholePublisher(folder / "published", getattr(torch, dtype))
        yield Served(client, transports, publisher, dict(model.named_parameters()), initial_checksums, logprobs)
    finally:
        for closed in (*transports.values(), client, server):
            loop.run(closed.close())


def export_in_shards(folder: Path, checkpoint: Path, dtype: Literal["float32", "bfloat16"]) -> Path:
    """Export the model in shards, like the learner's export of a large model."""
    run = RunConfig(name="export", learner=make_learner(export_dtype=dtype))
    trainer = Trainer(load_model(folder), run, RankGroup())
    trainer.save(checkpoint, folder, max_shard_bytes=64 * 2**10)
    trainer.finish_saving()
    assert len(list(checkpoint.glob("model-*.safetensors"))) > 1
    return checkpoint


def make_request(ids: list[int], key: str, tokens: int = 4, *, stream: bool = False) -> GenerateRequest:
    return GenerateRequest(
        rid=os.urandom(8).hex(),
        input_ids=ids,
        sampling_params=SamplingParams(max_new_tokens=tokens, temperature=0.0, ignore_eos=True),
        return_logprob=True,
        logprob_start_len=-1,
        stream=stream,
        extra_key=key,
    )


def get_logprobs(answer: GenerateResponse) -> list[float]:
    return [logprob for logprob, _, _ in answer.meta_info.output_token_logprobs if logprob is not None]


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_an_update_gives_the_same_checksums_as_a_start_from_these_weights(served: Served, transport: str) -> None:
    first = 10 + 2 * TRANSPORTS.index(transport)
    await served.transports[transport].update(served.client, served.publish(first, noise=0.1))
    changed = (await served.client.compute_checksums())[0].checksums
    assert all(changed[name] != checksum for name, checksum in served.checksums.items() if "cos_sin" not in name)
    await served.transports[transport].update(served.client, served.publish(first + 1))
    assert (await served.client.compute_checksums())[0].checksums == served.checksums
    assert (await served.client.get_model_info()).weight_version == str(first + 1)


async def test_the_error_names_a_parameter_that_a_transport_changes(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    update_from_tensor, update = SGLangClient.update_from_tensor, served.transports["tensor"].update

    async def damage(client: SGLangClient, payloads: list[bytes], version: str | None) -> None:
        bucket: list[tuple[str, Tensor]] = pickle.loads(payloads[0])
        damaged = [(name, 2 * parameter if name == EMBEDDING else parameter) for name, parameter in bucket]
        await update_from_tensor(client, [pickle.dumps(damaged)], version)

    with monkeypatch.context() as patch:
        patch.setattr(SGLangClient, "update_from_tensor", damage)
        message = f"sglang-0 holds another {EMBEDDING} on rank 0 than the learner published in version 16"
        with pytest.raises(EngineFailure, match=message):
            await update(served.client, served.publish(16))
    await update(served.client, served.publish(17))
    assert (await served.client.compute_checksums())[0].checksums == served.checksums


async def test_all_parameters_with_a_known_checksum_form_are_compared(served: Served) -> None:
    """In bfloat16 only the embedding and norms are compared, because servers on other CPUs can pack matrices."""
    server = await served.client.get_server_info()
    dtype = getattr(torch, server.dtype)
    published = {name: parameter.to(dtype) for name, parameter in served.parameters.items()}
    expected = compute_expected_checksums(published, server, 0, 0)
    held = {name: checksum for name, checksum in served.checksums.items() if "cos_sin" not in name}
    packed = ("_proj.weight", "lm_head.weight")
    assert expected == {
        name: checksum for name, checksum in held.items() if dtype == torch.float32 or not name.endswith(packed)
    }


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_a_prompt_is_recomputed_if_its_cache_has_old_weights(served: Served, transport: str) -> None:
    first = 20 + 2 * TRANSPORTS.index(transport)
    old, new = served.publish(first, noise=0.1), served.publish(first + 1)

    client, update = served.client, served.transports[transport].update
    await update(client, old)
    await client.generate(make_request(PROMPT, build_extra_key(old)))
    async with aclosing(
        client.generate_streamed(make_request(PROMPT[::-1], build_extra_key(old), 1000, stream=True))
    ) as running:
        await anext(running)
        await update(client, new)
        assert not await flush_while_paused(client)
        last = [answer async for answer in running][-1]
    # Requests run one at a time, because batching changes the rounding.
    stale = await client.generate(make_request(PROMPT, build_extra_key(old)))
    fresh = await client.generate(make_request(PROMPT, build_extra_key(new)))
    assert [span.version for span in last.meta_info.weight_versions] == [str(first), str(first + 1)]
    assert stale.meta_info.cached_tokens == len(PROMPT) - 1
    assert fresh.meta_info.cached_tokens == 0
    assert get_logprobs(stale) != served.logprobs
    assert get_logprobs(fresh) == served.logprobs


async def flush_while_paused(client: SGLangClient) -> bool:
    await client.pause("in_place")
    try:
        return await client.flush_cache()
    finally:
        await client.resume()


@pytest.mark.parametrize("transport", TRANSPORTS)
async def test_an_update_without_paused_requests_flushes_the_cache(served: Served, transport: str) -> None:
    first = 30 + 2 * TRANSPORTS.index(transport)
    old, new = served.publish(first, noise=0.1), served.publish(first + 1)

    for weights in (old, new):
        await served.transports[transport].update(served.client, weights)
        answer = await served.client.generate(make_request(PROMPT, build_extra_key(old)))
        # The server removes a request only after it has answered, but before it answers the next request.
        await served.client.get_server_info()
    assert answer.meta_info.cached_tokens == 0
    assert get_logprobs(answer) == served.logprobs


async def test_an_update_with_a_lost_group_is_refused_and_the_next_one_creates_a_group(served: Served) -> None:
    group = served.transports["group"]
    assert isinstance(group, ProcessGroupTransport)

    await group.update(served.client, served.publish(40))
    assert group.group is not None
    name = group.group.name
    await served.client.destroy_group(name)
    with pytest.raises(WeightsRefused, match=name):
        await group.update(served.client, served.publish(41, noise=0.1))
    assert (await served.client.get_model_info()).weight_version == "40"
    assert get_logprobs(await served.client.generate(make_request(PROMPT, "41"))) == served.logprobs
    await group.update(served.client, served.publish(42, noise=0.1))
    assert (await served.client.get_model_info()).weight_version == "42"
