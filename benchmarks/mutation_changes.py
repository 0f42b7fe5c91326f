"""List the single changes of a file's code that `mutation.py` draws from, each as text put in another's place.

A change is small and parses: another comparison, another operator, a number one off, a condition turned round, a call
for its effect left out, two arguments swapped. Left alone is what computes nothing: docstrings, annotations,
decorators, f-strings, samples of rules, `raise`, `assert`, warnings, `__all__`, imports, and what only a type checker
reads.
"""

import ast
from copy import copy
from dataclasses import dataclass, field

COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
OPERATORS: dict[type[ast.operator], tuple[type[ast.operator], ...]] = {
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Div,),
    ast.Div: (ast.Mult,),
    ast.FloorDiv: (ast.Mult, ast.Mod),
    ast.Mod: (ast.FloorDiv,),
    ast.Pow: (ast.Mult,),
    ast.BitAnd: (ast.BitOr,),
    ast.BitOr: (ast.BitAnd,),
}
RENAMED = {
    a: b
    for pair in (
        ("min", "max"),
        ("any", "all"),
        ("ceil", "floor"),
        ("zeros", "ones"),
        ("zeros_like", "ones_like"),
        ("sum", "mean"),
        ("amax", "amin"),
        ("argmax", "argmin"),
        ("minimum", "maximum"),
        ("keys", "values"),
    )
    for a, b in (pair, pair[::-1])
}
SILENT_CALLS = {"cast", "TypeVar", "NewType", "warn", "field", "overload"}
DEFAULTS = {"bool": ("True", "False"), "str": ("''",), "int": ("0",), "float": ("0.0",)}


@dataclass(frozen=True)
class Change:
    """One piece of a file replaced by another."""

    file: str  # below src/apoptosis
    line: int  # the first that changes
    kind: str
    start: int  # offsets into the text
    end: int
    before: str
    after: str
    where: str  # the function around it, dotted
    runs_at: int | None = field(compare=False)
    """The line that runs when this code does; None if only an import runs it."""

    def apply(self, text: str) -> str:
        return text[: self.start] + self.after + text[self.end :]

    def is_code(self, text: str) -> bool:
        """The changed file parses, and into another tree."""
        try:
            changed = ast.parse(self.apply(text))
        except SyntaxError:
            return False
        return ast.dump(changed) != ast.dump(ast.parse(text))

    def lines(self, text: str) -> tuple[str, str]:
        """The lines that change, before and after, without indentation: what a change is known by."""
        begin = text.rfind("\n", 0, self.start) + 1
        stop = text.find("\n", self.end)
        stop = len(text) if stop < 0 else stop
        old = text[begin:stop]
        new = text[begin : self.start] + self.after + text[self.end : stop]
        return " ".join(old.split()), " ".join(new.split())


def changes_of(file: str, text: str) -> list[Change]:
    """All single changes of a file, in the order of the text; `is_code` tells which of them stand."""
    finder = _Finder(file, text)
    finder.visit(ast.parse(text))
    return finder.found


