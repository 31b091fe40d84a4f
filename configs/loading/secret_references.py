"""Resolves references to environment variables, `${NAME}`, in `tasks.parameters`, `tasks.variables` and
`sglang.environment`.

A starting process resolves the references that it needs. The configuration, its copy in the run's folder, logs and
messages contain only the references. `$${NAME}` stands for the text `${NAME}`.
"""

import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple, cast

from asterism.configs.errors import UnusableInput

_REFERENCE = re.compile(r"(\$?)\$\{([^{}]*)\}")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MIN_HIDDEN_CHARACTERS = 4  # characters; a shorter value can be part of any text


class Resolved(NamedTuple):
    table: dict[str, Any]
    secrets: dict[str, str]  # references by their values, for `hide_secrets`


def resolve_references(table: Mapping[str, Any], key: str, environment: Mapping[str, str] | None = None) -> Resolved:
    """Resolve a table. `key`: its full key, for messages. Raises UnusableInput for a variable that is not set."""
    secrets: dict[str, str] = {}
    variables = os.environ if environment is None else environment
    resolved = {name: _resolve(value, f"{key}.{name}", variables, secrets) for name, value in table.items()}
    return Resolved(resolved, secrets)


def describe_references(table: Mapping[str, Any], key: str) -> str:
    """List the references of a table. Raises UnusableInput, without `key` in its text."""
    try:
        secrets = resolve_references(table, key).secrets
    except UnusableInput as error:
        raise UnusableInput(str(error).removeprefix(f"{key}.")) from None
    return ", ".join(secrets.values()) or "no references to environment variables"


def hide_secrets(text: str, secrets: Mapping[str, str]) -> str:
    """Replace values by their references in the text; longer values are replaced first."""
    for value in sorted(secrets, key=len, reverse=True):
        if len(value) >= _MIN_HIDDEN_CHARACTERS:
            text = text.replace(value, secrets[value])
    return text


def _resolve(value: Any, key: str, variables: Mapping[str, str], secrets: dict[str, str]) -> Any:
    if isinstance(value, dict):
        table = cast("dict[str, Any]", value)
        return {name: _resolve(each, f"{key}.{name}", variables, secrets) for name, each in table.items()}
    if isinstance(value, (list, tuple)):
        items = enumerate(cast("list[Any]", value))
        return [_resolve(each, f"{key}[{number}]", variables, secrets) for number, each in items]
    return _resolve_text(value, key, variables, secrets) if isinstance(value, str) else value


def _resolve_text(text: str, key: str, variables: Mapping[str, str], secrets: dict[str, str]) -> str:
    def replace(match: re.Match[str]) -> str:
        escape, name = match.groups()
        reference = f"${{{name}}}"
        if escape:
            return reference
        if not _NAME.fullmatch(name):
            raise UnusableInput(f"{key}: {reference} names no environment variable; write ${reference} for this text")
        if name not in variables:
            raise UnusableInput(
                f"{key}: the environment variable {name} is not set; set it where the run and its nodes are started"
            )
        secrets[variables[name]] = reference
        return variables[name]

    return _REFERENCE.sub(replace, text)
