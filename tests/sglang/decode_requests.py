"""Decode request bodies like SGLang's HTTP server, with the structs of its routes, in SGLang's environment.

    python decode_requests.py < [["/path", {body}], ...]

The script prints a JSON list of problems: [path, description]. It starts no server and imports nothing of the project.
"""

import ast
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import sglang
from pydantic import TypeAdapter, ValidationError
from sglang.srt.managers import io_struct
from sglang.srt.sampling.sampling_params import SamplingParams

SERVER = Path(sglang.__file__).parent / "srt" / "entrypoints" / "http_server.py"
NO_BODY = {"/flush_cache"}  # routes that take a query instead of a body


def find_body_names() -> dict[str, str]:
    """Return, by route, the name of the struct of the request body."""
    names: dict[str, str] = {}
    for function in ast.walk(ast.parse(SERVER.read_text())):
        if not isinstance(function, ast.AsyncFunctionDef):
            continue
        body = next((each.annotation for each in function.args.args if each.arg == "obj"), None)
        for call in function.decorator_list:
            if isinstance(call, ast.Call) and call.args and isinstance(call.args[0], ast.Constant) and body is not None:
                known = [
                    each.id for each in ast.walk(body) if isinstance(each, ast.Name) and hasattr(io_struct, each.id)
                ]
                names[str(call.args[0].value)] = next(name for name in known if name not in ("Annotated", "Optional"))
    return names


def list_fields(struct: Any) -> dict[str, Any]:
    """Return the type of each field of a struct by name."""
    if dataclasses.is_dataclass(struct):
        return {field.name: field.type for field in dataclasses.fields(struct)}
    return {field.name: field.type for field in msgspec.structs.fields(struct)}


def find_problems(struct: Any, body: dict[str, Any]) -> list[str]:
    problems = [f"{struct.__name__} has no field {name}" for name in body if name not in list_fields(struct)]
    try:
        TypeAdapter(struct).validate_json(json.dumps(body), strict=True)
    except ValidationError as error:
        problems += [f"{struct.__name__}: {each['loc']} {each['msg']}" for each in error.errors()]
    return problems + find_sampling_problems(body.get("sampling_params", {}))


def find_sampling_problems(parameters: dict[str, Any]) -> list[str]:
    """List the problems of the sampling parameters, which the server passes as keywords."""
    fields, problems = list_fields(SamplingParams), []
    for name, value in parameters.items():
        if name not in fields:
            problems.append(f"SamplingParams has no field {name}")
            continue
        try:
            msgspec.convert(value, fields[name])
        except msgspec.ValidationError as error:
            problems.append(f"SamplingParams.{name}: {error}")
    return problems


def main() -> None:
    names, problems = find_body_names(), []
    for path, body in json.load(sys.stdin):
        if path in NO_BODY:
            problems += [(path, f"has no field {name}") for name in body]
        elif path not in names:
            problems.append((path, "is no route with a body"))
        else:
            problems += [(path, problem) for problem in find_problems(getattr(io_struct, names[path]), body)]
    sys.stdout.write(json.dumps(problems) + "\n")


main()
