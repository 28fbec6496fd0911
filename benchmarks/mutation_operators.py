"""Small faults of a Python source: where one can be made, and the source with it.

Faults are found on the syntax tree and made in the text at the node's position, so that everything else stays as it is. None
is made in annotations, decorators, texts, errors that are raised, assertions, log calls and `if TYPE_CHECKING`.

    faults = find_faults("plan.py", "if a < b:\n    c = 1")      # [Fault("plan.py", "if a < b:", "< to <=", 0, ...), ...]
    faulty = faults[0].apply(source)
"""

import ast
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

COMPARISONS: dict[type[ast.AST], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
ARITHMETIC: dict[type[ast.AST], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "/"),
    ast.Mod: ("%", "*"),
}
BOOLEAN: dict[type[ast.AST], tuple[str, str]] = {ast.And: ("and", "or"), ast.Or: ("or", "and")}
SWAPPED_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}
LOG_CALLS = {"log", "echo", "print", "warn", "_warn", "warning", "info", "debug", "line"}
TEXTS = (ast.JoinedStr, ast.List, ast.Tuple, ast.Dict)


@dataclass(frozen=True)
class Fault:
    """One small change of a source. The first four fields name it, also after lines above it have moved."""

    path: str
    line: str
    """The line on which it begins, without blanks around it."""
    operator: str
    ordinal: int
    """Counts faults of the same three, in the order of the file."""
    number: int
    """The line's number, from 1, in this version of the source."""
    start: int
    """Bytes of the source that it replaces ..."""
    end: int
    new: str
    """... by this."""

    @property
    def name(self) -> tuple[str, str, str, int]:
        """By which a later version of the source has it again."""
        return self.path, self.line, self.operator, self.ordinal

    def apply(self, source: str) -> str:
        """The source with the fault."""
        content = source.encode()
        return (content[: self.start] + self.new.encode() + content[self.end :]).decode()


def find_faults(path: str, source: str) -> list[Fault]:
    """All faults of a source that this module knows, in its order; each leaves it a Python source."""
    finder = _Finder(source)
    finder.visit(ast.parse(source))
    lines, seen = source.splitlines(), Counter[tuple[str, str]]()
    faults = []
    for start, end, operator, new in sorted(set(finder.found)):
        number = finder.line_at(start)
        line = lines[number - 1].strip()
        faults.append(Fault(path, line, operator, seen[line, operator], number, start, end, new))
        seen[line, operator] += 1
    return faults


