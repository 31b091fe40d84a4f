"""Adapters of a learner on a real server: tokens of each version, turns during an update, released memory,
and a whole run in which the server is killed."""

import asyncio
import os
import signal
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from asterism.bus.messages import WeightsPublished
from asterism.configs.run_folder import RunFolder
from asterism.engine.learner.adapters.adapted_model import initialize_adapters
from asterism.engine.learner.adapters.adapter_publisher import AdapterPublisher
from asterism.engine.model.causal_lm import CausalLM
from asterism.engine.model.hf_checkpoint import load_model
from asterism.engine.model.lora_linear import add_adapters
from asterism.engine.model.lora_options import LoraOptions
from asterism.engine.sglang.client import SGLangClient
from asterism.engine.sglang.http_api import UpdateRefused
from asterism.engine.sglang.sglang_engine import SGLangEngine
from asterism.engine.sglang.weights import TransportParts
from asterism.engine.sglang.weights.adapters import AdapterTransport
from asterism.engine.sglang.weights.checksums import ChecksumRegistry
from asterism.engine.sglang.weights.transports import TensorTransport
from asterism.engine.weight_transfer.weight_layout import get_layout
from tests.actors.runs.running import from_cold_start_of, list_process_ids, metrics, read_log_entries, wait_until
from tests.engine.contract.bench import request
from tests.engine.learner.adapters.adapted_models import merge_adapters
from tests.engine.started_engines import started
from tests.engine.tiny_models import measure_errors
from tests.engine.whole_publisher import publish
from tests.processes import family
from tests.sglang.bench import PAGE, BorrowedServer, SharedServer
from tests.sglang.runs import (
    OWN_SERVER,
    PATIENCE_S,
    check_cleanup,
    check_run_result,
    get_loaded_versions,
    get_process_name,
    running,
)
from tests.sglang.serving import LONGEST, make_requirements

pytestmark = [pytest.mark.slow, pytest.mark.sglang, pytest.mark.timeout(2 * PATIENCE_S)]

PORT = 31_330
OPTIONS = LoraOptions(rank=3, alpha=12.0, targets=("q_proj", "v_proj", "o_proj", "gate_proj", "down_proj"))
MAX_ERROR = 1e-4  # in float32; errors of equal weights are up to 1.8e-5, of other weights over 0.01
LONG = 400  # new tokens of a turn that an update interrupts


class Adapted(NamedTuple):
    """A server with LoRA, and a learner that trains adapters."""

    shared: SharedServer
    folder: Path
    learner: CausalLM
    publisher: AdapterPublisher

    @asynccontextmanager
    async def open_engine(self) -> AsyncGenerator[SGLangEngine]:
        model = self.shared.requirements.model
        parameters = dict(load_model(model, torch.float32).named_parameters())
        checksums = ChecksumRegistry(self.folder / "checksums", "sglang-0")
        whole = TensorTransport(TransportParts(get_layout(parameters, torch.float32), checksums))
        transport = AdapterTransport(whole, parameters, OPTIONS, torch.float32)
        server = BorrowedServer(self.shared)
        engine = SGLangEngine(server, transport, model=model, sequence_tokens=LONGEST, load_poll_s=0.05)
        async with started(engine):
            yield engine

    def publish(self, version: int) -> WeightsPublished:
        return publish(self.publisher, version)

    def train(self, seed: int) -> CausalLM:
        """Change the adapters, and return a merged copy of the model."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.learner.named_parameters():
            if "lora_" in name:
                parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
        return self.merge()

    def merge(self) -> CausalLM:
        merged = load_model(self.shared.requirements.model, torch.float32)
        merged.load_state_dict(merge_adapters(self.learner))
        return merged.requires_grad_(False)


@pytest.fixture(scope="module")
def adapted(loop: asyncio.Runner, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Adapted]:
    folder = tmp_path_factory.mktemp("adapted")
    shared = SharedServer(make_requirements(model, PORT, LONGEST)._replace(lora=OPTIONS), folder, "adapted")
    learner = load_model(model, torch.float32)
    add_adapters(learner, OPTIONS)
    initialize_adapters(learner, seed=0)
    loop.run(shared.start())
    yield Adapted(shared, folder, learner, AdapterPublisher(folder / "slots", learner, torch.float32, num_slots=3))
    loop.run(shared.close())


async def count_adapters(shared: SharedServer) -> int:
    """Count the server's adapters, which the server lists in its refusal of an unknown name."""
    async with SGLangClient(shared.server.url) as client:
        with pytest.raises(UpdateRefused, match="name none does not exist") as refusal:
            await client.unload_adapter("none")
    return str(refusal.value).count("asterism-")


