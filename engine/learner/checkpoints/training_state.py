"""The state of training as tensors of torch.distributed.checkpoint (DCP), for any number of ranks.

The names of the tensors are `model.PARAMETER`, `optimizer.state.PARAMETER.MOMENT`, `random.cpu_RANK` and
`random.cuda_RANK`. Only the checkpoint of step 0 has the parameters that are frozen in RL. The schedule and the other
options of the optimizer follow from the configuration, and from the stage and the step in state.json
(asterism.engine.learner.checkpoints.checkpoint_folders).

Each rank reads and writes only its own shards, in float32.
"""

import warnings
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_tensors
from torch.distributed.checkpoint.state_dict_saver import save as save_tensors
from torch.optim import Optimizer

from asterism.configs.file_manifest import check_file
from asterism.engine.hf.weight_files import CheckpointError
from asterism.engine.learner.checkpoints.checkpoint_folders import FIRST_CHECKPOINT, get_tensors_folder
from asterism.engine.learner.checkpoints.tensor_reader import TensorReader, check_tensor_files
from asterism.engine.learner.distributed import RankGroup

StateDict = dict[str, Any]

_BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)  # makes the state readable for another number of ranks


def capture_training_state(model: nn.Module, optimizers: Sequence[Optimizer], step: int, ranks: RankGroup) -> StateDict:
    """Return the state, which must be written before the next update, because only random states are copies."""
    state: StateDict = {"model": _list_weights(model, step), "random": _capture_random_states(ranks)}
    if step:  # before the first step there is no optimizer state, and get_optimizer_state_dict would create one
        moments = _select_moments(_get_optimizer_state(model, optimizers))
        state["optimizer"] = {name: each.detach() for name, each in moments.items()}  # StateOffload can move moments
    return state


def write_training_state(folder: Path, state: StateDict, ranks: RankGroup, on_written: Callable[[], None]) -> None:
    """Write the state. Every rank calls it; `on_written` is called as soon as this rank no longer reads the state.

    The files can still be in the page cache only. If one rank fails, all ranks raise RuntimeError with its traceback.
    """
    writer = _ReproducibleWriter(folder, on_written)
    group = ranks.checkpoint_group
    try:
        with _without_process_group_warning():
            save_tensors(state, storage_writer=writer, process_group=group, no_dist=group is None)
    except CheckpointException as error:  # this class is not an Exception
        raise RuntimeError(str(error)) from error


def load_training_state(
    checkpoint: Path, model: nn.Module, optimizers: Sequence[Optimizer], step: int, ranks: RankGroup
) -> None:
    """Load the state. Every rank calls it. A rank without a saved random state keeps its current state. Raises
    CheckpointError and DamagedFile."""
    reader = _open_tensors(checkpoint, ranks)
    if frozen := _list_weights(model, 0).keys() - _list_weights(model, step):
        _load_frozen_weights(checkpoint, model, ranks, frozen)
    optimizer_state = _get_optimizer_state(model, optimizers) if step else {}
    saved = reader.read_metadata().state_dict_metadata
    random_states = {name: each for name, each in _capture_random_states(ranks).items() if f"random.{name}" in saved}
    moments = _select_moments(optimizer_state)
    state: StateDict = {"model": _list_weights(model, step), "optimizer": moments, "random": random_states}
    _load(reader, state, no_dist=ranks.world_size == 1)
    if step:
        set_optimizer_state_dict(model, tuple(optimizers), optimizer_state | moments, options=_BY_NAME)
    _restore_random_states(random_states, ranks)


def load_weights(checkpoint: Path, model: nn.Module, ranks: RankGroup) -> None:
    """Load weights from a checkpoint with all weights. Every rank calls it. Raises CheckpointError and DamagedFile."""
    _load(_open_tensors(checkpoint, ranks), {"model": _list_weights(model, 0)}, no_dist=ranks.world_size == 1)


