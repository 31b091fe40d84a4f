"""Make wrong programs by a change of one constant, comparison, operator or returned value of a right program."""

import ast
from collections.abc import Iterator
from random import Random
from typing import Any

_OPERATORS = {
    ast.Add: (ast.Sub, ast.Mult),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Add,),
    ast.Div: (ast.Mult,),
    ast.FloorDiv: (ast.Mult, ast.Mod),
    ast.Mod: (ast.Mult, ast.FloorDiv),
    ast.Pow: (ast.Mult,),
}
_COMPARISONS = {
    ast.Lt: (ast.GtE, ast.LtE),
    ast.Gt: (ast.LtE, ast.GtE),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.LtE: (ast.Gt, ast.Lt),
    ast.GtE: (ast.Lt, ast.Gt),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}


def mutate(program: str, random: Random, first_line: int = 1) -> Iterator[str]:
    """Yield programs in random order; each has one replaced node, in `first_line` or below."""
    count = len(_list_replaced_nodes(ast.parse(program), first_line))
    for place in random.sample(range(count), count):
        tree = ast.parse(program)
        old, new = _list_replaced_nodes(tree, first_line)[place]
        yield ast.unparse(_ReplaceNode(old, new).visit(tree))


def _list_replaced_nodes(tree: ast.AST, first_line: int) -> list[tuple[ast.AST, ast.AST]]:
    nodes = (node for node in ast.walk(tree) if getattr(node, "lineno", 0) >= first_line)
    return [(node, other) for node in nodes for other in _list_replacements(node)]


def _list_replacements(node: ast.AST) -> list[ast.AST]:
    """List the nodes that can replace a constant, a comparison, an operator or a returned value."""
    match node:
        case ast.Constant(value=bool()):
            return [ast.Constant(not node.value)]
        case ast.Constant(value=int() | float()):
            return [ast.Constant(node.value + 1), ast.Constant(node.value - 1)]
        case ast.BinOp():
            return [ast.BinOp(node.left, other(), node.right) for other in _OPERATORS.get(type(node.op), ())]
        case ast.Compare():
            others = _COMPARISONS.get(type(node.ops[0]), ())
            return [ast.Compare(node.left, [other(), *node.ops[1:]], node.comparators) for other in others]
        case ast.BoolOp():
            return [ast.BoolOp(ast.And() if isinstance(node.op, ast.Or) else ast.Or(), node.values)]
        case ast.Return(value=ast.expr() as value):
            wrong = (ast.Constant(None), ast.UnaryOp(ast.Not(), value), ast.List([value], ast.Load()))
            return [ast.Return(each) for each in wrong]
        case _:
            return []


class _ReplaceNode(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self._old, self._new = old, new

    def visit(self, node: ast.AST) -> Any:
        return self._new if node is self._old else self.generic_visit(node)
