"""These checks examine a run's inputs, by configuration key, before anything is created.

The launcher and `asterism doctor` run them. Nothing here imports torch.
"""

import os
import shutil
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from asterism.actors.launch.checks.data_checks import check_data, check_dialogues, check_questions
from asterism.actors.launch.checks.task_code_checks import (
    CheckedInput,
    check_import_path,
    check_references,
    check_reward_function,
    check_task,
    list_references,
)
from asterism.actors.sinks.contract import check_sinks
from asterism.configs.choices.engine_kinds import ENGINE_KINDS
from asterism.configs.errors import UnusableInput, format_bytes
from asterism.configs.loading.error_messages import prefix_key
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.run_config import RunConfig
from asterism.configs.schema.tasks import TaskConfig
from asterism.engine.data.datasets import QuestionReport, make_training_report
from asterism.engine.data.task_inputs import build_renderer
from asterism.engine.engine_code import load_engine_code
from asterism.engine.hf.model_config import DecoderConfig, check_weight_shapes, load_model_config
from asterism.engine.hf.tokenizer import check_vocabulary, load_tokenizer
from asterism.engine.hf.weight_files import count_parameters
from asterism.engine.learner.checkpoints.checkpoint_folders import is_resumable, read_trainer_state
from asterism.engine.model.lora_options import (
    LoraOptions,
    check_lora_targets,
    count_trained_parameters,
    get_lora_options,
)
from asterism.engine.weight_transfer.published_bytes import count_folder_bytes, count_folders, count_slot_bytes
from asterism.policies.dialogue.chat_format import TURN_END, TURN_START
from asterism.policies.groups.advantages import ESTIMATORS
from asterism.policies.groups.group_filters import FILTERS
from asterism.policies.losses import LOSSES
from asterism.policies.rollout.rollout_policy import POLICIES
from asterism.policies.tools.task_description import MATH, TaskDescription, list_success_warnings
from asterism.tasks import DEFAULT_TASK
from asterism.tasks.prepare_program import KEY, find_prepared_model

_FLOAT32_BYTES = 4
_DATA_KEYS = ("data.train", "data.test", "sft.data", "sft.validation", ".data", ".test")


InputCheck = Callable[[], CheckedInput]


def check_inputs(run: RunConfig, descriptions: dict[str, TaskDescription] | None = None) -> list[str]:
    """Return lines about the data files, and warnings. Raises UnusableInput with the key of the first unusable input.

    `descriptions` receives the descriptions of the tasks, by name.
    """
    lines: list[str] = []
    for key, check in list_input_checks(run, descriptions).items():
        try:
            checked = check()
        except UnusableInput as error:
            raise UnusableInput(prefix_key(key, str(error))) from error
        lines += [f"{key}: {checked.description}"] if key.endswith(_DATA_KEYS) else []
        lines += [f"warning: {key}: {warning}" for warning in checked.warnings]
    return lines


def list_input_checks(
    run: RunConfig, descriptions: dict[str, TaskDescription] | None = None
) -> Mapping[str, InputCheck]:
    """Return for each key a check that raises UnusableInput. Inputs that [prepare] generates have no check."""
    descriptions = {} if descriptions is None else descriptions
    folder = RunFolder(Path(run.runs_folder) / run.name)
    references = {key: partial(check_references, table, key) for key, table in list_references(run).items()}
    checks = {**references, **_list_task_checks(run, folder, descriptions)}
    if run.prepare is not None:
        checks[KEY] = partial(_check_program, run)
    if run.evaluation.success or any(task.get_reward().functions for task in run.resolved_tasks):
        checks["evaluation.success"] = partial(_check_success, run, descriptions)
    if sinks := run.metrics.sinks:
        checks["metrics.sinks"] = lambda: CheckedInput(", ".join(check_sinks(sinks)))
    if run.learner.compiles:
        checks["learner.compile"] = lambda: CheckedInput(find_compiler(run.learner.device))
    for key, spec, known in (
        ("learner.loss.function", run.learner.loss.function, LOSSES),
        ("rl.advantage_estimator", run.rl.advantage_estimator, ESTIMATORS),
        ("rl.group_filter", run.rl.group_filter, FILTERS),
        ("rl.rollout_policy", run.rl.rollout_policy, POLICIES),
    ):
        if spec not in known:
            checks[key] = partial(check_import_path, key, spec, tuple(known))
    if other_run := run.learner.resume_from:
        checks["learner.resume_from"] = partial(_check_resumable, folder.expand_path(other_run))
    checkpoint = None if run.generates(run.model.checkpoint) else folder.expand_path(run.model.checkpoint)
    if checkpoint is not None:
        checks |= _list_model_checks(run, folder, checkpoint, descriptions)
    for key, describe in load_engine_code(run).list_input_checks(run, checkpoint).items():
        checks[key] = partial(_check_engine, describe)
    return checks | _list_dialogue_checks(run, folder, descriptions)  # these checks may need the model


