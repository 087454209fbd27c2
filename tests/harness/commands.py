"""Runs train.py as a user would."""

import subprocess
import sys

from common.files import ROOT


def run_command(*words, cwd=ROOT, environment=None):
    """Runs `train.py` as a user would; returns what it prints, after its exit code."""
    command = [sys.executable, str(ROOT / "train.py"), *words]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    return f"{done.returncode}\n{done.stdout}{done.stderr}"
