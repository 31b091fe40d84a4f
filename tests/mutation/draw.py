"""`python -m tests.mutation.draw --commit C --seed S`: draws uniformly from all mutations of the product that compile.

Needs a Python with cosmic-ray, of which it uses the operators without arguments. Type annotations, aliases of types
and `__main__` blocks are left out. Writes mutations.jsonl, one mutation per line, in the order of the draw.
"""

import argparse
import ast
import json
import random
import sys
import tempfile
import warnings
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

from tests.mutation.locate import (
    LIST,
    Mutation,
    apply,
    extract,
    find,
    list_occurrences,
    list_product_files,
    list_scopes,
)

OPERATORS = {name: get_operator(name) for name in operator_names() if not get_operator(name).arguments()}


class Position(NamedTuple):
    """One mutation that an operator can make."""

    path: Path
    operator: str
    occurrence: int  # position among the operator's mutations of the file


def is_alias_of_types(node: ast.AST) -> bool:
    """Return whether a statement is like `Event = Started | Ended[int] | None`."""
    if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.BinOp):
        return False
    names = [each.id for each in ast.walk(node.value) if isinstance(each, ast.Name)]
    return isinstance(node.value.op, ast.BitOr) and all(not name.isupper() and name != "os" for name in names)


def is_main_block(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"


def list_excluded(text: str) -> Iterator[ast.AST]:
    for node in ast.walk(ast.parse(text)):
        if is_main_block(node) or is_alias_of_types(node):
            yield node
        if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Annotated":
            yield node.slice.elts[0]
        for annotation in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            if annotation is not None:
                yield annotation


def list_positions(path: Path) -> Iterator[Position]:
    text = path.read_text()
    lines = text.splitlines()
    # Columns of ast are bytes; those of parso are characters.
    excluded = [
        (
            (node.lineno, len(lines[node.lineno - 1].encode()[: node.col_offset].decode())),
            (node.end_lineno, len(lines[node.end_lineno - 1].encode()[: node.end_col_offset].decode())),
        )
        for node in list_excluded(text)
    ]
    nodes = list(ast_nodes(get_ast(text)))
    for name, operator in OPERATORS.items():
        positions = (position for node in nodes for position in operator().mutation_positions(node))
        for occurrence, (start, end) in enumerate(positions):
            if not any(first <= start and end <= last for first, last in excluded):
                yield Position(path, name, occurrence)


def count_equal(first: list[str], second: list[str]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))


def describe(tree: Path, position: Position, number: int) -> Mutation | None:
    """Return the mutation. Return None if the mutated file does not compile or has the same syntax tree."""
    text = position.path.read_text()
    mutated = mutate_code(text, OPERATORS[position.operator](), position.occurrence)
    try:
        if mutated is None or ast.dump(ast.parse(mutated)) == ast.dump(ast.parse(text)):
            return None
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # as in the tests, in which a warning about `is "text"` is an error
            compile(mutated, str(position.path), "exec")
    except SyntaxError:
        return None
    old, new = text.splitlines(), mutated.splitlines()
    start = count_equal(old, new)
    end = count_equal(old[start:][::-1], new[start:][::-1])
    function = [scope.name for scope in list_scopes(text) if scope.first <= start <= scope.last][-1]
    changed = "\n".join(old[start : len(old) - end])
    mutation = Mutation(
        number,
        str(position.path.relative_to(tree)),
        function,
        position.operator.removeprefix("core/"),
        changed,
        list_occurrences(text, function, changed).index(start),
        "\n".join(new[start : len(new) - end]),
    )
    assert apply(text, find(tree, mutation), mutation).rstrip() == mutated.rstrip(), mutation
    return mutation


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--seed", type=int, default=37)
    parser.add_argument("--count", type=int, default=200)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder)
        extract(options.commit, tree)
        positions = [position for path in list_product_files(tree) for position in list_positions(path)]
        sys.stdout.write(f"seed {options.seed}, {len(positions)} possible mutations of {options.commit}\n")
        random.Random(options.seed).shuffle(positions)
        drawn: list[dict[str, Any]] = []
        for position in positions:
            if len(drawn) < options.count and (mutation := describe(tree, position, len(drawn) + 1)):
                drawn.append(mutation._asdict())
    LIST.write_text("".join(json.dumps(each) + "\n" for each in drawn))


if __name__ == "__main__":
    main()
