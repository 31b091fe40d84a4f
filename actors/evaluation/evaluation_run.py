"""`asterism eval` makes its run's configuration here, from a checkpoint or from URLs, and from the command's options.

Tasks, tools, dialogues, rewards and sampling come from --config, else the checkpoint's run, else the defaults.
The run has no learner (evaluation.only); its engines start with the weights.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from asterism.actors.engines.checkpoint_argument import RUNS_FOLDER, CheckpointArgument, parse_checkpoint_argument
from asterism.configs.errors import UnusableInput
from asterism.configs.load import expand_paths, load_run
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.algorithm import EarlyStoppingConfig, EvaluationConfig, EvaluationSetConfig
from asterism.configs.schema.learner_config import LearnerConfig
from asterism.configs.schema.machines import BusConfig, ClusterConfig, EngineConfig, OpenAIConfig
from asterism.configs.schema.run_config import ModelConfig, RunConfig
from asterism.configs.schema.schema_tree import PRESET_KEY, STAGE_KEY, STAGES_KEY, TASK_NAME_RULE, TaskName
from asterism.configs.schema.sglang import SGLangConfig
from asterism.engine.data.data_files import DatasetError, read_rows

_KEYS = (*RunConfig.__struct_fields__, PRESET_KEY, STAGE_KEY, STAGES_KEY)
_QUEUED_FRAMES = 4  # number of frames per trajectory, as RunConfig requires
DEFAULT_SET = "test"  # name of data.test in results, and of its set if it has several answers per question


class ServerOptions(NamedTuple):
    """Options that are only for URLs. An empty one stands for the configuration's value."""

    tokenizer: Path | None = None
    model: str = ""
    api_key_variable: str = ""


class EvalOptions(NamedTuple):
    targets: Sequence[str]  # CHECKPOINT, or one or more URLs
    settings: Sequence[str] = ()  # values of --set: NAME=FILE for a set of questions, KEY=VALUE for the configuration
    config: Path | None = None
    samples: int | None = None
    questions: int | None = None  # limit of the questions of each set
    temperature: float | None = None  # 0: greedy answers
    name: str | None = None
    server: ServerOptions = ServerOptions()


class EvaluationSetup(NamedTuple):
    run: RunConfig
    weights: Sequence[CheckpointArgument]  # one checkpoint, or URLs


def build_evaluation_setup(options: EvalOptions) -> EvaluationSetup:
    """Build the run and its weights. Raises UnusableInput, which names the argument, flag or key."""
    weights = [parse_checkpoint_argument(target) for target in options.targets]
    files, overrides = split_settings(options.settings)
    if len(weights) > 1 and any(each.folder is not None for each in weights):
        raise UnusableInput(f"{options.targets[1]}: evaluate one checkpoint, or several URLs in parallel")
    base = _set_server_options(_load_base(options, weights[0], overrides), weights, options.server)
    evaluation = _build_evaluation(base, files, options)
    try:
        run = replace(
            _without_training(base),
            name=options.name or _choose_name(weights[0]),
            model=ModelConfig(checkpoint=str(weights[0].folder.absolute())) if weights[0].folder else base.model,
            bus=_widen_queues(base, evaluation),
            **choose_engine_settings(base, weights),
        )
        run = replace(run, evaluation=evaluation)
    except ValueError as error:
        raise UnusableInput(f"asterism eval: {error}") from None
    return EvaluationSetup(run, weights)


def split_settings(settings: Sequence[str]) -> tuple[dict[str, Path], list[str]]:
    """Return (files by name of the set, overrides of the configuration). A setting is an override if it begins with a
    top-level key of the configuration; other names are those of sets. Raises UnusableInput for an unusable name."""
    files: dict[str, Path] = {}
    overrides: list[str] = []
    for setting in settings:
        key, _, value = setting.partition("=")
        name = key.strip()
        if not value or name.partition(".")[0] in _KEYS:
            overrides.append(setting)
        elif name in files:
            raise UnusableInput(f"--set {setting}: there is a set of this name already")
        else:
            files[_check_set_name(setting, name)] = Path(value).expanduser().absolute()
    return files, overrides


