"""Finds the places of the drawn mutations in a tree, in which functions and comments may differ from those of the draw."""

import ast
import json
import re
import shutil
import subprocess
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

LIST = Path(__file__).with_name("mutations.jsonl")
PRODUCT = ("bus", "engine", "actors", "sandbox", "policies", "configs", "tasks", "analysis")


class Mutation(NamedTuple):
    """One line of mutations.jsonl."""

    number: int
    file: str  # path at the commit of the draw
    function: str  # qualified name of the innermost function or class; empty for a module
    operator: str
    old: str  # the whole lines that `new` replaces
    occurrence: int  # number of the occurrence of `old` in the function, from 0
    new: str
    moved_to: dict[str, Any] | None = None
    gone: str = ""


class Scope(NamedTuple):
    """The lines of a module, class or function."""

    name: str  # qualified name; empty for a module
    first: int  # number of the first line, from 0; decorators are included
    last: int


class Place(NamedTuple):
    """The lines that a mutation replaces."""

    path: Path
    first: int  # number of the first line, from 0
    indent: str


def read_mutations() -> list[Mutation]:
    return [Mutation(**json.loads(line)) for line in LIST.read_text().splitlines()]


def extract(commit: str, tree: Path) -> None:
    shutil.rmtree(tree, ignore_errors=True)
    tree.mkdir(parents=True)
    archive = subprocess.run(["git", "archive", commit], cwd=LIST.parents[2], stdout=subprocess.PIPE, check=True)
    subprocess.run(["tar", "-x", "-C", str(tree)], input=archive.stdout, check=True)


def list_product_files(tree: Path) -> list[Path]:
    return sorted(path for package in PRODUCT for path in (tree / package).rglob("*.py"))


def list_scopes(text: str) -> list[Scope]:
    """List the scopes of a module, each before the scopes within it."""

    def walk(node: ast.AST, prefix: str) -> Iterator[Scope]:
        for child in ast.iter_child_nodes(node):
            name = prefix
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                name = f"{prefix}.{child.name}".lstrip(".")
                first = min(each.lineno for each in (child, *child.decorator_list))
                yield Scope(name, first - 1, (child.end_lineno or 0) - 1)
            yield from walk(child, name)

    return [Scope("", 0, len(text.splitlines()) - 1), *walk(ast.parse(text), "")]


def strip_comments(text: str) -> str:
    return re.sub(r"  # .*", "", text)


def list_occurrences(text: str, function: str, old: str) -> list[int]:
    """Return the first line of each occurrence of `old` in the functions with this name, at any indentation.

    Comments at the ends of lines can differ.
    """
    lines, wanted = strip_comments(text).splitlines(), textwrap.dedent(strip_comments(old)).splitlines()
    first_lines = {
        number
        for scope in list_scopes(text)
        if scope.name == function
        for number in range(scope.first, scope.last + 2 - len(wanted))
    }
    return [
        number
        for number in sorted(first_lines)
        if lines[number].strip() == wanted[0].strip()
        and textwrap.dedent("\n".join(lines[number : number + len(wanted)])).splitlines() == wanted
    ]


@cache
def read_text(path: Path) -> str:
    return path.read_text()


def find(tree: Path, mutation: Mutation) -> Place:
    """Find the place, preferably in the mutation's file. Raises LookupError unless there is exactly one place."""
    mutation = mutation._replace(**mutation.moved_to or {})
    paths = [
        path
        for path in list_product_files(tree)
        if strip_comments(mutation.old.strip().partition("\n")[0]) in read_text(path)
    ]
    places: list[Place] = []
    for path in paths:
        found = list_occurrences(read_text(path), mutation.function, mutation.old)
        if len(found) > mutation.occurrence:
            line = read_text(path).splitlines()[found[mutation.occurrence]]
            places.append(Place(path, found[mutation.occurrence], line[: len(line) - len(line.lstrip())]))
    places = [place for place in places if place.path == tree / mutation.file] or places
    if len(places) != 1:
        raise LookupError(
            f"mutation {mutation.number} of {mutation.file}, {mutation.function or 'module'}, is found in {len(places)} "
            f"places; write moved_to or gone into its line of {LIST.name}:\n{mutation.old}"
        )
    return places[0]


def apply(text: str, place: Place, mutation: Mutation) -> str:
    mutation = mutation._replace(**mutation.moved_to or {})
    lines, old = text.splitlines(), mutation.old.splitlines()
    indent = len(old[0]) - len(old[0].lstrip())
    lines[place.first : place.first + len(old)] = [
        (place.indent + line[indent:]).rstrip() for line in mutation.new.splitlines()
    ]
    return "\n".join(lines) + "\n"
