"""Loads the object at the import path of a task (`import`): tools, an environment or a dialogue.

tools        a function, or a list of functions
environment  a class with `reset`; its other public methods are tools, or it has `describe_tools` and `call_tool`
dialogue     a class with `init` and `step`

A class may have the texts `system` and `instruction`, the defaults of the same keys of [dialogue].
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, cast, get_type_hints

import msgspec

from asterism.configs.errors import UnusableInput
from asterism.configs.import_path import load_object
from asterism.policies.tools.python_tools import PYTHON_TOOLS
from asterism.policies.tools.task_description import DEFAULT_SYSTEM, TaskDescription, TaskKind
from asterism.policies.tools.tool_schema import ToolSchema, ToolSchemaError, build_tool_schema
from asterism.tasks.contract import SANDBOX
from asterism.tasks.hosting.wire import HostSettings

_RESERVED = {"reset", "get_reward", "close"}
_EXPECTED = "a function, a list of functions, a class with `reset`, or a class with `init` and `step`"
_VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@functools.cache  # inspect.signature takes as long as a short call
def _takes_sandbox(method: Callable[..., object]) -> bool:
    return SANDBOX in inspect.signature(method).parameters


class LoadedTask:
    """The loaded object of a task. `functions` contains tools by name, for a task without a class."""

    def __init__(self, settings: HostSettings) -> None:
        """Load the object. Raises UnusableInput with the key."""
        self._key = f"{settings.name_key}import"
        self._parameters = settings.parameters
        loaded = load_object(settings.import_path, self._key)
        self.functions: dict[str, Callable[..., object]] = {}
        self._class: type[object] | None = None
        self.kind: TaskKind = "tools"
        if isinstance(loaded, type):
            self._class, self.kind = loaded, self._find_kind(loaded)
            self._check_parameters(loaded, f"{settings.name_key}parameters")
        else:
            functions = cast(list[object], loaded) if isinstance(loaded, list | tuple) else [loaded]
            self._add_functions(functions)
            if settings.parameters:
                raise UnusableInput(f"{settings.name_key}parameters: only a class takes parameters")

    @property
    def instance_class(self) -> type[object] | None:
        return self._class

    @property
    def is_replayable(self) -> bool:
        return bool(getattr(self._class, "replayable", False))

    @property
    def has_reward(self) -> bool:
        return callable(getattr(self._class, "get_reward", None))

    @property
    def has_dynamic_tools(self) -> bool:
        return callable(getattr(self._class, "describe_tools", None))

    @staticmethod
    def takes_sandbox(function: Callable[..., object]) -> bool:
        if inspect.ismethod(function):
            return _takes_sandbox(function.__func__)
        return SANDBOX in inspect.signature(function).parameters

    def create(self, sandbox: object) -> object:
        """Create an instance. Raises the constructor's exceptions."""
        assert self._class is not None
        extra = {SANDBOX: sandbox} if self.takes_sandbox(self._class) else {}
        return self._class(**self._parameters, **extra)

    async def describe(self) -> TaskDescription:
        """Describe the task. Raises UnusableInput with the key."""
        tools = await self._describe_dynamic_tools() if self.has_dynamic_tools else self._describe_tools()
        for tool in tools:
            if tool.name in PYTHON_TOOLS:
                raise UnusableInput(f'{self._key}: the name "{tool.name}" is that of a Python tool; use another')
        return TaskDescription(
            self.kind,
            tools,
            has_reward=self.has_reward,
            is_replayable=self.is_replayable,
            system=self._get_text("system", DEFAULT_SYSTEM),
            instruction=self._get_text("instruction", ""),
        )

    def _get_text(self, name: str, default: str) -> str:
        """Return the class's text, or the default if the attribute is missing or a method, which is a tool."""
        text = getattr(self._class, name, default)
        return text if isinstance(text, str) else default

    # ---------------------------------------------------------------- kinds

    def _find_kind(self, loaded: type[object]) -> TaskKind:
        if callable(getattr(loaded, "reset", None)):
            return "environment"
        if callable(getattr(loaded, "init", None)) and callable(getattr(loaded, "step", None)):
            return "dialogue"
        raise UnusableInput(f"{self._key}: the class {loaded.__name__} has no `reset`; expected {_EXPECTED}")

    def _add_functions(self, functions: list[object]) -> None:
        for function in functions:
            if not callable(function) or isinstance(function, type):
                raise UnusableInput(f"{self._key}: {function!r:.80} is no function; expected {_EXPECTED}")
            name = getattr(function, "__name__", repr(function))
            if name in self.functions:
                raise UnusableInput(f'{self._key}: two tools have the name "{name}"; rename one')
            self.functions[name] = function
        if not self.functions:
            raise UnusableInput(f"{self._key}: the list has no functions; expected {_EXPECTED}")

    def _check_parameters(self, loaded: type[object], key: str) -> None:
        """Check the configured parameters against the constructor's signature and annotations."""
        try:
            signature = inspect.signature(loaded)
        except ValueError:  # the signature of some builtin classes is unknown
            return
        fixed = (each for each in signature.parameters.values() if each.kind not in _VARIADIC and each.name != SANDBOX)
        known = {each.name: each for each in fixed}
        takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in signature.parameters.values())
        names = ", ".join(known) or "none"
        for name in self._parameters:
            if name not in known and not takes_all:
                raise UnusableInput(f"{key}.{name}: {loaded.__name__} has no such parameter; it has {names}")
        for name, parameter in known.items():
            if parameter.default is parameter.empty and name not in self._parameters:
                raise UnusableInput(f"{key}.{name}: missing; {loaded.__name__} needs it")
        self._check_types(loaded, key)

    def _check_types(self, loaded: type[object], key: str) -> None:
        try:
            hints = get_type_hints(loaded.__init__)
        except (NameError, TypeError):
            return
        for name, value in self._parameters.items():
            try:
                msgspec.convert(value, hints.get(name, Any))
            except msgspec.ValidationError as error:
                raise UnusableInput(f"{key}.{name}: {error}") from None  # the value may be a secret
            except TypeError:  # an annotation that msgspec does not check
                continue

    # ---------------------------------------------------------------- tools

    def _describe_tools(self) -> tuple[ToolSchema, ...]:
        if self.kind == "dialogue":
            return ()
        functions: Mapping[str, Any] = self.functions or self._find_methods()
        try:
            return tuple(build_tool_schema(function, (SANDBOX,)) for function in functions.values())
        except ToolSchemaError as error:
            raise UnusableInput(f"{self._key}: {error}") from None

    def _find_methods(self) -> dict[str, Any]:
        """Find the methods that are tools, in the order of their definition, which is the order in the prompt."""
        assert self._class is not None
        names = dict.fromkeys(name for each in reversed(self._class.__mro__) for name in vars(each))
        public = (name for name in names if not name.startswith("_") and name not in _RESERVED)
        return {name: method for name in public if inspect.isroutine(method := getattr(self._class, name))}

    async def _describe_dynamic_tools(self) -> tuple[ToolSchema, ...]:
        try:
            instance = cast(Any, self.create(None))
            described = instance.describe_tools()
            schemas = await described if inspect.isawaitable(described) else described
            tools = [_parse_tool_schema(schema) for schema in cast(list[Any], schemas)]
            if callable(close := getattr(instance, "close", None)) and inspect.isawaitable(closing := close()):
                await closing
        except Exception as error:  # from the user's code
            raise UnusableInput(f"{self._key}: describe_tools raised {type(error).__name__}: {error}") from error
        return tuple(tools)


def _parse_tool_schema(schema: Any) -> ToolSchema:
    """Parse {"name", "description", "parameters"}, also inside {"type": "function", "function": ...}."""
    fields = schema.get("function", schema)
    parameters: dict[str, Any] = {"properties": {}, **(fields.get("parameters") or {"type": "object"})}
    return ToolSchema(fields["name"], fields.get("description") or "", parameters)
