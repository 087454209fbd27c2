"""Mistakes of newcomers and the line that each command prints: key, value and fix.

`python -m tests.harness.mistakes` makes all of them in one process.
"""

import contextlib
import io
import json
import runpy
import shlex
import sys

import yaml

from common.files import ROOT

MISTAKES = yaml.safe_load((ROOT / "tests" / "assets" / "newcomers.yaml").read_text())
MISTAKES |= {
    f"train.py run_dir={'a' * 300}": (
        f"run_dir={'a' * 300} cannot be a folder, for a name in it has over 255 bytes; choose a "
        "shorter one."
    ),
    f"train.py run_dir={'b/' * 2100}": f"the path {'b/' * 30}… is too long; use a shorter one.",
}
"""Command -> the sentence after `error: `."""


def make_mistake(line):
    """Runs a command; returns its exit status, what it printed to stderr, and whether torch was
    imported."""
    sys.argv = shlex.split(line)
    errors = io.StringIO()
    status = 0
    try:
        with contextlib.redirect_stderr(errors), contextlib.redirect_stdout(io.StringIO()):
            if sys.argv[0].endswith(".py"):
                runpy.run_path(str(ROOT / sys.argv[0]), run_name="__main__")
            else:
                runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    except SystemExit as ending:
        status = ending.code
    return status, errors.getvalue(), "torch" in sys.modules


if __name__ == "__main__":
    print(json.dumps([make_mistake(line) for line in MISTAKES]))
