"""Builds engines of the kind "openai", and asks the servers of an evaluation for their model."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from msgspec.structs import replace

from asterism.bus.addresses import parse_generator_index
from asterism.configs.choices.engine_kinds import Servers
from asterism.configs.errors import UnusableInput
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.run_config import RunConfig
from asterism.configs.schema.schema_tree import require
from asterism.engine.contract import EngineFailure
from asterism.engine.engine_code import EngineCheck, EngineCode, EngineStart, EvaluatedModels
from asterism.engine.hf.tokenizer import load_tokenizer
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
    """`checkpoint`: a folder with the tokenizer of the server's model. `index`: the server's index in openai.urls."""
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


def build_engine(start: EngineStart) -> OpenAIEngine:
    index, on_lost = parse_generator_index(start.process), start.on_engine_lost
    return build_openai_engine(start.run, start.checkpoint, index, version=start.version, on_engine_lost=on_lost)


def describe_servers(run: RunConfig) -> Servers:
    """Return the servers. Raises ValueError if they do not match the engines."""
    urls, engines = run.openai.urls, run.engine.num_engines
    require(
        len(urls) == engines,
        f"openai.urls must name one server per engine, engine.num_engines = {engines}: it names {len(urls)}",
    )
    return Servers(urls)


def list_machine_checks(run: RunConfig, checkpoint: Path | None) -> Iterator[EngineCheck]:
    remedy = "Start the servers, or change openai.urls, openai.model or openai.api_key_variable."
    yield EngineCheck("openai.urls", lambda: find_served_model(run), remedy)


def find_models(run: RunConfig) -> EvaluatedModels:
    """Find the model, whose name becomes part of the run's settings: a resumed evaluation must find the same name."""
    model = find_served_model(run)
    return EvaluatedModels(replace(run, openai=replace(run.openai, model=model)), {"model": model})


def find_served_model(run: RunConfig) -> str:
    """Return the name of the model that all servers in openai.urls serve. Raises UnusableInput with the URL."""
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
    """Ask each server for its model, without retries. Return the models by URL."""
    engines = [build_openai_engine(run, checkpoint, index, retry_delays_s=()) for index in range(len(run.openai.urls))]
    try:
        return dict(zip(run.openai.urls, [await each.find_model() for each in engines], strict=True))
    finally:
        for each in engines:
            await each.close()


CODE = EngineCode(
    "asterism.engine.openai.openai_factory:build_engine",
    describe_servers,
    machine_checks="asterism.engine.openai.openai_factory:list_machine_checks",
    find_models="asterism.engine.openai.openai_factory:find_models",
)