def _check_success(run: RunConfig, descriptions: Mapping[str, TaskDescription]) -> CheckedInput:
    """Check the rule against each task. The checks of the tasks come first, because they add the descriptions."""
    described = [task for task in run.resolved_tasks if task.name in descriptions]
    warnings = [
        each for task in described for each in list_success_warnings(task, descriptions[task.name], run.success)
    ]
    return CheckedInput(f"correct answers have {run.success.describe()}", tuple(warnings))


def _check_program(run: RunConfig) -> CheckedInput:
    try:
        find_prepared_model(run)
    except UnusableInput as error:
        raise UnusableInput(str(error).removeprefix(f"{KEY}: ")) from error
    return CheckedInput("the program accepts the configuration")


def _check_engine(describe: Callable[[], str]) -> CheckedInput:
    return CheckedInput(describe())


def _list_model_checks(
    run: RunConfig, folder: RunFolder, checkpoint: Path, descriptions: Mapping[str, TaskDescription]
) -> dict[str, InputCheck]:
    checks: dict[str, InputCheck] = {}
    tokens = () if all(task.get_dialogue().renderer for task in run.resolved_tasks) else (TURN_START, TURN_END)
    has_weights = not (run.evaluation.only and run.servers.urls)
    checks["model.checkpoint"] = partial(_check_checkpoint, checkpoint, run, tokens, has_weights)
    if (lora := get_lora_options(run.learner)) is not None:
        checks["learner.lora.targets"] = partial(_check_lora_targets, checkpoint, lora)
    if run.determinism == "strict":
        checks["determinism"] = partial(_check_strict_model, checkpoint)
    for task in run.resolved_tasks:
        key, check = f"{task.key_prefix}dialogue.stop_tokens", partial(_check_stop_tokens, checkpoint, task)
        if task.get_dialogue().renderer:
            key = f"{task.key_prefix}dialogue.renderer"
            check = partial(_check_renderer, checkpoint, task, descriptions)
        checks[key] = check
    if not run.evaluation.only:
        checks["main memory"] = partial(_check_main_memory, checkpoint, run)
        checks["space"] = partial(_check_space, checkpoint, folder.path, run)
    return checks


def _list_task_checks(
    run: RunConfig, folder: RunFolder, descriptions: dict[str, TaskDescription]
) -> dict[str, InputCheck]:
    """List the checks of each task's code, and then of its rows: the rows' layout depends on the code."""
    checks: dict[str, InputCheck] = {}
    for task in run.resolved_tasks:
        prefix, training = task.key_prefix, make_training_report(run.data.max_bad_rows)
        if task.import_path:
            checks[f"{prefix}import"] = partial(check_task, task, descriptions)
        else:
            descriptions[task.name] = DEFAULT_TASK
        for name, spec in task.get_reward().functions.items():
            if spec != MATH:
                checks[f"{prefix}reward.functions.{name}"] = partial(check_reward_function, task, name, spec)
        train_key, test_key = (f"{prefix}data", f"{prefix}test") if task.name else ("data.train", "data.test")
        train_remedy = f"set {train_key} to a file of questions"
        test_remedy = f"set {test_key} to a file of questions, or evaluation.questions = 0"
        if run.evaluation.only:
            test_remedy = "name the questions with --set NAME=FILE"
        for key, file, remedy, report in (
            (train_key, "" if run.evaluation.only else task.data, train_remedy, training),
            (test_key, _get_test_file(run, task), test_remedy, QuestionReport(training)),
            *_list_evaluation_files(run, task, training),
        ):
            if file and not run.generates(file):
                check = partial(check_questions, task, descriptions, report)
                checks[key] = partial(check_data, folder.expand_path(file), remedy, check)
    return checks


def _list_dialogue_checks(
    run: RunConfig, folder: RunFolder, descriptions: Mapping[str, TaskDescription]
) -> dict[str, InputCheck]:
    checks: dict[str, InputCheck] = {}
    for key, file in (run.sft.files | run.sft.validation_files).items():
        if run.sft.is_enabled and not run.generates(file.data):
            check = partial(check_dialogues, run, descriptions, file)
            remedy = f"set {key} to a file of dialogues, or {'sft.steps' if run.sft.steps else 'sft.epochs'} = 0"
            checks[key] = partial(check_data, folder.expand_path(file.data), remedy, check)
    return checks


def _get_test_file(run: RunConfig, task: TaskConfig) -> str:
    return task.test if run.evaluation.questions and not run.evaluation.sets else ""


