"""The structure of the code base: sizes of files, functions and classes, unique names, modules per package."""

import ast
import gc
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("configs", "bus", "policies", "sandbox", "engine", "tasks", "actors", "analysis", "benchmarks")
MAX_MODULES = 16  # modules per package, without __init__ and __main__
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_CLASS_LINES = 400, 40, 250
# policies/losses/logits_chunks.py is small because the plan of memory imports it without torch, and
# policies/groups/group_filters.py because its file has the name of a key. Each new record of a table, such as a metric
# sink, often adds another small file.
SMALL_FILE_LINES, MAX_SMALL_FILES = 45, 20
# Module names that several packages can have. `errors` and `contract` have the same role in each package.
# A benchmark program has the name of its subject: `python -m benchmarks.bus` is an interface.
SHARED_NAMES = {"__init__", "__main__", "errors", "contract"}
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@cache
def sources() -> tuple[Path, ...]:
    return tuple(sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")))


@cache
def parse(path: Path) -> ast.Module:
    """Parse the file. Garbage collections do not visit the tree: they would take most of the time of these tests."""
    gc.disable()
    try:
        return ast.parse(path.read_text())
    finally:
        gc.freeze()
        gc.enable()


@cache
def list_definitions(path: Path) -> tuple[Definition, ...]:
    """Return all functions and classes of a file, at any depth."""
    return tuple(_walk_definitions(parse(path)))


def _walk_definitions(statement: ast.AST) -> Iterator[Definition]:
    """Yield definitions. Visit only statements, because a whole tree has ten times as many nodes."""
    if isinstance(statement, Definition):
        yield statement
    for block in ("body", "orelse", "handlers", "finalbody", "cases"):
        children = getattr(statement, block, ())
        for child in children:
            yield from _walk_definitions(child)


@cache
def count_lines(path: Path) -> int:
    return len(path.read_text().splitlines())


def locate(path: Path, node: Definition) -> str:
    return f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"


def definitions(*kinds: type[ast.AST]) -> Iterator[tuple[Path, Definition]]:
    return ((path, node) for path in sources() for node in list_definitions(path) if isinstance(node, kinds))


def test_a_package_has_at_most_16_modules() -> None:
    modules = Counter(path.parent for path in sources() if path.stem not in ("__init__", "__main__"))
    counts = {str(folder.relative_to(ROOT)): n for folder, n in modules.items()}
    assert {folder: n for folder, n in counts.items() if n > MAX_MODULES} == {}


def test_a_module_name_occurs_in_one_package_only() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in sources():
        if path.stem not in SHARED_NAMES and path.parent != ROOT / "benchmarks":
            places[path.stem].append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


def test_a_class_name_is_defined_once() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path, node in definitions(ast.ClassDef):
        places[node.name].append(locate(path, node))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_at_most_20_files_are_small() -> None:
    small = [
        str(path.relative_to(ROOT))
        for path in sources()
        if path.stem not in ("__init__", "__main__") and count_lines(path) < SMALL_FILE_LINES
    ]
    assert len(small) <= MAX_SMALL_FILES, small


def test_no_file_is_long() -> None:
    assert {str(path.relative_to(ROOT)): n for path in sources() if (n := count_lines(path)) > MAX_FILE_LINES} == {}


@pytest.mark.parametrize(
    ("kinds", "limit"), [(FUNCTION, MAX_FUNCTION_LINES), ((ast.ClassDef,), MAX_CLASS_LINES)], ids=["function", "class"]
)
def test_no_function_and_no_class_is_long(kinds: tuple[type[ast.AST], ...], limit: int) -> None:
    lengths = {locate(path, node): (node.end_lineno or 0) - node.lineno + 1 for path, node in definitions(*kinds)}
    assert {place: length for place, length in lengths.items() if length > limit} == {}


def test_no_function_name_ends_in_of() -> None:
    assert [locate(path, node) for path, node in definitions(*FUNCTION) if node.name.endswith("_of")] == []


def test_every_struct_of_the_schema_is_a_config() -> None:
    files = ("run_config", "algorithm", "learner_config", "machines", "dialogue", "sglang", "tasks")
    schema = [ROOT / "configs" / "schema" / f"{file}.py" for file in files]
    names = {node.name for path, node in definitions(ast.ClassDef) if path in schema}
    assert {name for name in names if not name.endswith("Config")} == {"Sampling"}  # also a field of messages
