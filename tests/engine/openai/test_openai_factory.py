"""Tests: [openai] is only for evaluations. All servers must serve one model and have room for a trajectory."""

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from msgspec.structs import replace

from asterism.configs.errors import UnusableInput
from asterism.configs.schema.algorithm import EvaluationConfig
from asterism.configs.schema.dialogue import DialogueConfig
from asterism.configs.schema.machines import EngineConfig, OpenAIConfig
from asterism.configs.schema.run_config import ModelConfig, RunConfig
from asterism.engine.openai.openai_factory import find_served_model
from tests.engine.openai.completions_server import MODEL, CompletionsServer

pytestmark = pytest.mark.real_clock


def make_run(model: Path, *urls: str, name: str = "") -> RunConfig:
    return RunConfig(
        name="served",
        model=ModelConfig(str(model)),
        dialogue=DialogueConfig(prompt_tokens=32, response_tokens=64),
        engine=EngineConfig("openai", num_engines=len(urls), kv_tokens=0),
        openai=OpenAIConfig(urls, name),
        evaluation=EvaluationConfig(only=True),
    )


async def find(run: RunConfig) -> str:
    return await asyncio.to_thread(find_served_model, run)


async def test_the_model_name_comes_from_the_servers_and_must_be_the_same(model_folder: Path) -> None:
    servers = [CompletionsServer(model_folder, dialect, 96) for dialect in ("vllm", "llama.cpp")]
    async with AsyncExitStack() as stack:
        urls = [await stack.enter_async_context(each.serving()) for each in servers]
        assert await find(make_run(model_folder, *urls)) == MODEL
        servers[1].model = "other"
        with pytest.raises(
            UnusableInput, match=f"different models, small at {urls[0]}, other at {urls[1]}; .* --model"
        ):
            await find(make_run(model_folder, *urls))
        with pytest.raises(UnusableInput, match=f"{urls[1]}: the server has no model 'small'; it serves other"):
            await find(make_run(model_folder, *urls, name="small"))
        longer = replace(make_run(model_folder, urls[0]), dialogue=DialogueConfig(prompt_tokens=33, response_tokens=64))
        with pytest.raises(UnusableInput, match=r"accepts sequences of 96 tokens, but .* response_tokens = 97"):
            await find(longer)
        limited = replace(make_run(model_folder, urls[0]), evaluation=EvaluationConfig(response_tokens=65, only=True))
        with pytest.raises(
            UnusableInput, match=r"96 tokens, but dialogue.prompt_tokens \+ evaluation.response_tokens = 97"
        ):
            await find(limited)
        assert await find(replace(longer, evaluation=EvaluationConfig(response_tokens=63, only=True))) == MODEL
    with pytest.raises(UnusableInput, match=rf"^openai.urls: {urls[0]}: /v1/models: "):
        await find(make_run(model_folder, urls[0]))
