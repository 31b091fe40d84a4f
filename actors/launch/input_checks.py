"""Checks of a run's inputs by configuration key, before anything is created: for the launcher and `asterism doctor`.

Nothing here imports torch. Of a long data file only the first rows are checked, so that the start takes seconds: the
head reads all questions before the first step, and the learner all dialogues.
"""

import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from configs.errors import UnusableInput
from configs.run_folder import RunFolder
from configs.schema import RunConfig
from engine.data.data_files import DatasetError, list_data_files
from engine.data.datasets import QuestionReport, read_problems
from engine.data.sft_dialogues import count_sft_dialogues
from engine.model.model_config import check_weight_shapes, load_model_config
from engine.model.tokenizer import check_vocabulary, load_tokenizer
from engine.model.weight_files import count_parameters
from policies.dialogue.chat_format import TURN_END, TURN_START, build_dialogue_format
from policies.groups.advantages import ESTIMATORS, FILTERS
from policies.losses import LOSSES
from tasks.rewards.answer_scorer import MATH
from tasks.rewards.reward_functions import RewardSettings

_MAX_CHECKED_ROWS = 100_000  # of a data file: about a second
_GIB = 2**30
_FLOAT32_BYTES = 4
_SAVED_COPIES = 3  # in a checkpoint: the weights and two moments of the optimizer
_TRAINED_COPIES = 4  # in the learner's memory: also gradients
_DATA_REMEDIES = {
    "data.train": "set data.train to a file of questions",
    "data.test": "set data.test to a file of questions, or evaluation.questions = 0",
    "sft.data": "set sft.data to a file of dialogues, or sft.steps = 0",
}


class CheckedInput(NamedTuple):
    description: str
    warnings: tuple[str, ...] = ()


InputCheck = Callable[[], CheckedInput]


def check_inputs(run: RunConfig) -> list[str]:
    """Descriptions of the data files, and warnings. Raises UnusableInput with the key of the first unusable input."""
    lines: list[str] = []
    for key, check in list_input_checks(run).items():
        try:
            checked = check()
        except UnusableInput as error:
            raise UnusableInput(f"{key}: {error}") from error
        lines += [f"{key}: {checked.description}"] if key in _DATA_REMEDIES else []
        lines += [f"warning: {key}: {warning}" for warning in checked.warnings]
    return lines


def list_input_checks(run: RunConfig) -> Mapping[str, InputCheck]:
    """By key: a check that raises UnusableInput. Inputs that [tiny] generates have none."""
    folder = RunFolder(Path(run.runs_folder) / run.name)
    training = QuestionReport()
    data = {
        "data.train": (run.data.train, partial(_check_questions, training)),
        "data.test": (
            run.data.test if run.evaluation.questions else "",
            partial(_check_questions, QuestionReport(training)),
        ),
        "sft.data": (run.sft.data if run.sft.steps else "", partial(_check_dialogues, run)),
    }
    checks: dict[str, InputCheck] = {
        key: partial(_check_data, folder.expand_path(path), _DATA_REMEDIES[key], check)
        for key, (path, check) in data.items()
        if path and not _is_generated(run, path)
    }
    for name, spec in run.reward.functions.items():
        if spec != MATH:
            checks[f"reward.functions.{name}"] = partial(_check_reward_function, name, spec)
    for key, spec, known in (
        ("learner.loss", run.learner.loss, LOSSES),
        ("rl.advantage_estimator", run.rl.advantage_estimator, ESTIMATORS),
        ("rl.group_filter", run.rl.group_filter, FILTERS),
    ):
        if spec not in known:
            checks[key] = partial(_check_import_path, key, spec, tuple(known))
    if not _is_generated(run, run.model.checkpoint):
        checkpoint = folder.expand_path(run.model.checkpoint)
        checks["model.checkpoint"] = partial(_check_checkpoint, checkpoint, run.dialogue.sequence_tokens)
        checks["dialogue.stop_tokens"] = partial(_check_stop_tokens, checkpoint, run.dialogue.stop_tokens)
        checks["main memory"] = partial(_check_main_memory, checkpoint, run)
        checks["space"] = partial(_check_space, checkpoint, folder.path, run)
    return checks


