"""Builds the engine of a server with OpenAI's completions API, and asks the servers of an evaluation for their model."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from asterism.configs.errors import UnusableInput
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema import RunConfig
from asterism.engine.contract import EngineFailure
from asterism.engine.model.tokenizer import load_tokenizer
from asterism.engine.openai.completions_api import ServedModel
from asterism.engine.openai.openai_engine import RETRY_DELAYS_S, OpenAIEngine

MAX_PENDING = 65_536  # turns; the arbiter's leases keep them below this bound


def build_openai_engine(
    run: RunConfig,
    checkpoint: Path,
    index: int,
    *,
    version: int = 0,
    on_engine_lost: Callable[[str], object] | None = None,
    retry_delays_s: Sequence[float] = RETRY_DELAYS_S,
) -> OpenAIEngine:
    """`checkpoint`: a folder with the tokenizer of the server's model. `index`: of the server in openai.urls."""
    return OpenAIEngine(
        run.openai.urls[index],
        load_tokenizer(checkpoint),
        sequence_tokens=run.sequence_tokens,
        model=run.openai.model,
        api_key_variable=run.openai.api_key_variable,
        version=version,
        max_pending=MAX_PENDING,
        max_running=run.engine.max_running,
        request_timeout_s=run.openai.request_timeout_s,
        retry_delays_s=retry_delays_s,
        on_engine_lost=on_engine_lost,
    )


def find_served_model(run: RunConfig) -> str:
    """The name of the model that all servers in openai.urls serve. Raises UnusableInput, which names the server."""
    checkpoint = RunFolder(Path(run.runs_folder) / run.name).expand_path(run.model.checkpoint)
    try:
        models = asyncio.run(_ask_servers(run, checkpoint))
    except EngineFailure as failure:
        raise UnusableInput(f"openai.urls: {failure}") from None
    for url, model in models.items():
        if model.max_model_len is not None and model.max_model_len < run.sequence_tokens:
            raise UnusableInput(
                f"openai.urls: {url} accepts sequences of {model.max_model_len} tokens, but {run.sequence_keys} = "
                f"{run.sequence_tokens}"
            )
    if len({model.id for model in models.values()}) > 1:
        served = ", ".join(f"{model.id} at {url}" for url, model in models.items())
        raise UnusableInput(f"openai.urls: the servers have different models, {served}; choose one with --model NAME")
    return next(iter(models.values())).id


async def _ask_servers(run: RunConfig, checkpoint: Path) -> dict[str, ServedModel]:
    """By URL. Without retries."""
    engines = [build_openai_engine(run, checkpoint, index, retry_delays_s=()) for index in range(len(run.openai.urls))]
    try:
        return dict(zip(run.openai.urls, [await each.find_model() for each in engines], strict=True))
    finally:
        for each in engines:
            await each.close()
