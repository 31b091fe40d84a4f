"""Each body that the client sends has only fields and types of the request structs of the pinned SGLang."""

import asyncio
import json
import os
import re
import subprocess
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web

from asterism.configs.choices.weight_transfers import WEIGHT_TRANSFERS
from asterism.engine.sglang import client as client_module
from asterism.engine.sglang.client import SGLangClient
from asterism.engine.sglang.http_api import GenerateRequest, SamplingParams
from asterism.engine.sglang.weights import TransportParts, build_transport
from asterism.engine.sglang.weights.checksums import ChecksumRegistry
from asterism.engine.sglang.weights.transports import ProcessGroupTransport
from asterism.engine.weight_transfer.weight_layout import load_layout
from tests.engine.sglang.fake_server import LENGTH, FakeServer, make_response
from tests.engine.sglang.weights.fake_weight_server import FakeWeightServer
from tests.engine.tiny_models import save_small_model, small_model
from tests.engine.whole_publisher import WholePublisher
from tests.sglang.environment import PYTHON, ROOT

pytestmark = [pytest.mark.slow, pytest.mark.sglang, pytest.mark.real_clock, pytest.mark.timeout(600)]

PROGRAM = ROOT / "tests/sglang/decode_requests.py"
READ_PATHS = {"/ready", "/server_info", "/model_info", "/v1/loads"}
FULL = GenerateRequest(
    rid="a:1-1-0;",
    input_ids=[1, 2, 3],
    sampling_params=SamplingParams(
        max_new_tokens=3,
        temperature=0.7,
        top_p=0.9,
        top_k=20,
        stop_token_ids=(7, 8),
        ignore_eos=True,
        sampling_seed=-(2**62),
        stream_interval=16,
    ),
    return_logprob=True,
    logprob_start_len=-1,
    stream=True,
    extra_key="7-ab",
    priority=3,
    routed_dp_rank=0,
    lora_path="asterism-7",
)
SMALL = GenerateRequest(rid="b;", input_ids=[1], sampling_params=SamplingParams(max_new_tokens=1))
Request = tuple[str, dict[str, Any]]


def decode(requests: Sequence[Request]) -> list[list[str]]:
    """Decode the requests with SGLang's structs, and return the problems."""
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    ran = subprocess.run(
        [PYTHON, PROGRAM], input=json.dumps(requests), capture_output=True, text=True, env=environment, timeout=500
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    return json.loads(ran.stdout.splitlines()[-1])


@asynccontextmanager
async def connected(server: FakeServer) -> AsyncGenerator[SGLangClient]:
    async with server.serving() as url, SGLangClient(url) as client:
        yield client


async def send_control_requests() -> list[Request]:
    async def respond(request: web.Request, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response(make_response(body, [1], LENGTH))

    server = FakeServer(respond)
    async with connected(server) as client:
        for request in (FULL, SMALL):
            async with aclosing(client.generate_streamed(request)) as responses:
                async for _ in responses:
                    pass
        await client.abort("a:")
        await client.abort_all()
        for mode in ("abort", "retract", "in_place"):
            await client.pause(mode)
        await client.resume()
        await client.flush_cache()
        await client.release_memory(["kv_cache", "weights"])
        await client.resume_memory(["weights"])
        await client.set_weight_version("7")
        config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8.0, "target_modules": ("o_proj",)}
        await client.load_adapter("asterism-7", config, ["YWI="], {"a": "00"})
        await client.unload_adapter("asterism-7")
    return server.requests


async def send_weights(folder: Path) -> list[Request]:
    """Send weights in several buckets with each transport."""
    checkpoint = save_small_model(folder, small_model())
    layout, checksums = load_layout(checkpoint, torch.bfloat16), ChecksumRegistry(folder / "checksums", "sglang-0")
    parameters = dict(small_model(seed=7).named_parameters())
    published = WholePublisher(folder / "published", torch.bfloat16).publish(7, parameters)
    requests: list[Request] = []
    parts = TransportParts(layout, checksums, folder / "for_servers", 8 * 2**10, timeout_s=20.0)
    for name in WEIGHT_TRANSFERS:
        transport = build_transport(name, parts)
        server = FakeWeightServer()
        async with connected(server) as client:
            await transport.update(client, published)
            if isinstance(transport, ProcessGroupTransport) and transport.group is not None:
                await client.destroy_group(transport.group.name)
            await transport.close()
        requests += server.requests
    return requests


@pytest.fixture(scope="module")
def sent(tmp_path_factory: pytest.TempPathFactory) -> list[Request]:
    async def send() -> list[Request]:
        return [*await send_control_requests(), *await send_weights(tmp_path_factory.mktemp("weights"))]

    return [request for request in asyncio.run(send()) if request[0] not in READ_PATHS]


def test_the_structs_of_sglang_decode_each_request(sent: list[Request]) -> None:
    assert decode(sent) == []


def test_all_paths_of_the_client_are_decoded(sent: list[Request]) -> None:
    source = Path(client_module.__file__).read_text()
    paths = {path.partition("?")[0] for path in re.findall(r'"(/[a-z_0-9/]+)', source)} - READ_PATHS
    assert {path for path, _ in sent} == paths


def test_unknown_fields_and_wrong_types_are_found() -> None:
    problems = decode(
        [
            ("/update_weights_from_disk", {"model_path": "/a", "weight_version": 7}),
            ("/update_weights_from_tensor", {"serialized_named_tensors": ["YQ=="], "format": "x"}),
            ("/update_weights_from_distributed", {"names": ["a"], "dtypes": ["float32"]}),
            ("/generate", {"input_ids": [1], "sampling_params": {"max_tokens": 3, "top_k": "x"}}),
            ("/flush_cache", {"timeout": 1}),
            ("/update_weights", {}),
        ]
    )
    found = "\n".join(f"{path}: {problem}" for path, problem in problems)
    for expected in (
        "/update_weights_from_disk: UpdateWeightFromDiskReqInput: ['weight_version'",
        "/update_weights_from_tensor: UpdateWeightsFromTensorReqInput has no field format",
        "/update_weights_from_distributed: UpdateWeightsFromDistributedReqInput: ['shapes'",
        "/generate: SamplingParams has no field max_tokens",
        "/generate: SamplingParams.top_k: Expected `int`, got `str`",
        "/flush_cache: has no field timeout",
        "/update_weights: is no route with a body",
    ):
        assert expected.replace("[", "").replace("'", "") in found.replace("(", "").replace("'", ""), found