def _is_generated(run: RunConfig, path: str) -> bool:
    return run.tiny is not None and path.startswith("$RUN")


# ---------------------------------------------------------------- data


def _check_data(path: Path, remedy: str, check: Callable[[Path], CheckedInput]) -> CheckedInput:
    try:
        list_data_files(path)
    except DatasetError as error:
        raise UnusableInput(f"{error}; {remedy}") from None
    return check(path)


def _check_questions(report: QuestionReport, path: Path) -> CheckedInput:
    for _ in read_problems(path, report, _MAX_CHECKED_ROWS):
        pass
    return CheckedInput(f"{path}: {report.describe()}{_describe_limit(report.num_rows)}", tuple(report.list_warnings()))


def _check_dialogues(run: RunConfig, path: Path) -> CheckedInput:
    count = count_sft_dialogues(path, build_dialogue_format(run.dialogue), _MAX_CHECKED_ROWS)
    return CheckedInput(f"{path}: {count:,} dialogues{_describe_limit(count)}")


def _describe_limit(num_rows: int) -> str:
    return f" in the first {num_rows:,} rows; the others are checked later" if num_rows == _MAX_CHECKED_ROWS else ""


def _check_reward_function(name: str, spec: str) -> CheckedInput:
    settings = msgspec.json.encode(RewardSettings({name: spec}, "", 0.0)).decode()
    return _check_by_program(f"reward.functions.{name}", spec, "tasks.rewards.reward_worker", settings)


def _check_import_path(key: str, spec: str, known: Sequence[str]) -> CheckedInput:
    if ":" not in spec:
        raise UnusableInput(f'"{spec}" is unknown; known: {", ".join(known)}, or an import path such as "file.py:name"')
    return _check_by_program(key, spec, "configs.import_path", key, spec)


def _check_by_program(key: str, spec: str, module: str, *arguments: str) -> CheckedInput:
    """In another process, because it runs code of the user."""
    command = [sys.executable, "-m", module, *arguments]
    found = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if found.returncode:
        last_line = found.stderr.strip().rpartition("\n")[2]
        raise UnusableInput(last_line.removeprefix(f"{key}: ") or f"exit code {found.returncode}")
    return CheckedInput(spec)


# ---------------------------------------------------------------- model


def _check_checkpoint(folder: Path, sequence_tokens: int) -> CheckedInput:
    if not folder.is_dir():
        raise UnusableInput(f"{folder}: no such folder; set it to the folder of a model with the Qwen3 architecture")
    config = load_model_config(folder)
    if config.max_position_embeddings < sequence_tokens:
        raise UnusableInput(
            f"{folder / 'config.json'}: max_position_embeddings is {config.max_position_embeddings}, but a trajectory "
            f"has up to dialogue.prompt_tokens + response_tokens = {sequence_tokens} tokens"
        )
    tokenizer = load_tokenizer(folder)
    for token in (TURN_START, TURN_END):
        tokenizer.get_token_id(token)
    check_vocabulary(config, tokenizer)
    num_parameters = check_weight_shapes(folder)
    return CheckedInput(
        f"{folder}: {config.num_layers} layers of width {config.hidden_size}, {num_parameters:,} parameters"
    )


def _check_stop_tokens(folder: Path, texts: Sequence[str]) -> CheckedInput:
    tokenizer = load_tokenizer(folder)
    return CheckedInput(", ".join(f"{text} is token {tokenizer.get_token_id(text)}" for text in texts))


# ---------------------------------------------------------------- memory and space


