"""One file of source from many: the definitions that a class needs, copied from our modules as they
stand there.

What an exported model never does is cut out: branches on fused kernels (`self.fused_…`,
`WITH_TRITON`), and methods that only training calls. What is left is definitions and imports of
other packages, so that it runs where this project is not installed; and because it is cut from the
sources at every export, it cannot drift from them.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import textwrap
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, cast

OURS = ("common", "accel", "data", "models", "scripts", "training")
SHAPED = ("Float", "Int", "UInt8")
"""Annotations with a shape, of a package that the reader need not have."""
UNUSED = ("flops", "flops_per_sample", "no_weight_decay")
"""Methods that only training calls."""
Definition = ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign


class Name(NamedTuple):
    """A definition at the top of one of our modules."""

    module: str
    name: str


@cache
def text_of(module: str) -> str:
    spec = importlib.util.find_spec(module)
    assert spec is not None
    return Path(str(spec.origin)).read_text()


@cache
def definitions(module: str) -> dict[str, Definition]:
    """Name -> definition at the top of a module."""
    found: dict[str, Definition] = {}
    for node in ast.parse(text_of(module)).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {
                part.id: node
                for target in targets
                for part in ast.walk(target)
                if isinstance(part, ast.Name)
            }
    return found


@cache
def imports(module: str) -> dict[str, tuple[str, str | None]]:
    """Name -> (module, the name there, or None where the module itself is meant)."""
    found: dict[str, tuple[str, str | None]] = {}
    for node in ast.parse(text_of(module)).body:
        if isinstance(node, ast.Import):
            found |= {alias.asname or alias.name: (alias.name, None) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {
                alias.asname or alias.name: (str(node.module), alias.name) for alias in node.names
            }
    return found


def source_of(name: Name) -> str:
    """The text of a definition with its decorators, and without what is cut out."""
    node = definitions(name.module)[name.name]
    first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
    lines = text_of(name.module).splitlines()[first - 1 : node.end_lineno]
    return folded("\n".join(lines))


def known(test: ast.expr) -> bool | None:
    """The value of a condition in an exported model; None where it is not known."""
    if isinstance(test, ast.Attribute | ast.Name):
        name = test.attr if isinstance(test, ast.Attribute) else test.id
        return False if name.startswith("fused_") or name == "WITH_TRITON" else None
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return False if any(known(value) is False for value in test.values) else None
    return None


def folded(text: str) -> str:
    """The text without branches that are never taken, one after the other until none is left."""
    while edit := next(edits(text), None):
        start, end, instead = edit
        text = text[:start] + instead + text[end:]
    return re.sub(r"\((\w+)\)\(", r"\1(", re.sub(r"  # pyright: ignore\S*", "", text)).strip("\n")


class Text:
    """A text whose places are known by the nodes of its syntax tree, which count bytes of lines."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.lines = text.splitlines(keepends=True)

    def at(self, row: int, column: int) -> int:
        """The index of a place."""
        line = self.lines[row - 1].encode()[:column].decode()
        return sum(map(len, self.lines[: row - 1])) + len(line)

    def span(self, node: Any) -> tuple[int, int]:
        """Where a node begins and ends."""
        begin = self.at(node.lineno, node.col_offset)
        return begin, self.at(node.end_lineno, node.end_col_offset)

    def whole(self, first: Any, last: Any) -> tuple[int, int]:
        """The lines from one statement to another, with decorators and the blank lines before."""
        decorators = getattr(first, "decorator_list", [])
        start = min([first.lineno, *(decorator.lineno for decorator in decorators)])
        while start > 1 and not self.lines[start - 2].strip():
            start -= 1
        return self.at(start, 0), sum(map(len, self.lines[: last.end_lineno]))


def edits(text: str) -> Iterator[tuple[int, int, str]]:
    """Spans to exchange: shaped annotations, conditions that are known, switches of fused kernels,
    unused methods."""
    places = Text(text)
    for node in ast.walk(ast.parse(text)):
        if shaped := shape_of(node):
            yield *places.span(node), shaped
        elif isinstance(node, ast.IfExp) and known(node.test) is False:
            start, end = places.span(node.orelse)
            yield *places.span(node), text[start:end]
        elif isinstance(node, ast.If) and (known(node.test) is False or not body_of(node)):
            kept = ""
            if node.orelse:
                kept = text[slice(*places.whole(node.orelse[0], node.orelse[-1]))]
            kept = textwrap.indent(textwrap.dedent(kept), " " * node.col_offset)
            yield *places.whole(node, node), kept
        elif isinstance(node, ast.FunctionDef) and node.name in UNUSED and node.col_offset:
            yield *places.whole(node, node), ""
        elif is_switch(node):
            yield *places.whole(node, node), "" if len(places.lines) > 1 else "pass"


