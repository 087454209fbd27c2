"""Long work cut into numbered chunks on the disk, so that the same command goes on after a kill.

A chunk is one safetensors file named `<number>-<first half of its sha256>.safetensors`. It is
written under another name, flushed and renamed: what has the name of a chunk is whole, and its name
tells whether it still is.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load
from torch import Tensor

from common import lock
from common.errors import UserError
from common.files import (
    file_sha256,
    make_folder,
    read_object,
    rename,
    sync_folder,
    write_atomically,
)
from training.checkpoint.files import write_tensors
from training.distributed.ranks import Ranks

JOB = "job.json"
DIGITS = 32
"""Of the sha256 in a file's name."""


class ResumableChunks:
    """The chunks of one job in one folder, dealt to the processes in turn.

    `job` is everything that their content depends on. The folder is locked until `close` or the end
    of the process. ValueError if another command works in it and this one does not wait, or if it
    holds the chunks of another job.
    """

    def __init__(
        self, folder: Path, job: Mapping[str, Any], count: int, ranks: Ranks, *, waits: bool = False
    ) -> None:
        self.folder = folder
        self.count = count
        self.ranks = ranks
        self.waits = waits
        self.lock: lock.Held | None = None

        # asked anew, so that no process waits long for another's answer
        waiting = False
        while not ranks.agreed(self.claim):
            if not waiting:
                ranks.say(f"waiting for another process that works on {folder}")
            waiting = True
            time.sleep(0.5)
        ranks.agreed(lambda: self.refuse_another(json.loads(json.dumps(job))))

    def claim(self) -> bool:
        """Locks the folder; False if another process holds it and this one may wait."""
        try:
            make_folder(self.folder)
            self.lock = lock.held(
                self.folder, f"{self.folder}: another process works on it; wait, or stop it."
            )
        except OSError as error:
            raise UserError(
                f"{self.folder} cannot be made or written ({error.strerror}); choose another out, "
                "or set XDG_CACHE_HOME where it is a cache."
            ) from error
        except ValueError:
            if not self.waits:
                raise
        return self.lock is not None

    def refuse_another(self, job: dict[str, Any]) -> None:
        """Writes down which job the folder is for; ValueError if it is for another one."""
        file = self.folder / JOB
        if not file.is_file():
            write_atomically(file, json.dumps(job, indent=1) + "\n")
        earlier = read_object(file)
        keys = sorted(key for key in earlier | job if earlier.get(key) != job.get(key))
        if keys:
            told = "; ".join(f"{key} was {earlier.get(key)}, is {job.get(key)}" for key in keys)
            raise UserError(
                f"{self.folder} holds the unfinished work of another command ({told}); delete it "
                "or use another out."
            )

    def mine(self) -> list[int]:
        """Returns the numbers of this process's chunks."""
        return list(range(self.ranks.rank, self.count, self.ranks.world_size))

    def missing(self) -> list[int]:
        """Returns those of this process's chunks that are absent or damaged."""
        return [number for number in self.mine() if self.find(number) is None]

    def find(self, number: int) -> Path | None:
        """Finds the file of a chunk whose content has the hash of its name.

        Any other file of that number is deleted.
        """
        for file in self.folder.glob(f"{number:06d}-*"):
            if file.name == self.name(number, file_sha256(file)):
                return file
            file.unlink()
        return None

    def name(self, number: int, sha256: str) -> str:
        return f"{number:06d}-{sha256[:DIGITS]}.safetensors"

    def write(self, number: int, tensors: Mapping[str, Tensor]) -> None:
        """Writes a chunk; ValueError where the disk does not take it."""
        temporary = self.folder / f"{number:06d}-tmp"
        try:
            written = write_tensors(temporary, {name: t.cpu() for name, t in tensors.items()}, {})
            rename(temporary, self.folder / self.name(number, written["sha256"]))
            sync_folder(self.folder)
        except OSError as error:
            raise UserError(
                f"{self.folder}: piece {number} cannot be written ({error.strerror}); what is "
                "finished is kept. Mend that and run the same command again."
            ) from error

    def read(self, number: int) -> dict[str, Tensor]:
        """Reads the tensors of a chunk; ValueError if it is gone or damaged."""
        file = self.find(number)
        if file is None:
            raise UserError(
                f"{self.folder}: piece {number} is gone or damaged; run the same command again."
            )
        return load(file.read_bytes())

    def close(self) -> None:
        """Waits for the other processes and lets go of the folder; the chunks stay."""
        self.ranks.wait_for_all()
        if self.lock is not None:
            self.lock.close()

    def remove(self) -> None:
        """Deletes the chunks, once all processes need them no more."""
        self.close()
        if self.ranks.first:
            shutil.rmtree(self.folder, ignore_errors=True)
