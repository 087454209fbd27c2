"""Which Pythons the commands accept, and what they say to others."""

import os
import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from common.files import ROOT
from common.require_python import refuse_python

run = partial(subprocess.run, cwd=ROOT, capture_output=True, text=True)


def test_a_python_that_is_too_old_or_too_new_is_named():
    for version, name in (((3, 10, 13), "3.10.13"), ((3, 14, 0), "3.14.0")):
        with pytest.raises(SystemExit, match=rf"this is {name} \(/usr/bin/python\); `make setup"):
            refuse_python(version, "/usr/bin/python")
    for version in ((3, 11, 0), (3, 13, 9)):
        refuse_python(version)


@pytest.mark.parametrize(
    ("word", "exported", "anew"),
    [(sys.executable, "", False), ("/no/python", "", True), (None, "/no/python", False)],
)
def test_a_venv_is_made_anew_for_another_python_on_the_command_line_alone(
    word, exported, anew, tmp_path
):
    """Whatever made it: this one has no pyvenv.cfg."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    words = ["make", "-n", "setup", f"VENV={tmp_path}", *([f"PYTHON={word}"] if word else [])]
    env = os.environ | {"MAKEFLAGS": ""} | ({"PYTHON": exported} if exported else {})
    done = run(words, env=env, check=True)
    assert (f"rm -rf {tmp_path}" in done.stdout) is anew


@pytest.mark.parametrize("start", [["train.py"], ["-m", "scripts.sample"], ["make"]])
def test_an_older_python_is_told_before_anything_fails_on_it(start, tmp_path):
    pyenv = Path.home().glob(".pyenv/versions/3.10*/bin/python")
    older = next(pyenv, shutil.which("python3.10"))
    if older is None:
        pytest.skip("no Python 3.10 at hand")
    words = [str(older), *start]
    if start == ["make"]:
        words = ["make", "setup", f"PYTHON={older}", f"VENV={tmp_path / 'venv'}"]
    done = run(words)
    assert done.returncode
    assert done.stderr.startswith("error: fastlatent needs Python 3.11 to 3.13; this is 3.10.")
    assert not (tmp_path / "venv").exists()


@pytest.mark.parametrize(("program", "code"), [("train.py", 130), ("-m", 130), ("notebook", 1)])
def test_ctrl_c_before_a_command_catches_it_is_one_line(program, code):
    """In a notebook it stays Python's own."""
    script = f"import sys; sys.argv = [{program!r}]; import common.require_python, os, signal\n"
    script += "try: os.kill(os.getpid(), signal.SIGINT)\nexcept KeyboardInterrupt: sys.exit(1)"
    words = [sys.executable, "-c", script]
    done = run(words)
    assert done.returncode == code
    assert done.stderr.count("\n") == (2 if code == 130 else 0)
