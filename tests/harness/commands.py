"""Runs train.py as a user would."""

import subprocess
import sys

from common.distributed.exit import run_app
from common.files import ROOT
from train import main


def run_here(monkeypatch, *words):
    """Runs `train.py` with these words in this process."""
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    monkeypatch.setenv("HYDRA_MAIN_MODULE", "__main__")
    run_app(main)


def run_command(*words, cwd=ROOT, environment=None):
    """Runs `train.py` as a user would; returns what it prints, after its exit code."""
    command = [sys.executable, str(ROOT / "train.py"), *words]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    return f"{done.returncode}\n{done.stdout}{done.stderr}"