def _check_set_name(setting: str, name: str) -> str:
    try:
        return msgspec.convert(name, TaskName)
    except msgspec.ValidationError:
        raise UnusableInput(f"--set {setting}: the name of a set must be {TASK_NAME_RULE}") from None


def choose_engine_settings(base: RunConfig, weights: Sequence[CheckpointArgument]) -> dict[str, Any]:
    """Return the tables of the engines for a checkpoint, or for one server per URL."""
    urls = tuple(each.url.rstrip("/") for each in weights if each.url)
    if not urls:
        return {"sglang": replace(base.sglang, external_urls=(), colocate=False)}
    uses_openai = _uses_openai(weights)
    engine = EngineConfig(
        kind="openai" if uses_openai else "sglang",
        num_engines=len(urls),
        kv_tokens=0,
        dtype=base.engine.dtype,
        max_running=base.engine.max_running,
    )
    if uses_openai:
        return {"engine": engine, "sglang": SGLangConfig(), "openai": replace(base.openai, urls=urls)}
    return {"engine": engine, "sglang": SGLangConfig(external_urls=urls), "openai": OpenAIConfig()}


def _uses_openai(weights: Sequence[CheckpointArgument]) -> bool:
    """Return whether the URLs have a path, such as /v1; SGLang's API has none. Raises UnusableInput for a mixture."""
    have_paths = [each.url.rstrip("/").count("/") > 2 for each in weights]
    if any(have_paths) and not all(have_paths):
        raise UnusableInput(
            f"{weights[have_paths.index(False)].url}: expected a URL with a path, such as http://localhost:8000/v1, like the "
            "other URLs; a URL without a path is for an SGLang server"
        )
    return all(have_paths)


def _set_server_options(base: RunConfig, weights: Sequence[CheckpointArgument], server: ServerOptions) -> RunConfig:
    if server.tokenizer is not None:
        if weights[0].folder is not None:
            raise UnusableInput(f"--tokenizer {server.tokenizer}: a checkpoint has its own; use the flag with URLs")
        base = replace(base, model=ModelConfig(checkpoint=str(server.tokenizer.absolute())))
    if (server.model or server.api_key_variable) and not _uses_openai(weights):
        flag = "--model" if server.model else "--api-key-variable"
        raise UnusableInput(f"{flag}: use the flag with URLs of OpenAI's API, such as http://localhost:8000/v1")
    openai = OpenAIConfig(
        model=server.model or base.openai.model,
        api_key_variable=server.api_key_variable or base.openai.api_key_variable,
        request_timeout_s=base.openai.request_timeout_s,
    )
    return replace(base, openai=openai)


def _load_base(options: EvalOptions, weights: CheckpointArgument, overrides: Sequence[str]) -> RunConfig:
    """Load the configuration; paths with $RUN then name the files of the checkpoint's run."""
    path = options.config or (weights.run.config if weights.run else None)
    named = overrides if path else [f"name={RUNS_FOLDER}", *overrides]
    run = load_run(path, named)
    _require_effective_limit(run, [each.split("=")[0] for each in overrides])
    if weights.run is None:
        return run
    if not any(each.startswith("runs_folder=") for each in overrides):
        run = replace(run, runs_folder=str(weights.run.path.parent))
    return expand_paths(run, RunFolder(weights.run.path.absolute()))


def _require_effective_limit(run: RunConfig, keys: Sequence[str]) -> None:
    """Raise UnusableInput if the run's limit of evaluations overrides a limit in `keys`."""
    limit, own = run.evaluation.response_tokens, "evaluation.response_tokens"
    hidden = [key for key in keys if key.endswith("dialogue.response_tokens")]
    if limit and hidden and own not in keys:
        raise UnusableInput(f"--set {hidden[0]} has no effect: the run has {own} = {limit}; set that key")


