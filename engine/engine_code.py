"""Defines what a package of an engine provides; asterism.configs.choices.engine_kinds lists the packages.

A module with an EngineCode imports no torch. Import paths name the parts that need torch, or that few commands use.
"""

import pkgutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from asterism.configs.choices.engine_kinds import ENGINE_KINDS, Servers
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.run_config import RunConfig
from asterism.engine.contract import Engine


class EngineStart(NamedTuple):
    """The arguments of an engine's factory."""

    run: RunConfig
    folder: RunFolder
    process: str  # name of the generator
    version: int  # version of the checkpoint's weights
    on_engine_lost: Callable[[str], object]  # argument: the cause; its caller closes the engine
    incarnation: int = 1  # counts the generator's starts

    @property
    def checkpoint(self) -> Path:
        return self.folder.expand_path(self.run.model.checkpoint)


class EngineCheck(NamedTuple):
    """A check of `asterism doctor`. `check` returns a description; UnusableInput means that a run would fail."""

    key: str
    check: Callable[[], str]
    remedy: str = ""


class EvaluatedModels(NamedTuple):
    """The models of running servers. A resumed evaluation must find the same models."""

    run: RunConfig  # the run with the names of the models
    description: Mapping[str, Any]  # description of the models for the provenance, next to the URLs


# Checks by key. Each returns a description, or raises UnusableInput. The checkpoint is None if the run creates it.
InputChecks = Mapping[str, Callable[[], str]]


def list_no_checks(run: RunConfig, checkpoint: Path | None) -> InputChecks:
    return {}


def describe_no_servers(run: RunConfig) -> Servers:
    return Servers()


class EngineCode(NamedTuple):
    factory: str  # import path of a function (EngineStart) -> Engine
    describe_servers: Callable[[RunConfig], Servers] = describe_no_servers  # raises ValueError if tables do not match
    list_input_checks: Callable[[RunConfig, Path | None], InputChecks] = list_no_checks  # checks before a run starts
    machine_checks: str = ""  # import path of (RunConfig, Path | None) -> Iterable[EngineCheck], for `asterism doctor`
    find_models: str = ""  # import path of (RunConfig) -> EvaluatedModels, for `asterism eval` of running servers

    def build(self, start: EngineStart) -> Engine:
        return pkgutil.resolve_name(self.factory)(start)

    def list_machine_checks(self, run: RunConfig, checkpoint: Path | None) -> Iterable[EngineCheck]:
        """Yield the checks in order: each check can depend on the results of earlier checks."""
        return pkgutil.resolve_name(self.machine_checks)(run, checkpoint) if self.machine_checks else ()


EMBEDDED = EngineCode(
    "asterism.engine.inference.embedded_factory:build_engine",
    machine_checks="asterism.engine.inference.embedded_factory:list_machine_checks",
)


def load_engine_code(run: RunConfig) -> EngineCode:
    return ENGINE_KINDS[run.engine.kind].load_code()


def find_evaluated_models(run: RunConfig) -> EvaluatedModels:
    """Find the models of the run's servers, if the run has servers. Raises UnusableInput with the server's URL."""
    path = load_engine_code(run).find_models
    return pkgutil.resolve_name(path)(run) if path and run.servers.urls else EvaluatedModels(run, {})