def _check_main_memory(checkpoint: Path, run: RunConfig) -> CheckedInput:
    """Without activations, and without the memory of sandboxes and SGLang servers."""
    weights_bytes = count_parameters(checkpoint) * _FLOAT32_BYTES
    needs = {
        "the learner's weights, gradients and optimizer": _TRAINED_COPIES * weights_bytes // run.cluster.learner_nodes,
        "weights in shared memory": _count_versions(run) * weights_bytes,
    }
    if run.engine.kind == "embedded" and run.engine.device == "cpu":
        value_bytes = 4 if run.engine.dtype == "float32" else 2
        engine_bytes = weights_bytes * value_bytes // _FLOAT32_BYTES
        engine_bytes += load_model_config(checkpoint).count_cache_values() * run.engine.kv_tokens * value_bytes
        needs["engines (engine.num_engines, engine.kv_tokens)"] = run.engine.num_engines * engine_bytes
    needed = sum(needs.values())
    available, total = read_memory_bytes()
    parts = ", ".join(f"{size / _GIB:.1f} GiB for {purpose}" for purpose, size in needs.items())
    if needed > total:
        raise UnusableInput(
            f"the run needs at least {needed / _GIB:.1f} GiB ({parts}), but the machine or its cgroup has "
            f"{total / _GIB:.1f} GiB; use a smaller model.checkpoint or a machine with more memory"
        )
    description = f"{needed / _GIB:.1f} of {total / _GIB:.1f} GiB: {parts}"
    if needed > available:
        return CheckedInput(description, (f"only {available / _GIB:.1f} GiB are available; stop other programs",))
    return CheckedInput(description)


def read_memory_bytes() -> tuple[int, int]:
    """(available, total), both bounded by the cgroup's limit."""
    lines = [line.split() for line in read_kernel_file("/proc/meminfo").splitlines()]
    kib = {words[0].rstrip(":"): int(words[1]) for words in lines}
    available, total = kib["MemAvailable"] * 1024, kib["MemTotal"] * 1024
    limit, used = read_kernel_file("/sys/fs/cgroup/memory.max"), read_kernel_file("/sys/fs/cgroup/memory.current")
    if limit.isdigit() and used.isdigit():
        available, total = min(available, int(limit) - int(used)), min(total, int(limit))
    return available, total


def read_kernel_file(path: str) -> str:
    """The file's text; empty if the kernel lacks that interface."""
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _check_space(checkpoint: Path, run_folder: Path, run: RunConfig) -> CheckedInput:
    """Weights in shared memory, and checkpoints on disk: those of the cold start, the last step and one being written.

    The checkpoints of a run that resumes take no further space.
    """
    parameter_bytes = count_parameters(checkpoint) * _FLOAT32_BYTES
    saved_bytes = sum(path.stat().st_size for path in run_folder.glob("checkpoints/*/**/*") if path.is_file())
    existing = next(path for path in (run_folder.absolute(), *run_folder.absolute().parents) if path.exists())
    versions, kept = _count_versions(run), run.learner.keep_checkpoints
    needs = {
        "/dev/shm": (Path("/dev/shm"), versions * parameter_bytes, f"{versions} versions of the weights"),
        "the disk of the run": (
            existing,
            max(0, (kept + 3) * _SAVED_COPIES * parameter_bytes - saved_bytes),
            f"checkpoints (learner.keep_checkpoints = {kept})",
        ),
    }
    described: list[str] = []
    for place, (path, needed, purpose) in needs.items():
        free = shutil.disk_usage(path).free
        if free < needed:
            raise UnusableInput(
                f"{place} has {free / _GIB:.1f} GiB free, but {purpose} take {needed / _GIB:.1f} GiB; "
                "free some space, or use a smaller model.checkpoint"
            )
        described.append(f"{place}: {needed / _GIB:.1f} of {free / _GIB:.1f} GiB")
    return CheckedInput("; ".join(described))


def _count_versions(run: RunConfig) -> int:
    """Slots of engine.learner.learner_rank in shared memory."""
    return max(2, run.rl.max_staleness + 1)