def _without_training(base: RunConfig) -> RunConfig:
    return replace(
        base,
        prepare=None,
        sft=replace(base.sft, steps=0, epochs=0),
        rl=replace(base.rl, steps=0, max_staleness=0, group_oversampling=1.0, surplus_groups="abort"),
        early_stopping=EarlyStoppingConfig(),
        learner=LearnerConfig(),
        cluster=ClusterConfig(),
        log=replace(base.log, events=True, keep_steps=0),
        evaluation=EvaluationConfig(0, only=True),
    )


def _widen_queues(base: RunConfig, evaluation: EvaluationConfig) -> BusConfig:
    """Widen the queues of the bus, because all trajectories start together."""
    answers = sum(each.questions * each.samples for each in evaluation.sets) or evaluation.questions * len(
        base.resolved_tasks
    )
    return replace(base.bus, queue_messages=max(base.bus.queue_messages, _QUEUED_FRAMES * answers))


def _choose_name(weights: CheckpointArgument) -> str:
    if weights.run is not None:
        return f"eval-{weights.run.path.resolve().name}-{weights.step}"
    if weights.folder is not None:
        return f"eval-{weights.folder.resolve().name}"
    return "eval-" + weights.url.partition("://")[2].rstrip("/").replace(":", "-").replace("/", "-")


# ---------------------------------------------------------------- sets


def _build_evaluation(base: RunConfig, files: dict[str, Path], options: EvalOptions) -> EvaluationConfig:
    if files:
        sets = [_build_set(base, name, file, options) for name, file in files.items()]
    else:
        sets = [_limit_set(each, options) for each in _list_known_sets(base, options)]
    sampling = base.evaluation_sampling
    if options.temperature:
        sampling = replace(sampling, temperature=options.temperature)
    greedy = base.evaluation.during == "greedy" if options.temperature is None else options.temperature == 0
    unnamed = options.questions or base.evaluation.questions
    questions = max((each.questions for each in sets), default=unnamed)
    if not questions:
        raise UnusableInput("no question to ask: give --questions N or --set NAME=FILE; evaluation.questions is 0")
    return replace(
        base.evaluation,
        questions=questions,
        every=0,
        during="greedy" if greedy else "sampled",
        sampling=sampling,
        sets=tuple(sets),
        only=True,
    )


def _build_set(base: RunConfig, name: str, file: Path, options: EvalOptions) -> EvaluationSetConfig:
    """Build a set of all questions of the file; its task is that of the run's set of the same name."""
    known = next((each for each in base.evaluation.sets if each.name == name), None)
    try:
        rows = sum(1 for _ in read_rows(file))
    except DatasetError as error:
        raise UnusableInput(f"--set {name}, which is no key of the configuration: {error}") from None
    return EvaluationSetConfig(
        name=name,
        data=str(file),
        task=known.task if known else "",
        questions=min(rows, options.questions or rows),
        samples=options.samples or (known.samples if known else 1),
    )


def _list_known_sets(base: RunConfig, options: EvalOptions) -> Sequence[EvaluationSetConfig]:
    """List the run's sets: [[evaluation.sets]], or, with several answers per question, data.test or tasks[].test."""
    if base.evaluation.sets:
        return base.resolved_evaluation_sets
    if (options.samples or 1) == 1:
        return ()
    return [replace(each, name=each.task or DEFAULT_SET) for each in base.resolved_evaluation_sets if each.data]


def _limit_set(known: EvaluationSetConfig, options: EvalOptions) -> EvaluationSetConfig:
    samples, questions = options.samples or known.samples, options.questions or known.questions
    return replace(known, samples=samples, questions=questions, every=0)


def count_planned_answers(run: RunConfig) -> int:
    """Return the maximum number of answers: prompts over the limit get no answer."""
    return sum(each.questions * each.samples for each in run.resolved_evaluation_sets)


def hash_files(paths: Sequence[Path]) -> str:
    """Return the SHA-256 of the contents, one file after the other."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()
