"""Conditions between settings, as a user writes them: comparisons and sums over the settings' full names, nothing else.

condition = Condition("scaling.workers * train.slot_size <= 64 and train.precision != 'fp16'", known)
condition.holds({"scaling.workers": 2, "train.slot_size": 8, "train.precision": "bf16"})        # True
"""

import ast
import operator
from collections.abc import Collection, Mapping
from itertools import pairwise
from typing import Any

from raystride.pipelines.config.section import SettingError, nearest

OPERATORS: dict[type[ast.AST], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda value, several: value in several,
    ast.NotIn: lambda value, several: value not in several,
    ast.Not: operator.not_,
    ast.USub: operator.neg,
}


class Condition:
    """An expression over `known` settings. Raises SettingError for what it cannot be."""

    def __init__(self, text: str, known: Collection[str]) -> None:
        self.text = text
        try:
            self._body = ast.parse(text, mode="eval").body
        except (SyntaxError, ValueError) as error:
            raise self._error(f", which is no condition: {getattr(error, 'msg', error)}") from None
        self._check(self._body, known)

    def holds(self, values: Mapping[str, Any]) -> bool:
        """Whether the condition is true of settings by their full names. Raises SettingError where it cannot be told."""
        try:
            return bool(_value(self._body, values))
        except (TypeError, ZeroDivisionError) as error:
            raise self._error(f", which cannot be told: {error}") from None

    def _error(self, what: str) -> SettingError:
        return SettingError(f"sweep.constraints has {self.text!r}{what}", setting="sweep.constraints", value=self.text)

    def _check(self, node: ast.AST, known: Collection[str]) -> None:
        if isinstance(node, ast.Attribute | ast.Name):
            if (name := ast.unparse(node)) not in known:
                raise self._error(f": there is no setting {name}{nearest(name, known)}")
            return
        whole = (ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.Compare, ast.Constant, ast.Tuple, ast.List)
        if not isinstance(node, (*whole, ast.And, ast.Or, ast.Load, *OPERATORS)):
            raise self._error(": it may only compare settings, and join that by and, or")
        for child in ast.iter_child_nodes(node):
            self._check(child, known)


def _value(node: ast.AST, values: Mapping[str, Any]) -> Any:
    match node:
        case ast.Constant():
            return node.value
        case ast.Attribute() | ast.Name():
            return values[ast.unparse(node)]
        case ast.Tuple() | ast.List():
            return [_value(each, values) for each in node.elts]
        case ast.BoolOp():
            parts = (_value(each, values) for each in node.values)
            return all(parts) if isinstance(node.op, ast.And) else any(parts)
        case ast.UnaryOp():
            return OPERATORS[type(node.op)](_value(node.operand, values))
        case ast.BinOp():
            return OPERATORS[type(node.op)](_value(node.left, values), _value(node.right, values))
        case ast.Compare():
            terms = [_value(each, values) for each in (node.left, *node.comparators)]
            return all(OPERATORS[type(op)](*pair) for op, pair in zip(node.ops, pairwise(terms), strict=True))
    raise TypeError(ast.unparse(node))