def _list_evaluation_files(
    run: RunConfig, task: TaskConfig, training: QuestionReport
) -> Iterator[tuple[str, str, str, QuestionReport]]:
    """Yield key, file, remedy and an empty report of each of [[evaluation.sets]] that belongs to the task."""
    if run.evaluation.questions and run.evaluation.sets:
        for each in run.resolved_evaluation_sets:
            if each.task == task.name:
                key = f"evaluation.sets.{each.name}.data"
                yield key, each.data, "set it to a file of questions", QuestionReport(training)


# ---------------------------------------------------------------- model


def _check_checkpoint(folder: Path, run: RunConfig, tokens: Sequence[str], has_weights: bool) -> CheckedInput:
    """Check the checkpoint. `tokens`: the tokens of the roles. `has_weights` is false if only a server has weights."""
    if not folder.is_dir():
        raise UnusableInput(f"{folder}: no such folder; set it to the folder of a supported model (docs/models.md)")
    config = load_model_config(folder)
    if config.max_position_embeddings < run.sequence_tokens:
        raise UnusableInput(
            f"{folder / 'config.json'}: max_position_embeddings is {config.max_position_embeddings}, but a trajectory "
            f"has up to {run.sequence_keys} = {run.sequence_tokens} tokens"
        )
    tokenizer = load_tokenizer(folder)
    for token in tokens:
        tokenizer.get_token_id(token)
    check_vocabulary(config, tokenizer)
    described = f"{folder}: {config.num_layers} layers of width {config.hidden_size}"
    return CheckedInput(f"{described}, {check_weight_shapes(folder):,} parameters" if has_weights else described)


def _check_resumable(checkpoint: Path) -> CheckedInput:
    if not is_resumable(checkpoint):
        raise UnusableInput(
            f"{checkpoint}: no trainer/state.json; set it to a checkpoint, runs/NAME/checkpoints/step_NNNNNN"
        )
    state = read_trainer_state(checkpoint)
    if state.stage != "rl":
        raise UnusableInput(f"{checkpoint}: a checkpoint of the cold start; set it to one of RL: step_NNNNNN")
    return CheckedInput(f"{checkpoint}: after {state.step} steps")


def _check_lora_targets(folder: Path, options: LoraOptions) -> CheckedInput:
    check_lora_targets(load_model_config(folder), options)
    return CheckedInput(", ".join(options.targets))


def _check_strict_model(folder: Path) -> CheckedInput:
    config = load_model_config(folder)
    if config.experts is not None:
        raise UnusableInput(
            f'{folder / "config.json"}: model_type is {config.model_type}; its experts depend on the batch, and "strict" '
            'needs a model without experts; set determinism to "fast"'
        )
    return CheckedInput(f"strict; {config.model_type} has no experts")


def _check_renderer(folder: Path, task: TaskConfig, descriptions: Mapping[str, TaskDescription]) -> CheckedInput:
    config, tokenizer = task.get_dialogue(), load_tokenizer(folder)
    renderer = build_renderer(config, descriptions.get(task.name, DEFAULT_TASK), tokenizer)
    stop_tokens = tokenizer.decode(renderer.stop_token_ids)
    return CheckedInput(f"{config.renderer}, with the stop tokens {stop_tokens}")


def _check_stop_tokens(folder: Path, task: TaskConfig) -> CheckedInput:
    tokenizer, texts = load_tokenizer(folder), task.get_dialogue().stop_tokens
    return CheckedInput(", ".join(f"{text} is token {tokenizer.get_token_id(text)}" for text in texts))


# ---------------------------------------------------------------- memory and space


def _check_main_memory(checkpoint: Path, run: RunConfig) -> CheckedInput:
    """Compare the needs with the memory, without activations, sandboxes and SGLang servers."""
    config, num_parameters = load_model_config(checkpoint), count_parameters(checkpoint)
    weights_bytes = num_parameters * _FLOAT32_BYTES
    in_main_memory = run.learner.device == "cpu"
    held, trained = count_trained_parameters(config, run)
    copies = run.learner.dp_replicate / run.cluster.learner_nodes
    model_bytes = round(copies * weights_bytes)
    training_bytes = round(copies * _FLOAT32_BYTES * (held + (1 + run.optimizer_moments) * trained))
    needs = {"the learner's weights, gradients and optimizer": training_bytes} if in_main_memory else {}
    needs["weights in shared memory"] = _count_shared_bytes(config, num_parameters, run)
    if run.learner.loss.kl_coef and in_main_memory and not run.learner.lora.rank:
        needs["the reference model (learner.loss.kl_coef)"] = model_bytes
    if ENGINE_KINDS[run.engine.kind].in_process and run.engine.device == "cpu":
        value_bytes = 4 if run.engine.dtype == "float32" else 2
        engine_bytes = weights_bytes * value_bytes // _FLOAT32_BYTES
        engine_bytes += config.count_cache_values() * run.engine.kv_tokens * value_bytes
        needs["engines (engine.num_engines, engine.kv_tokens)"] = run.engine.num_engines * engine_bytes
    needed = sum(needs.values())
    available, total = read_memory_bytes()
    parts = ", ".join(f"{format_bytes(size)} for {purpose}" for purpose, size in needs.items())
    if needed > total:
        raise UnusableInput(
            f"the run needs at least {format_bytes(needed)} ({parts}), but the machine or its cgroup has "
            f"{format_bytes(total)}; use a smaller model.checkpoint or a machine with more memory"
        )
    description = f"{format_bytes(needed)} of {format_bytes(total)}: {parts}"
    if needed > available:
        return CheckedInput(description, (f"only {format_bytes(available)} are available; stop other programs",))
    return CheckedInput(description)


