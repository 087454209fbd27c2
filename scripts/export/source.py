"""Joins one source file from many: copies the definitions that a class needs, unchanged, from our
modules.

It cuts code that an exported model never runs: `if` branches that run fused kernels
(`self.fused_…`, `HAS_TRITON`), and methods that only training calls. The file then contains only
definitions and imports of other packages, so it runs where this project is not installed. Every
export copies the present sources, so the file cannot differ from the sources. It is one file, not a
folder of modules, because diffusers downloads one file of code for each part of a pipeline, and if
that file imports a module of its folder, diffusers loads the module only once for all folders.
"""

from __future__ import annotations

import ast
import copy
import importlib.util
import textwrap
from functools import cache
from pathlib import Path

OWN_PACKAGES = ("common", "accel", "models", "scripts")
TRAINING_METHODS = ("flops", "flops_per_sample", "list_unclipped", "no_weight_decay")
"""Methods that only training calls; `Cut` removes them."""


def is_off(node: ast.expr) -> bool:
    """Returns whether an expression is false in every exported model: a name or attribute that
    turns on a fused kernel (`fused_…` or `HAS_TRITON`), or an `and` that contains one."""
    if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.And):
        return any(is_off(value) for value in node.values)
    name = getattr(node, "attr", getattr(node, "id", ""))
    return name.startswith("fused_") or name == "HAS_TRITON"


class Cut(ast.NodeTransformer):
    """Removes the code that an exported model never runs (training methods, `if` branches that run
    fused kernels), and the statements that declare or set the attributes `fused_…` and
    `HAS_TRITON`, which turn on fused kernels."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST | None:
        return None if node.name in TRAINING_METHODS else self.generic_visit(node)

    def visit_If(self, node: ast.If | ast.IfExp) -> ast.AST | list[ast.stmt]:
        self.generic_visit(node)
        return node.orelse if is_off(node.test) or not node.body else node

    visit_IfExp = visit_If  # noqa: N815 - a name of `ast`

    def visit_Assign(self, node: ast.Assign) -> ast.AST | None:
        return None if all(map(is_off, node.targets)) else self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST | None:
        return None if is_off(node.target) else self.generic_visit(node)


def keep_lines(lines: list[str], node: ast.stmt, start: int) -> list[str]:
    """Returns the lines from `start` up to the statement `node`, and then the lines of the
    statement without the code that `Cut` removes.

    Copies the lines unchanged, with their comments; ast.unparse formats only the statements that
    `Cut` changes.
    """
    kept = Cut().visit(copy.deepcopy(node))
    if not kept:
        return []
    if ast.unparse(kept) == ast.unparse(node):
        return lines[start : node.end_lineno]
    if not isinstance(node, ast.FunctionDef | ast.ClassDef):
        return textwrap.indent(ast.unparse(kept), " " * node.col_offset).splitlines()
    end = node.body[0].lineno - 1
    result = lines[start:end]
    for statement in node.body:
        result += keep_lines(lines, statement, end)
        end = statement.end_lineno or end
    return result


@cache
def read_statements(module: str) -> tuple[list[str], dict[str, ast.stmt]]:
    """Reads a module; returns its lines, and name -> the top-level statement that defines this
    name."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    text = Path(str(spec.origin)).read_text()
    definitions: dict[str, ast.stmt] = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names = [node.name]
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.asname or alias.name for alias in node.names]
        else:
            names = [
                part.id
                for part in ast.walk(node)
                if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)
            ]
        definitions |= dict.fromkeys(names, node)
    return text.splitlines(), definitions


class File:
    """A source file under construction: adding a definition also adds all definitions that it
    needs."""

    def __init__(self) -> None:
        self.imports: set[str] = set()
        self.parts: list[str] = []
        self.modules: dict[str, str] = {}
        """Name of an added definition -> the module that contains it."""

    def add(self, module: str, name: str) -> None:
        """Adds the definition of `name` in `module`, after all definitions that it needs."""
        lines, definitions = read_statements(module)
        node = definitions.get(name)
        if isinstance(node, ast.Import | ast.ImportFrom):
            self.add_import(node, name)
        elif node is not None and self.modules.get(name) != module:
            assert name not in self.modules, f"two definitions are called {name}"
            self.modules[name] = module
            start = min(n.lineno for n in [node, *getattr(node, "decorator_list", [])]) - 1
            text = "\n".join(keep_lines(lines, node, start))
            for part in ast.walk(ast.parse(text)):
                if isinstance(part, ast.Name):
                    self.add(module, part.id)
            self.parts.append(f"# From {module.replace('.', '/')}.py\n{text}")

    def add_import(self, node: ast.Import | ast.ImportFrom, name: str) -> None:
        """Adds the definition of the imported `name` if it is in this project, or the import
        statement if it is in another package."""
        alias = next(alias for alias in node.names if name in (alias.asname, alias.name))
        if isinstance(node, ast.Import):
            self.imports.add(ast.unparse(ast.Import([alias])))
            return

        package = str(node.module)
        if package.split(".")[0] in OWN_PACKAGES:
            self.add(package, alias.name)
        # Replace types of jaxtyping by Annotated, so that the exported file does not need
        # jaxtyping.
        elif package == "jaxtyping":
            self.imports.add(f"from typing import Annotated as {name}")
        else:
            self.imports.add(ast.unparse(ast.ImportFrom(package, [alias], 0)))


def join_sources(docstring: str, *kinds: str) -> str:
    """Returns the text of one source file: `docstring`, and the classes `kinds`, given as
    <module>.<name>, with all definitions that they need."""
    file = File()
    for kind in kinds:
        module, _, name = kind.rpartition(".")
        file.add(module, name)
    head = f'"""{docstring}"""\n\nfrom __future__ import annotations\n'
    return "\n".join([head, *sorted(file.imports), "\n", "\n\n\n".join(file.parts), ""])