class _Finder(ast.NodeVisitor):
    def __init__(self, file: str, text: str) -> None:
        self.file, self.text = file, text
        self.bytes = [line.encode() for line in text.splitlines(keepends=True)]
        self.offsets = [0]
        for line in text.splitlines(keepends=True):
            self.offsets.append(self.offsets[-1] + len(line))
        self.found: list[Change] = []
        self.names: list[str] = []
        self.runs_at: list[int | None] = [None]
        self.inside: list[int] = [0]  # functions and lambdas around

    # --- where things stand ---
    def place(self, line: int, column: int) -> int:
        return self.offsets[line - 1] + len(self.bytes[line - 1][:column].decode())

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return (
            self.place(node.lineno, node.col_offset),
            self.place(node.end_lineno, node.end_col_offset),
        )

    def source(self, node: ast.expr | ast.stmt) -> str:
        start, end = self.span(node)
        return self.text[start:end]

    def put(self, kind: str, node: ast.expr | ast.stmt, after: str) -> None:
        start, end = self.span(node)
        before = self.text[start:end]
        where = ".".join(self.names)
        self.found.append(
            Change(self.file, node.lineno, kind, start, end, before, after, where, self.runs_at[-1])
        )

    def swap(self, kind: str, node: ast.expr, **changed: object) -> None:
        other = copy(node)
        for name, value in changed.items():
            setattr(other, name, value)
        text = ast.unparse(ast.fix_missing_locations(other))
        plain = isinstance(node, (ast.Call, ast.Constant, ast.Name, ast.Attribute, ast.Subscript))
        self.put(kind, node, text if plain else f"({text})")

    # --- what is passed by ---
    def visit_Raise(self, node: ast.Raise) -> None: ...
    def visit_Assert(self, node: ast.Assert) -> None: ...
    def visit_JoinedStr(self, node: ast.JoinedStr) -> None: ...
    def visit_Import(self, node: ast.Import) -> None: ...
    def visit_ImportFrom(self, node: ast.ImportFrom) -> None: ...

    # --- statements ---
    def visit(self, node: ast.AST) -> None:
        if not isinstance(node, ast.stmt):
            super().visit(node)
            return
        self.runs_at.append(node.lineno if self.inside[-1] else None)
        super().visit(node)
        self.runs_at.pop()

    def _function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        names = {ast.unparse(d).split(".")[-1] for d in node.decorator_list}
        returns = ast.unparse(node.returns) if node.returns else ""
        if "overload" in names or "Sample" in returns:
            return  # samples are data on which the tests try a rule
        for default in [*node.args.defaults, *node.args.kw_defaults]:
            if default is not None:
                self.visit(default)
        self.names.append(node.name)
        self.inside.append(1)
        for statement in node.body:
            self.returns = returns
            self.visit(statement)
        self.inside.pop()
        self.names.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        self._function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self._function(node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.names.append(node.name)
        for statement in node.body:
            self.visit(statement)
        self.names.pop()

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.inside.append(1)
        self.runs_at.append(node.body.lineno)
        for default in [*node.args.defaults, *node.args.kw_defaults]:
            if default is not None:
                self.visit(default)
        self.visit(node.body)
        self.runs_at.pop()
        self.inside.pop()

    def visit_Assign(self, node: ast.Assign) -> None:
        names = {t.id for t in node.targets if isinstance(t, ast.Name)}
        if names & {"__all__", "__slots__", "__match_args__"}:
            return
        if all(isinstance(t, (ast.Attribute, ast.Subscript)) for t in node.targets):
            self.put("drop", node, "pass")
        self.visit(node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None and ast.unparse(node.annotation) != "TypeAlias":
            self.visit(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.put("drop", node, "pass")
        for other in OPERATORS.get(type(node.op), ()):
            changed = ast.AugAssign(node.target, other(), node.value)
            self.put("operator", node, ast.unparse(ast.fix_missing_locations(changed)))
        self.visit(node.value)

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant):
            return  # a docstring, or three dots
        if isinstance(node.value, ast.Call):
            if _name(node.value) in SILENT_CALLS:
                return
            self.put("drop", node, "pass")
        self.visit(node.value)

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" in ast.unparse(node.test):
            return
        self._condition(node.test)
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        self._condition(node.test)
        self.generic_visit(node)

    def visit_Continue(self, node: ast.Continue) -> None:
        self.put("drop", node, "pass")
        self.put("jump", node, "break")

    def visit_Break(self, node: ast.Break) -> None:
        self.put("jump", node, "continue")

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is None:
            return
        for default in DEFAULTS.get(self.returns, ()):
            self.put("return", node, f"return {default}")
        if self.returns.endswith("| None") and ast.unparse(node.value) != "None":
            self.put("return", node, "return None")
        self.visit(node.value)

    # --- expressions ---
    def _condition(self, test: ast.expr) -> None:
        if not isinstance(test, (ast.Compare, ast.Constant)) or (
            isinstance(test, ast.Compare) and len(test.ops) > 1
        ):
            self.put("condition", test, f"(not ({self.source(test)}))")

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._condition(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for test in node.ifs:
            self._condition(test)
            self.put("condition", test, "True")
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        for n, op in enumerate(node.ops):
            for other in COMPARISONS[type(op)]:
                self.swap("comparison", node, ops=[*node.ops[:n], other(), *node.ops[n + 1 :]])
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        self.swap("and/or", node, op=other)
        if len(node.values) > 2:
            for n in range(len(node.values)):
                self.swap("and/or", node, values=[*node.values[:n], *node.values[n + 1 :]])
        else:
            for value in node.values:
                self.put("and/or", node, f"({self.source(value)})")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, (ast.Not, ast.USub, ast.Invert)):
            self.put("unary", node, f"({self.source(node.operand)})")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if _is_text(node.left) or _is_text(node.right):
            return  # of a message
        for other in OPERATORS.get(type(node.op), ()):
            self.swap("operator", node, op=other())
        if isinstance(node.op, ast.MatMult):
            self.swap("swap", node, left=node.right, right=node.left)
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self.put("constant", node, str(not node.value))
        elif isinstance(node.value, int):
            self.put("constant", node, str(node.value + 1))
            self.put("constant", node, f"({node.value - 1})")
        elif isinstance(node.value, float):
            self.put("constant", node, repr(node.value + 1))
            self.put("constant", node, repr(node.value * 2))

    def visit_Call(self, node: ast.Call) -> None:
        name = _name(node)
        if name in SILENT_CALLS:
            if name == "cast":
                self.visit(node.args[1])
            return
        if name in RENAMED:
            other = copy(node.func)
            if isinstance(other, ast.Name):
                other.id = RENAMED[name]
            elif isinstance(other, ast.Attribute):
                other.attr = RENAMED[name]
            self.swap("name", node, func=other)
        plain = not any(isinstance(a, ast.Starred) for a in node.args[:2])
        if len(node.args) >= 2 and plain and name not in {"isinstance", "getattr", "hasattr"}:
            self.swap("swap", node, args=[node.args[1], node.args[0], *node.args[2:]])
        if name == "sample":
            return
        for n, keyword in enumerate(node.keywords):
            if keyword.arg is not None:
                self.swap("argument", node, keywords=[*node.keywords[:n], *node.keywords[n + 1 :]])
        self.generic_visit(node)

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg != "samples":
            self.visit(node.value)

    def visit_Slice(self, node: ast.Slice) -> None:
        for part in (node.lower, node.upper, node.step):
            if part is not None:
                # What stays of `a:b` is never empty: the colon is no part of what goes.
                self.put("slice", part, "None")
        self.generic_visit(node)


def _name(node: ast.Call) -> str:
    if isinstance(node.func, ast.Attribute):
        return node.func.attr
    return node.func.id if isinstance(node.func, ast.Name) else ""


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