def _load_frozen_weights(checkpoint: Path, model: nn.Module, ranks: RankGroup, names: Collection[str]) -> None:
    base = checkpoint.with_name(FIRST_CHECKPOINT)
    if not base.exists():
        raise CheckpointError(f"{base}: missing. Only this checkpoint has the frozen weights of {checkpoint.name}")
    weights = {name: each for name, each in _list_weights(model, 0).items() if name in names}
    _load(_open_tensors(base, ranks), {"model": weights}, no_dist=ranks.world_size == 1)


def read_whole_weights(folder: Path, shapes: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """Read whole tensors in float32, on one rank. `folder`: the result of get_tensors_folder, with all files of DCP.

    Raises CheckpointError and DamagedFile.
    """
    for file in folder.iterdir():  # a checkpoint that is being written has no manifest yet
        check_file(file)
    weights = {name: torch.empty(tuple(shape)) for name, shape in shapes.items()}
    _load(TensorReader(folder), {"model": weights}, no_dist=True)
    return weights


def _open_tensors(checkpoint: Path, ranks: RankGroup) -> TensorReader:
    folder = get_tensors_folder(checkpoint)
    if not (folder / ".metadata").exists():
        raise CheckpointError(
            f"{folder}: no training state. An older version has written this checkpoint, or its files are missing; to "
            f"start a new run from its weights, set model.checkpoint = {str(checkpoint)!r} and sft.steps = 0"
        )
    check_tensor_files(checkpoint, folder, ranks)
    return TensorReader(folder)


def _load(reader: TensorReader, state: StateDict, *, no_dist: bool) -> None:
    """Load tensors into the memory of `state`."""
    try:
        with _without_process_group_warning():
            load_tensors(state, storage_reader=reader, no_dist=no_dist)
    except CheckpointException as error:  # this class is not an Exception
        first = next(iter(error.failures.values()))[0]
        raise CheckpointError(f"{reader.checkpoint_id}: {type(first).__name__}: {first}") from error


def _list_weights(model: nn.Module, step: int) -> dict[str, Tensor]:
    """Return the weights that a checkpoint of the step contains."""
    return {name: each.detach() for name, each in model.named_parameters() if each.requires_grad or step == 0}


def _get_optimizer_state(model: nn.Module, optimizers: Sequence[Optimizer]) -> StateDict:
    return get_optimizer_state_dict(model, tuple(optimizers), options=_BY_NAME)


def _select_moments(optimizer_state: StateDict) -> StateDict:
    """Leave out options such as betas, which DCP would store once per parameter."""
    return {name: each for name, each in optimizer_state.items() if name.startswith("state.")}


def _capture_random_states(ranks: RankGroup) -> dict[str, Tensor]:
    states = {f"cpu_{ranks.rank}": torch.get_rng_state()}
    if ranks.device.type == "cuda":
        states[f"cuda_{ranks.rank}"] = torch.cuda.get_rng_state(ranks.device)
    return states


def _restore_random_states(states: Mapping[str, Tensor], ranks: RankGroup) -> None:
    if (state := states.get(f"cpu_{ranks.rank}")) is not None:
        torch.set_rng_state(state)
    if (state := states.get(f"cuda_{ranks.rank}")) is not None:
        torch.cuda.set_rng_state(state, ranks.device)


class _ReproducibleWriter(FileSystemWriter):
    """A writer without the path and the random number that torch adds, so that equal states have equal bytes."""

    def __init__(self, folder: Path, on_written: Callable[[], None]) -> None:
        super().__init__(folder, sync_files=False)  # the caller synchronizes files and folders
        self._on_written = on_written

    def storage_meta(self) -> None:
        return None

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        written = super().write_data(plan, planner)
        self._on_written()
        return written


@contextmanager
def _without_process_group_warning() -> Generator[None]:
    """Suppress torch's warning about a missing process group, which torch gives even with no_dist."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
        yield
