"""Draws docstrings and comments at random, for a reader who did not write them.

`python -m tests.harness.draw_sentences [count=100] [seed=0]` prints each with its place and the
line of code that it is about. The reader gives a verdict a line: plain (understood at once), second
reading, or riddle. Notes of shapes and instructions to tools are not drawn.
"""

from __future__ import annotations

import ast
import io
import random
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator

from common.files import ROOT

NO_SENTENCE = re.compile(r"# *(noqa|type:|pyright:)")


def find_docstrings(source: str) -> Iterator[tuple[int, int, str]]:
    """Yields line, line of code and text of each docstring, those of constants and fields too."""
    for node in ast.walk(ast.parse(source)):
        statements = getattr(node, "body", None)
        before = getattr(node, "lineno", 1)
        for statement in statements if isinstance(statements, list) else ():
            text = getattr(getattr(statement, "value", None), "value", None)
            if isinstance(statement, ast.Expr) and isinstance(text, str):
                yield statement.lineno, before, text
            before = statement.lineno


def find_comments(source: str) -> Iterator[tuple[int, int, str]]:
    """Yields line, line of code and text of each comment; lines without code form one comment."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {token.start[0]: token for token in tokens if token.type == tokenize.COMMENT}
    alone = {line for line, token in comments.items() if token.line.lstrip().startswith("#")}
    for first, token in comments.items():
        if first not in alone:
            yield first, first, token.string
        elif first - 1 not in alone:
            after = first
            while after in alone:
                after += 1
            yield first, after, " ".join(comments[line].string for line in range(first, after))


def main(count: int = 100, seed: int = 0) -> None:
    """Prints `count` docstrings and comments of all code but the tests."""
    names = subprocess.check_output(["git", "ls-files", "*.py", ":!tests"], cwd=ROOT, text=True)
    drawn = []
    for name in names.split():
        source = (ROOT / name).read_text()
        lines = source.splitlines()
        for line, code, text in (*find_docstrings(source), *find_comments(source)):
            if len(re.findall(r"[A-Za-z]{3,}", text)) > 2 and not NO_SENTENCE.match(text):
                drawn.append((f"{name}:{line}", lines[code - 1].strip(), " ".join(text.split())))

    for number, (place, code, text) in enumerate(random.Random(seed).sample(drawn, count), 1):
        print(f"{number:3}. {place}  [{code}]\n     {text}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