class _Finder(ast.NodeVisitor):
    """Collects (start, end, operator, new text) of every fault."""

    def __init__(self, source: str) -> None:
        self._source = source.encode()
        self._lines = [0]
        for line in self._source.splitlines(keepends=True):
            self._lines.append(self._lines[-1] + len(line))
        self._bound: set[str] | None = None
        """Names that the function around has bound so far; None outside of functions."""
        self.found: list[tuple[int, int, str, str]] = []

    def line_at(self, start: int) -> int:
        """The number, from 1, of the line with a byte."""
        return bisect_right(self._lines, start)

    def _span(self, node: Any) -> tuple[int, int]:
        return (
            self._lines[node.lineno - 1] + node.col_offset,
            self._lines[node.end_lineno - 1] + node.end_col_offset,
        )

    def _text(self, node: ast.AST) -> str:
        start, end = self._span(node)
        return self._source[start:end].decode()

    def _replace(self, node: ast.AST, operator: str, new: str) -> None:
        self.found.append((*self._span(node), operator, new))

    def _replace_between(self, left: ast.AST, right: ast.AST, old: str, new: str) -> None:
        """Replaces an operator's sign, which stands between two nodes, beside brackets and comments."""
        start, end = self._span(left)[1], self._span(right)[0]
        pattern = r"\s+".join(map(re.escape, old.split()))
        pattern = rf"\b{pattern}\b" if old[0].isalpha() else pattern
        gap = re.sub(rb"#[^\n]*", lambda comment: b" " * len(comment[0]), self._source[start:end])
        if match := re.search(pattern.encode(), gap):
            self.found.append((start + match.start(), start + match.end(), f"{old} to {new}", new))

    def visit_arguments(self, node: ast.arguments) -> None:
        """Visits defaults, and no annotations."""
        for default in [*node.defaults, *filter(None, node.kw_defaults)]:
            self.visit(default)

    def _visit_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        if node.name in ("__repr__", "__str__"):
            return
        self.visit(node.args)
        every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        before, self._bound = self._bound, {argument.arg for argument in every}
        for statement in node.body:
            self.visit(statement)
        self._bound = before

    visit_FunctionDef = visit_AsyncFunctionDef = _visit_function

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """Visits the body, and neither bases nor decorators."""
        before, self._bound = self._bound, None
        for statement in node.body:
            self.visit(statement)
        self._bound = before

    def _skip(self, node: ast.AST) -> None:
        """Neither texts nor errors are changed, nor what only types need."""

    visit_Raise = visit_Assert = visit_JoinedStr = visit_Import = visit_ImportFrom = _skip

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """Visits the value, and no annotation."""
        if node.value is not None:
            self._delete_assignment(node, [node.target])
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        """An assignment may be left out."""
        self._delete_assignment(node, node.targets)
        self.generic_visit(node)

    def _delete_assignment(self, node: ast.AST, targets: Sequence[ast.AST]) -> None:
        """Leaves out an assignment; not the first of a name, since every test that comes by would see a NameError."""
        if self._bound is None:
            return
        stored = [each for target in targets for each in ast.walk(target) if isinstance(each, ast.expr)]
        names = {each.id for each in stored if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store)}
        if names <= self._bound:
            self._delete(node)
        self._bound |= names

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        """An assignment may be left out, or change by something else."""
        self._delete(node)
        if type(node.op) in ARITHMETIC and not _is_text(node.value):
            old, new = ARITHMETIC[type(node.op)]
            self._replace_between(node.target, node.value, f"{old}=", f"{new}=")
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        """A call whose value nobody takes may be left out."""
        if isinstance(node.value, ast.Constant) or _is_log(node.value):
            return
        if isinstance(node.value, ast.Call):
            self._delete(node)
        self.generic_visit(node)

    def _delete(self, node: ast.AST) -> None:
        if self._bound is not None:
            self._replace(node, "statement left out", "pass")

    def _negate(self, test: ast.AST) -> None:
        self._replace(test, "condition negated", f"(not ({self._text(test)}))")

    def visit_If(self, node: ast.If) -> None:
        """A condition may be negated."""
        if "TYPE_CHECKING" not in self._text(node.test):
            self._negate(node.test)
            self.generic_visit(node)

    def _visit_test(self, node: ast.IfExp | ast.While) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    visit_IfExp = visit_While = _visit_test

    def visit_comprehension(self, node: ast.comprehension) -> None:
        """A condition may be negated."""
        for test in node.ifs:
            self._negate(test)
        self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> None:
        """None may be returned instead."""
        if node.value is not None:
            if not (isinstance(node.value, ast.Constant) and node.value.value is None):
                self._replace(node.value, "returns None", "None")
            self.visit(node.value)

    def visit_Break(self, node: ast.Break) -> None:
        """A loop may go on."""
        self._replace(node, "break to continue", "continue")

    def visit_Continue(self, node: ast.Continue) -> None:
        """A loop may end."""
        self._replace(node, "continue to break", "break")

    def visit_Compare(self, node: ast.Compare) -> None:
        """Comparisons may include or exclude their bound, or be the opposite."""
        operands = [node.left, *node.comparators]
        for left, operation, right in zip(operands, node.ops, operands[1:], strict=False):
            self._replace_between(left, right, *COMPARISONS[type(operation)])
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        """Arithmetic may be another; texts and lists know no other."""
        if type(node.op) in ARITHMETIC and not _is_text(node.left) and not _is_text(node.right):
            self._replace_between(node.left, node.right, *ARITHMETIC[type(node.op)])
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        """`and` may be `or`."""
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._replace_between(left, right, *BOOLEAN[type(node.op)])
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        """`not` and the sign may be missing."""
        if isinstance(node.op, ast.Not | ast.USub):
            word = "not" if isinstance(node.op, ast.Not) else "-"
            self._replace(node, f"{word} left out", f"({self._text(node.operand)})")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        """Whole numbers may be off by one, True may be False."""
        if isinstance(node.value, bool):
            self._replace(node, "True and False swapped", str(not node.value))
        elif isinstance(node.value, int):
            self._replace(node, "one more", str(node.value + 1))
            if node.value > 0:
                self._replace(node, "one less", str(node.value - 1))

    def visit_Call(self, node: ast.Call) -> None:
        """Calls may be of the opposite, or lack a keyword."""
        if _is_log(node):
            return
        if isinstance(node.func, ast.Name) and node.func.id in SWAPPED_CALLS:
            self._replace(node.func, f"{node.func.id} to {SWAPPED_CALLS[node.func.id]}", SWAPPED_CALLS[node.func.id])
        for keyword in node.keywords:
            if keyword.arg not in (None, "strict"):  # which only checks
                self._drop(node, keyword)
        self.visit(node.func)
        for argument in [*node.args, *(keyword.value for keyword in node.keywords if keyword.arg != "strict")]:
            self.visit(argument)

    def _drop(self, call: ast.Call, keyword: ast.keyword) -> None:
        """Leaves out a keyword with the comma behind it, or else the one before it."""
        (start, end), (_, stop) = self._span(keyword), self._span(call)
        if comma := re.match(rb"\s*,\s*", self._source[end:stop]):
            end += comma.end()
        elif comma := re.search(rb",\s*$", self._source[:start]):
            start = comma.start()
        self.found.append((start, end, f"without {keyword.arg}", ""))

    def visit_Subscript(self, node: ast.Subscript) -> None:
        """Visits indices, and not what stands in the brackets of a type."""
        if not (isinstance(node.value, ast.Name) and node.value.id in ("Literal", "Callable", "Annotated")):
            self.generic_visit(node)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, TEXTS) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))


def _is_log(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and _called(node) in LOG_CALLS


def _called(node: ast.Call) -> str:
    function = node.func
    return function.id if isinstance(function, ast.Name) else function.attr if isinstance(function, ast.Attribute) else ""
