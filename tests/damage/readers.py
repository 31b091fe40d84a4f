"""Reads each kind of file in a run folder as the commands do, with results that can be compared.

Every file of a run folder has a kind here. A kind without readers states the reason.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import msgspec
from torch import Tensor

from asterism.actors.launch.run_manifest import check_run_files
from asterism.actors.metrics_file import read_steps_written
from asterism.actors.runtime.logged_problems import read_problem_counts
from asterism.analysis.evaluation.answer_records import read_answers
from asterism.analysis.metric_lines import read_metric_lines
from asterism.analysis.summary import read_weakest_isolation
from asterism.analysis.summary_table import read_summary
from asterism.analysis.utilization.report import compute_utilization, to_json
from asterism.bus.event_log.reader import list_removed_events, read_events
from asterism.configs.errors import UnusableInput
from asterism.configs.file_manifest import check_folder
from asterism.configs.load import load_run
from asterism.configs.run_folder import RunFolder
from asterism.engine.data.data_files import read_rows
from asterism.engine.data.task_inputs import read_task_descriptions
from asterism.engine.data.token_files import map_token_file
from asterism.engine.export.chat_files import read_serving_facts
from asterism.engine.hf.model_config import load_model_config
from asterism.engine.hf.tokenizer import load_tokenizer
from asterism.engine.learner.checkpoints.best_checkpoint import read_best_checkpoint
from asterism.engine.learner.checkpoints.checkpoint_folders import (
    find_training_damage,
    get_tensors_folder,
    read_trainer_state,
)
from asterism.engine.learner.checkpoints.checkpoint_weights import open_checkpoint_weights
from asterism.engine.learner.checkpoints.training_state import read_whole_weights
from asterism.engine.model.hf_checkpoint import load_model

Reader = Callable[[RunFolder, Path], object]  # takes the run folder and the file; raises UnusableInput for damage


class FileKind(NamedTuple):
    pattern: str  # pattern of the path in the run folder
    readers: tuple[Reader, ...]
    reason: str = ""  # why the kind has no readers


def _resume(folder: RunFolder, _file: Path) -> object:
    return check_run_files(folder)


def _read_events(folder: RunFolder, file: Path) -> object:
    log = file.with_name(file.name.removesuffix("-wal").removesuffix("-shm"))
    kinds = ["StepCollected", "TrajectoryFinished"]
    return (
        list(read_events(log)),
        list(read_events(log, kinds=kinds)),
        list(read_events(log, trajectory=3, with_group=True)),
        list_removed_events(log),
    )


def _report(folder: RunFolder, _file: Path) -> object:
    return to_json(compute_utilization(folder.logs)), read_weakest_isolation(folder)


def _read_metrics(folder: RunFolder, _file: Path) -> object:
    return msgspec.json.encode(read_metric_lines(folder.path)._asdict()), read_steps_written(folder.metrics)


def _read_checkpoint(_folder: RunFolder, file: Path) -> Path:
    return next(path for path in file.parents if path.parent.name == "checkpoints")


def _hash_weights(weights: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]) -> str:
    digest = hashlib.sha256()
    for _, tensor in sorted(dict(weights).items()):
        digest.update(tensor.detach().numpy().tobytes())
    return digest.hexdigest()


def _export(folder: RunFolder, file: Path) -> object:
    opened = open_checkpoint_weights(_read_checkpoint(folder, file), None)
    return _hash_weights(opened.read(tuple(opened.shapes)))


def _load(folder: RunFolder, file: Path) -> object:
    checkpoint = _read_checkpoint(folder, file)
    load_tokenizer(checkpoint)
    return _hash_weights(load_model(checkpoint).named_parameters()), msgspec.to_builtins(read_serving_facts(checkpoint))


def _serve(folder: RunFolder, file: Path) -> object:
    return check_folder(_read_checkpoint(folder, file))


def _resume_training(folder: RunFolder, file: Path) -> object:
    """Read the training state. Damage is an error here, although a resume sets the damaged checkpoint aside."""
    checkpoint = _read_checkpoint(folder, file)
    if (damage := find_training_damage(checkpoint)) is not None:
        raise UnusableInput(damage)
    shapes = load_model_config(checkpoint).compute_weight_shapes()
    return read_trainer_state(checkpoint), _hash_weights(read_whole_weights(get_tensors_folder(checkpoint), shapes))


def _map_tokens(_folder: RunFolder, file: Path) -> object:
    mapped = map_token_file(file.parent)
    return [array.tobytes() for array in mapped[:4]], mapped.report


KINDS: Sequence[FileKind] = (
    FileKind("asterism-manifest.json", (_resume,)),
    FileKind("config.toml", (lambda folder, _: load_run(folder.config), _resume)),
    FileKind("metrics.jsonl", (_read_metrics, _resume)),
    FileKind("answers.jsonl", (lambda folder, _: list(read_answers(folder.answers)), _resume)),
    FileKind("summary.json", (lambda folder, _: read_summary(folder.path), _resume)),
    FileKind("tasks.json", (lambda folder, _: read_task_descriptions(folder), _resume)),
    FileKind("problems.json", (lambda folder, _: read_problem_counts(folder), _resume)),
    FileKind("data.json", (_resume,)),
    FileKind("boots", (_resume,)),
    FileKind("events/*.sqlite", (_read_events, _resume)),
    FileKind("events/*.sqlite-wal", (_read_events, _resume)),
    FileKind("events/*.sqlite-shm", (_read_events,)),
    FileKind("logs/*.jsonl", (_report, _resume)),
    FileKind("logs/*.out", (_resume,)),
    FileKind("checkpoints/best.json", (lambda folder, _: read_best_checkpoint(folder.checkpoints), _resume)),
    FileKind("checkpoints/init/*", (_load, _serve)),
    FileKind("checkpoints/*/trainer/state.json", (_resume_training, _serve)),
    FileKind("checkpoints/*/trainer/tensors/*", (_resume_training, _export, _serve)),
    FileKind("checkpoints/*/*", (_load, _resume_training, _serve)),
    FileKind("data/*.jsonl", (lambda _, file: list(read_rows(file)),)),
    FileKind("data/tokenizer/tokenizer.json", (lambda _, file: load_tokenizer(file.parent).decode(range(300)),)),
    FileKind("data/*", (lambda folder, _: check_folder(folder.data),)),
    FileKind("data/tokenizer/*", (lambda folder, _: check_folder(folder.data),)),
    FileKind("dialogue_tokens/*/*", (_map_tokens,)),
    FileKind("batches/*", (), "a resume deletes them; of a running launch only its restarted learner reads them"),
    FileKind("batches/*/*", (), "as batches/*"),
    FileKind("lock", (), "the kernel's lock counts; the number in it is shown"),
    FileKind("*.png", (), "pictures that no command reads"),
    FileKind("*.svg", (), "pictures that no command reads"),
    FileKind("*.html", (), "pages that no command reads"),
    FileKind("utilization.json", (), "a result that no command reads; asterism report writes it again"),
)


def find_kind(folder: RunFolder, file: Path) -> FileKind | None:
    relative = PurePosixPath(file.relative_to(folder.path).as_posix())
    return next((kind for kind in KINDS if _matches(relative, kind.pattern)), None)


def _matches(path: PurePosixPath, pattern: str) -> bool:
    return len(path.parts) == len(PurePosixPath(pattern).parts) and path.match(pattern)