def shape_of(node: ast.AST) -> str | None:
    """An annotation such as Float[Tensor, "B C"] without jaxtyping; None for any other node."""
    if not (isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name)):
        return None
    if node.value.id not in SHAPED:
        return None
    kind, shape = cast("ast.Tuple", node.slice).elts
    said = f"{node.value.id.lower()} {cast('ast.Constant', shape).value}"
    return f'Annotated[{ast.unparse(kind)}, "{said}"]'


def body_of(node: ast.If) -> list[ast.stmt]:
    """What is left in the body of an `if` once switches are gone."""
    return [statement for statement in node.body if not is_switch(statement)]


def is_switch(node: ast.AST) -> bool:
    """Whether a statement only sets or declares a switch of a fused kernel."""
    targets = (
        node.targets
        if isinstance(node, ast.Assign)
        else [node.target]
        if isinstance(node, ast.AnnAssign)
        else []
    )
    return bool(targets) and all(
        getattr(target, "attr", getattr(target, "id", "")).startswith("fused_")
        for target in targets
    )


def names_in(text: str) -> set[str]:
    return {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}


class File:
    """A file that grows by definitions and all that they need. `instead` has texts for definitions
    to stand there."""

    def __init__(self, instead: Mapping[Name, str]) -> None:
        self.instead = instead
        self.texts: dict[Name, str] = {}
        self.called: dict[Name, str] = {}
        """What a definition is called here, where two modules have one of the same name."""
        self.imports: set[str] = set()
        self.begun: set[Name] = set()

    def add(self, name: Name) -> str:
        """Adds a definition after all that it needs; returns what it is called here."""
        if name in self.begun:
            return self.called[name]
        self.begun.add(name)
        taken = set(self.called.values())
        self.called[name] = (
            name.name if name.name not in taken else f"{name.module.rpartition('.')[2]}_{name.name}"
        )
        text = self.instead.get(name) or source_of(name)
        here = definitions(name.module)
        elsewhere = imports(name.module)
        others: dict[str, str] = {}
        for used in sorted(names_in(text)):
            target = Name(name.module, used) if used in here else None
            if used in elsewhere and (module := elsewhere[used][0]).split(".")[0] in OURS:
                target = Name(module, str(elsewhere[used][1]))
            if target is not None:
                others[used] = self.add(target)
            elif used in elsewhere:
                self.imports.add(import_line(used, *elsewhere[used]))
            elif used == "Annotated":
                self.imports.add("from typing import Annotated")
        changed = {
            old: new for old, new in (others | {name.name: self.called[name]}).items() if old != new
        }
        self.texts[name] = renamed(text, changed)
        return self.called[name]

    def write(self, docstring: str) -> str:
        """The file, in the order in which its definitions were completed."""
        parts = []
        module = ""
        for name, text in self.texts.items():
            if name.module != module:
                module = name.module
                text = f"# From {module.replace('.', '/')}.py\n\n\n{text}"
            # a statement may define several names
            if not any(part.endswith(text) for part in parts):
                parts.append(text)
        direct = sorted(line for line in self.imports if line.startswith("import "))
        of_module: dict[str, list[str]] = {}
        for line in sorted(self.imports - set(direct)):
            source, _, name = line.removeprefix("from ").partition(" import ")
            of_module.setdefault(source, []).append(name)
        named = [f"from {source} import {', '.join(names)}" for source, names in of_module.items()]
        head = [
            f'"""{docstring}"""',
            "from __future__ import annotations",
            "\n".join([*direct, *named]),
        ]
        return "\n\n".join(head) + "\n\n\n" + "\n\n\n".join(parts) + "\n"


def import_line(used: str, module: str, name: str | None) -> str:
    if name is None:
        return (
            f"import {module}"
            if module in (used, used.split(".")[0])
            else f"import {module} as {used}"
        )
    return f"from {module} import {name}" + (f" as {used}" if used != name else "")


def renamed(text: str, names: Mapping[str, str]) -> str:
    """The text with other names for what is defined or used at the top of a module."""
    for old, new in names.items():
        text = re.sub(rf"(?<![\w.\"`]){old}(?![\w\"`])", new, text)
    return text
