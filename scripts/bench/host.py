"""Says what a GPU host without a network needs."""

from __future__ import annotations

from common.config.compose import read_config
from scripts.bench import FOLDER, Words


def print_carried(words: Words) -> None:
    """Prints the packages of host.yaml that such a host lacks."""
    print(*read_config(FOLDER / "host.yaml")["carried"], sep="\n")
