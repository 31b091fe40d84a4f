"""The setup of a conversation builds its configuration, task, tokenizer, engine and sandbox."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from asterism.actors.cli.sandbox_commands import make_sandbox_of_run
from asterism.actors.engines.checkpoint_argument import CheckpointArgument
from asterism.actors.launch.checks.task_code_checks import describe_tasks
from asterism.actors.sandbox_service.sandbox_client import SandboxClient
from asterism.configs.errors import UnusableInput
from asterism.configs.load import load_run
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.run_config import ModelConfig, RunConfig
from asterism.configs.schema.tasks import TaskConfig
from asterism.engine.contract import Engine, EngineFailure
from asterism.engine.data.datasets import DatasetProblem, make_training_report, read_problems
from asterism.engine.data.task_inputs import build_task_rules, get_row_layout, read_task_descriptions
from asterism.engine.hf.tokenizer import FastTokenizer, load_tokenizer
from asterism.policies.rollout.trajectory import Rules
from asterism.policies.tools.task_description import TaskDescription
from asterism.sandbox.contract import CodeSandbox
from asterism.tasks.checking.lazy_sandbox import LazySandbox
from asterism.tasks.hosting.task_services import TaskServices, build_task_services

DEFAULT_CONTEXT_TOKENS = 16_384  # limit of a conversation, unless the run's trajectories are longer


class ChatOptions(NamedTuple):
    """Options of the command line; None stands for the configuration's value."""

    config: Path | None
    overrides: Sequence[str]
    task: str
    row: int
    tokenizer: Path | None
    sampling: Mapping[str, float | None]  # fields of Sampling
    seed: int | None
    max_turns: int | None
    max_tokens: int | None
    context_tokens: int | None
    sandbox: Path | None  # folder in which a sandbox is served
    model: str
    api_key_variable: str


class ChatParts(NamedTuple):
    argument: CheckpointArgument
    run: RunConfig  # configuration in which model.checkpoint is the tokenizer's folder
    folder: RunFolder
    task: TaskConfig
    description: TaskDescription
    tokenizer: FastTokenizer
    rules: Rules
    row: DatasetProblem | None


def load_parts(argument: CheckpointArgument, options: ChatOptions) -> ChatParts:
    """Load everything but engine and sandbox. Raises UnusableInput."""
    config, uses_run = options.config, options.config is None and argument.run is not None
    if config is None and argument.run is not None:
        config = argument.run.config
    run = load_run(config, options.overrides if config else ["name=chat", *options.overrides])
    folder = argument.run if argument.run is not None and uses_run else RunFolder(Path(run.runs_folder) / run.name)
    task = _find_task(run, options.task)
    if uses_run and folder.task_descriptions.exists():
        description = read_task_descriptions(folder)[task.name]
    else:
        description = describe_tasks(run, task.name)[task.name]
    tokenizer_folder = _find_tokenizer_folder(argument, options, run, folder)
    tokenizer = load_tokenizer(tokenizer_folder)
    rules = build_task_rules(run, task, description, tokenizer)
    rules = replace(
        rules,
        max_turns=options.max_turns or rules.max_turns,
        response_tokens=options.max_tokens or rules.response_tokens,
    )
    row = _read_row(run, task, description, folder, options.row) if description.has_instances else None
    # A chat uses one notebook, which is forked at its first cell.
    run = replace(run, model=ModelConfig(str(tokenizer_folder)), sandbox=replace(run.sandbox, spare_notebooks=0))
    return ChatParts(argument, run, folder, task, description, tokenizer, rules, row)


def _find_task(run: RunConfig, name: str) -> TaskConfig:
    """Find the task by name; `name` may be empty if there is only one. Raises UnusableInput."""
    found = [task for task in run.resolved_tasks if name in ("", task.name)]
    if len(found) == 1:
        return found[0]
    names = ", ".join(task.name for task in run.tasks) or "no [[tasks]]"
    problem = f"--task {name}: there is no such task" if name else "--task: name the task"
    raise UnusableInput(f"{problem}; the configuration has {names}")