def _count_shared_bytes(config: DecoderConfig, num_parameters: int, run: RunConfig) -> int:
    return count_slot_bytes(config, num_parameters, run) + count_folder_bytes(num_parameters, run)


def read_memory_bytes() -> tuple[int, int]:
    """Return (available, total) memory in bytes, both bounded by the cgroup's limit."""
    lines = [line.split() for line in read_kernel_file("/proc/meminfo").splitlines()]
    kib = {words[0].rstrip(":"): int(words[1]) for words in lines}
    available, total = kib["MemAvailable"] * 1024, kib["MemTotal"] * 1024
    limit, used = read_kernel_file("/sys/fs/cgroup/memory.max"), read_kernel_file("/sys/fs/cgroup/memory.current")
    if limit.isdigit() and used.isdigit():
        available, total = min(available, int(limit) - int(used)), min(total, int(limit))
    return available, total


def read_kernel_file(path: str) -> str:
    """Return the file's text, or an empty text if the kernel lacks that interface."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _check_space(checkpoint: Path, run_folder: Path, run: RunConfig) -> CheckedInput:
    """Check the space for weights in shared memory, and for checkpoints on disk: the cold start's, the last, the best
    one, and the checkpoint being written.

    A resumed run needs no further space for the checkpoints that it has.
    """
    num_parameters = count_parameters(checkpoint)
    parameter_bytes = num_parameters * _FLOAT32_BYTES
    saved_bytes = sum(path.stat().st_size for path in run_folder.glob("checkpoints/*/**/*") if path.is_file())
    existing = next(path for path in (run_folder.absolute(), *run_folder.absolute().parents) if path.exists())
    versions, kept = run.num_weight_versions, run.learner.checkpoints.keep
    folders = f" and {count} in folders for servers" if (count := count_folders(run)) else ""
    kept += 2 if run.evaluation.saves_evaluated_steps else 0  # the best checkpoint, and the one in evaluation
    saved_copies = 2 + run.optimizer_moments  # the weights, and at most one exported model
    copies = (kept + 3) * saved_copies
    if run.learner.lora.rank:  # each checkpoint has an exported model; the frozen weights are saved once
        copies = kept + 3 + saved_copies
    needs = {
        "/dev/shm": (
            Path("/dev/shm"),
            _count_shared_bytes(load_model_config(checkpoint), num_parameters, run),
            f"{versions} versions of the weights{folders}",
        ),
        "the disk of the run": (
            existing,
            max(0, copies * parameter_bytes - saved_bytes),
            f"checkpoints (learner.checkpoints.keep = {run.learner.checkpoints.keep})",
        ),
    }
    described: list[str] = []
    for place, (path, needed, purpose) in needs.items():
        free = shutil.disk_usage(path).free
        if free < needed:
            raise UnusableInput(
                f"{place} has {format_bytes(free)} free, but {purpose} take {format_bytes(needed)}; "
                "free some space, or use a smaller model.checkpoint"
            )
        described.append(f"{place}: {format_bytes(needed)} of {format_bytes(free)}")
    return CheckedInput("; ".join(described))


def find_compiler(device: str) -> str:
    """Return the path of the compiler that torch needs. Raises UnusableInput without it or without Python's headers.

    On a CPU, torch compiles its C++ code with $CXX, by default g++. For a GPU, Triton compiles the C code that starts its
    kernels, with $CC, gcc or clang.
    """
    variable, commands, package = ("CC", ("gcc", "clang"), "gcc") if device == "cuda" else ("CXX", ("g++",), "g++")
    chosen = os.environ.get(variable)
    commands = (chosen,) if chosen else commands
    found = next((path for command in commands if (path := shutil.which(command))), None)
    if found is None:
        raise UnusableInput(
            f"no compiler ({' or '.join(commands)}) on PATH; install {package}, or set {variable}, or set "
            "learner.compile = false"
        )
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.exists():
        raise UnusableInput(f"{header} is absent; install python3-dev, or set learner.compile = false")
    return found
