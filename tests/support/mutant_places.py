"""All single mutations of a module: another operator, number, bound, condition or function.

Found by ``ast``, so that strings, comments and annotations are not changed. See mutants.py, which runs the tests.
"""

from __future__ import annotations

import ast
import itertools
import re
from dataclasses import dataclass
from typing import Any

COMPARISONS = {
    **{"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="},
    **{"is": "is not", "is not": "is", "in": "not in", "not in": "in"},
}
OPERATORS = {
    **{"+": "-", "-": "+", "*": "//", "//": "*", "/": "*", "%": "//", "**": "*", "|": "&", "&": "|"},
    **{"and": "or", "or": "and", "+=": "-=", "-=": "+=", "*=": "//=", "|=": "&=", "&=": "|="},
}
FUNCTIONS = {
    **{"min": "max", "max": "min", "any": "all", "all": "any", "argmin": "argmax", "argmax": "argmin"},
    **{"maximum": "minimum", "minimum": "maximum", "ceil": "floor", "floor": "ceil"},
}


@dataclass(frozen=True)
class Mutant:
    """One mutation of one module: the bytes from ``start`` to ``end`` of its source become ``new``.

    ``where``: the enclosing class and function. ``line`` and ``becomes``: its source line before and after.
    """

    module: str
    source: bytes
    where: str
    number: int
    start: int
    end: int
    new: bytes
    line: str
    becomes: str

    @property
    def key(self) -> tuple[str, str, str, str]:
        return self.module, self.where, self.line, self.becomes

    def __str__(self) -> str:
        return f"{self.module}:{self.number}  {self.line}\n{'':8}->  {self.becomes}"


class Places(ast.NodeVisitor):
    """Finds every place of a module where one operator can be changed.

    Skipped: strings, messages and the computation of their values, annotations, decorators, assertions, imports.
    """

    def __init__(self, module: str, source: bytes) -> None:
        self.module, self.source = module, source
        self.starts = [0, *itertools.accumulate(map(len, source.splitlines(keepends=True)))]
        self.scope: list[str] = []
        self.mutants: list[Mutant] = []
        self.visit(ast.parse(source))

    def span(self, node: ast.AST) -> tuple[int, int]:
        place: Any = node
        return (
            self.starts[place.lineno - 1] + place.col_offset,
            self.starts[place.end_lineno - 1] + place.end_col_offset,
        )

    def change(self, start: int, end: int, new: str) -> None:
        first = self.source.rfind(b"\n", 0, start) + 1
        last = self.source.find(b"\n", end)
        before, after = self.source[first:last], self.source[first:start] + new.encode() + self.source[end:last]
        line, becomes = (" ".join(text.decode().split()) for text in (before, after))
        number = self.source.count(b"\n", 0, start) + 1
        where = ".".join(self.scope)
        self.mutants.append(Mutant(self.module, self.source, where, number, start, end, new.encode(), line, becomes))

    def swap(self, left: ast.AST, right: ast.AST, table: dict[str, str]) -> None:
        """Change the operator between two operands."""
        start, end = self.span(left)[1], self.span(right)[0]
        between = re.sub(rb"#[^\n]*", lambda comment: b" " * len(comment[0]), self.source[start:end])
        if found := re.search(rb"[^\s()\\]+(\s+(not|in)\b)?", between):
            operator = " ".join(found[0].decode().split())
            if operator in table:
                self.change(start + found.start(), start + found.end(), table[operator])

    def negate(self, test: ast.expr) -> None:
        if not isinstance(test, ast.Compare | ast.BoolOp | ast.NamedExpr | ast.UnaryOp | ast.Constant):
            start, end = self.span(test)
            self.change(start, end, f"not ({self.source[start:end].decode()})")

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.ClassDef) -> None:
        self.scope.append(node.name)
        defaults = [*node.args.defaults, *filter(None, node.args.kw_defaults)] if hasattr(node, "args") else []
        for part in (*defaults, *node.body):
            self.visit(part)
        self.scope.pop()

    visit_ClassDef = visit_FunctionDef  # noqa: N815

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        if self.scope or not isinstance(node.value, ast.Subscript):  # type aliases
            self.generic_visit(node)

    def ignore(self, node: ast.AST) -> None:
        pass

    visit_Raise = visit_Assert = visit_JoinedStr = visit_Import = visit_ImportFrom = ignore  # noqa: N815

    def visit_Compare(self, node: ast.Compare) -> None:
        for left, right in itertools.pairwise([node.left, *node.comparators]):
            self.swap(left, right, COMPARISONS)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        for left, right in itertools.pairwise(node.values):
            self.swap(left, right, OPERATORS)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        texts = (ast.JoinedStr, ast.List, ast.Tuple)
        if not any(isinstance(side, texts) or _is_text(side) for side in (node.left, node.right)):
            self.swap(node.left, node.right, OPERATORS)
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if not isinstance(node.value, ast.List | ast.Tuple | ast.ListComp):
            self.swap(node.target, node.value, OPERATORS)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        start, end = self.span(node)
        if isinstance(node.op, ast.USub) and isinstance(node.operand, ast.Constant):
            if isinstance(node.operand.value, int):
                self.change(start, end, str(1 - node.operand.value))
            return
        word = re.match(rb"not\s*|.", self.source[start:end])
        assert word is not None
        self.change(start, start + word.end(), "")
        self.visit(node.operand)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.change(*self.span(node), str(not node.value))
        elif isinstance(node.value, int) and 0 <= node.value < 10:
            self.change(*self.span(node), str(node.value + 1))

    def visit_Name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load) and node.id in FUNCTIONS:
            self.change(*self.span(node), FUNCTIONS[node.id])

    def visit_Call(self, node: ast.Call) -> None:
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if name.endswith("Error"):
            return
        if isinstance(node.func, ast.Attribute) and name in FUNCTIONS:
            end = self.span(node.func)[1]
            self.change(end - len(name), end, FUNCTIONS[name])
        kept = node.args[:1] if name == "isinstance" else node.args
        for part in (node.func, *kept, *(keyword.value for keyword in node.keywords if keyword.arg != "strict")):
            self.visit(part)

    def visit_Slice(self, node: ast.Slice) -> None:
        for bound in (node.lower, node.upper):
            if bound is not None:
                self.change(*self.span(bound), "")
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return
        if len(node.body) == 1 and isinstance(node.body[0], ast.Return | ast.Continue | ast.Break):
            self.change(*self.span(node.test), "False")  # the early exit is never taken
        else:
            self.negate(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.negate(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self.negate(test)
        self.generic_visit(node)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)