def _find_tokenizer_folder(
    argument: CheckpointArgument, options: ChatOptions, run: RunConfig, folder: RunFolder
) -> Path:
    if options.tokenizer is not None:
        return options.tokenizer
    if argument.folder is not None:
        return argument.folder
    if options.config is None:
        raise UnusableInput(f"{argument.text}: the tokenizer is needed; add --tokenizer FOLDER, or --config FILE")
    return folder.expand_path(run.model.checkpoint)


def _read_row(
    run: RunConfig, task: TaskConfig, description: TaskDescription, folder: RunFolder, number: int
) -> DatasetProblem:
    """Read row `number` of the task's data, counted from 0. Raises UnusableInput."""
    path, layout = folder.expand_path(task.test or task.data), get_row_layout(task, description)
    report = make_training_report(0 if task.test else run.data.max_bad_rows)
    row = next(islice(read_problems(path, report, layout=layout), number, None), None)
    if row is None:
        raise UnusableInput(f"--row {number}: {path} has fewer rows")
    return row


# ---------------------------------------------------------------- engine and sandbox


class OpenedChat(NamedTuple):
    engine: Engine
    context_tokens: int
    sandbox: CodeSandbox
    stack: AsyncExitStack  # closes engine, sandbox and services


async def open_chat(parts: ChatParts, options: ChatOptions) -> OpenedChat:
    """Start the engine; the sandbox starts at its first call. Raises UnusableInput."""
    engine, wanted_tokens = _build_engine(parts, options)
    async with AsyncExitStack() as stack:
        sandbox = await stack.enter_async_context(_opening_sandbox(parts, options))
        stack.push_async_callback(engine.close)
        try:
            capacity = await engine.start()
        except EngineFailure as failure:
            raise UnusableInput(str(failure)) from None
        return OpenedChat(engine, min(wanted_tokens, capacity.sequence_tokens), sandbox, stack.pop_all())
    raise AssertionError("the stack suppresses no exception")


def _build_engine(parts: ChatParts, options: ChatOptions) -> tuple[Engine, int]:
    """Return the engine and the tokens of a conversation. Only an embedded engine imports torch."""
    run, folder = parts.run, parts.argument.folder
    tokens = options.context_tokens or max(run.sequence_tokens, DEFAULT_CONTEXT_TOKENS)
    if folder is None:
        from asterism.engine.openai.openai_engine import OpenAIEngine

        engine = OpenAIEngine(
            parts.argument.url,
            parts.tokenizer,
            sequence_tokens=tokens,
            model=options.model,
            api_key_variable=options.api_key_variable,
        )
        return engine, tokens
    from asterism.engine.hf.model_config import load_model_config
    from asterism.engine.inference.embedded_factory import build_embedded_engine

    tokens = min(tokens, load_model_config(folder).max_position_embeddings)
    page_tokens = run.engine.page_tokens
    kv_tokens = -(-tokens // page_tokens) * page_tokens
    one_at_a_time = replace(run, engine=replace(run.engine, max_running=1))
    return build_embedded_engine(one_at_a_time, folder, kv_tokens=kv_tokens, sequence_tokens=tokens), tokens


@asynccontextmanager
async def _opening_sandbox(parts: ChatParts, options: ChatOptions) -> AsyncGenerator[CodeSandbox]:
    if options.sandbox is not None:
        async with SandboxClient(options.sandbox) as client:
            yield client
        return
    sandbox = LazySandbox(make_sandbox_of_run(parts.run, parts.folder, "chat"))
    try:
        yield sandbox
    finally:
        await sandbox.close()


def build_services(parts: ChatParts, sandbox: CodeSandbox) -> TaskServices:
    return build_task_services(parts.run, parts.folder, {parts.task.name: parts.description}, sandbox)
