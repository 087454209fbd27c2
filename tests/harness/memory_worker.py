"""Trains with the words of its command line; prints, as JSON, the bytes that were foreseen and the
bytes that the process and its children held at most."""

import json
import sys
from pathlib import Path

from common.config.compose import compose
from common.memory import give_back_freed_memory, read_kib
from train import train
from training.preflight import memory
from training.run import RunFolder


def read_own_bytes(process):
    """The bytes that only this process holds."""
    file = Path(f"/proc/{process}/smaps_rollup")
    return sum(read_kib(file, name) for name in ("Private_Clean", "Private_Dirty"))


def main(words):
    seen = {"workers": 0.0}
    summarise = RunFolder.summarise

    def note(setting, need, room, advise):
        # As where memory is tight: only then does it matter how much is foreseen.
        give_back_freed_memory()
        seen["foreseen"] = room.held + sum(need.parts.values()) + need.each * need.samples

    def summarise_and_look(self, *arguments):
        children = Path("/proc/self/task").glob("*/children")
        numbers = {number for file in children for number in file.read_text().split()}
        seen["workers"] = sum(map(read_own_bytes, numbers))
        return summarise(self, *arguments)

    memory.refuse_excess = note
    RunFolder.summarise = summarise_and_look
    train(compose(words))
    held = read_kib(Path("/proc/self/status"), "VmHWM") + seen["workers"]
    print(json.dumps({"held": held, **seen}))


if __name__ == "__main__":
    main(sys.argv[1:])