async def test_each_version_has_the_merged_models_log_probabilities_and_a_separate_cache(adapted: Adapted) -> None:
    async with adapted.open_engine() as engine:
        base, asked = adapted.merge(), request(1, 40, 40)
        for version in range(3):
            merged = adapted.train(version) if version else base
            await engine.load_weights(adapted.publish(version))
            first, again = await engine.generate(asked), await engine.generate(asked)
            assert set(first.versions.tolist()) == {version}
            assert measure_errors(merged, asked, first).max() < MAX_ERROR
            assert first.token_ids.tolist() == again.token_ids.tolist()
            assert (first.cached_tokens, again.cached_tokens) == (0, 39 // PAGE * PAGE)
            if version:
                assert measure_errors(base, asked, first).max() > 0.01
            assert engine.get_load().recomputed_tokens == 0


async def test_turns_continue_under_new_adapters_and_a_new_engine_removes_earlier_adapters(adapted: Adapted) -> None:
    async with adapted.open_engine() as engine:
        models = {10: adapted.train(10)}
        await engine.load_weights(adapted.publish(10))
        requests = [request(number, LONG, 40) for number in range(20, 24)]
        calls = [asyncio.ensure_future(engine.generate(each)) for each in requests]
        while engine.get_load().generated_tokens < 64:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        assert await count_adapters(adapted.shared) == 1
        models[11] = adapted.train(11)
        await engine.load_weights(adapted.publish(11))
        for asked, found in zip(requests, await asyncio.gather(*calls), strict=True):
            versions = found.versions
            assert (versions.tolist(), len(versions)) == (sorted(versions.tolist()), LONG)
            assert set(versions.tolist()) == {10, 11}
            for version, model in models.items():
                errors = measure_errors(model, asked, found)
                assert errors[torch.from_numpy(versions == version)].max() < MAX_ERROR


async def test_a_woken_server_receives_the_base_and_the_adapters_again(adapted: Adapted) -> None:
    async with adapted.open_engine() as engine:
        merged, asked = adapted.train(30), request(3, 30)
        published = adapted.publish(30)
        await engine.load_weights(published)
        before = await engine.generate(asked)
        await engine.sleep()
        waiting = asyncio.ensure_future(engine.generate(asked))
        await engine.load_weights(published)
        after = await waiting
        assert after.token_ids.tolist() == before.token_ids.tolist()
        assert measure_errors(merged, asked, after).max() < MAX_ERROR


STEPS = 6
RUN = (
    *("learner.lora.rank=2", "learner.optimizer.lr=1e-3", "learner.lora.publish=adapters", f"rl.steps={STEPS}"),
    *("rl.prompts=4", "rl.rollouts=8", "sglang.port=31070"),
)


@pytest.mark.nightly
def test_a_server_that_replaces_a_killed_one_receives_the_base_and_the_newest_adapters(
    tmp_path: Path, cold_start: RunFolder
) -> None:
    """When the server dies, its generator process exits, too."""
    with running(tmp_path, *OWN_SERVER, *RUN, *from_cold_start_of(cold_start)) as (process, folder):
        wait_until(lambda: len(metrics(folder, "step")) >= 1, process, PATIENCE_S)
        processes = family(process.pid)
        (scheduler,) = [pid for pid in processes if get_process_name(pid) == "sglang::scheduler"]
        os.kill(scheduler, signal.SIGKILL)
        wait_until(lambda: len(metrics(folder, "step")) >= 3, process, PATIENCE_S)
        processes += family(process.pid)
    check_run_result(folder, STEPS)
    assert len(list_process_ids(folder, "generator-0")) == 2
    assert set(get_loaded_versions(folder)) == set(range(STEPS + 1))
    assert read_log_entries(folder, "weights.refused", "generator-0") == []
    steps = metrics(folder, "step")
    whole = sum(path.stat().st_size for path in folder.get_checkpoint_path(0).glob("*.safetensors"))
    assert all(step["publish_bytes"] < 0.05 * whole for step in steps)
    assert sum(step["grad_norm"] for step in steps if step["rows"]) > 0
    check_cleanup(folder, processes, set())
