"""Loads and runs the program of [prepare], which writes files below $RUN before the training (docs/tasks.md)."""

from typing import Any

import msgspec

from asterism.configs.atomic_write import raising_disk_errors
from asterism.configs.errors import UnusableInput
from asterism.configs.import_path import load_object
from asterism.configs.loading.error_messages import explain_problem
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.run_config import RunConfig
from asterism.configs.schema.schema_tree import Section
from asterism.engine.hf.model_config import DecoderConfig

PREPARE = "prepare"  # name of the process that runs the program
KEY = "prepare.import"


class PrepareProgram(Section, frozen=True):
    """The base class of programs. The fields of a subclass are the keys of prepare.parameters."""

    def check(self, run: RunConfig) -> DecoderConfig | None:
        """Return the configuration of the model that `prepare` writes, if any. Raises ValueError for a bad run."""

    def prepare(self, run: RunConfig, folder: RunFolder) -> None:
        """Write the files that the configuration names below $RUN. Raises ValueError and OSError."""
        raise NotImplementedError


def load_program(run: RunConfig) -> PrepareProgram:
    """Build the program of [prepare] from its parameters. Raises UnusableInput, which names the key."""
    assert run.prepare is not None
    path, parameters = run.prepare.import_path, run.prepare.parameters
    loaded: Any = load_object(path, KEY)
    if not (isinstance(loaded, type) and issubclass(loaded, PrepareProgram)):
        raise UnusableInput(f"{KEY}: {path} is no subclass of {PrepareProgram.__module__}:{PrepareProgram.__name__}")
    try:
        return msgspec.convert(parameters, loaded)
    except msgspec.ValidationError as error:
        names = ", ".join(loaded.__struct_fields__)
        problem = explain_problem(str(error), parameters, loaded)
        raise UnusableInput(f"prepare.parameters: {problem}; {path} takes {names}") from None


def find_prepared_model(run: RunConfig) -> DecoderConfig | None:
    """Check the run with its program. Return the configuration of the model that the program writes; None if the run
    has another model. Raises UnusableInput with the key."""
    program = load_program(run)
    try:
        model = program.check(run)
    except ValueError as error:
        raise UnusableInput(f"{KEY}: {type(program).__name__}: {error}") from error
    if model is None and run.generates(run.model.checkpoint):
        raise UnusableInput(f"{KEY}: the program makes no model; set model.checkpoint to the folder of a model")
    return model


def prepare_run(run: RunConfig, folder: RunFolder) -> None:
    """Run the program. Raises UnusableInput, DiskError, and the program's own exceptions."""
    with raising_disk_errors(folder.data):
        load_program(run).prepare(run, folder)
