"""A user's package in this process."""

import sys

from common.config import build


def forget_package():
    """Forgets the package `myproj` and that it was admitted, as in another process."""
    build.admitted_packages.clear()
    for name in [name for name in sys.modules if name.partition(".")[0] == "myproj"]:
        del sys.modules[name]
