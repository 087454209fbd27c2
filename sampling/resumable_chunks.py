"""Long work cut into numbered pieces on the disk, so that the same command goes on after a kill.

A piece is one safetensors file named `<number>-<first half of its sha256>.safetensors`. It is
written under another name, flushed and renamed: what has the name of a piece is whole, and its name
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
from training.checkpoint.tensor_file import write_tensors
from training.distributed.ranks import Ranks

JOB = "job.json"
DIGITS = 32


class Pieces:
    """The pieces of one job in one folder, dealt to the processes in turn.

    `job` is everything that their content depends on. The folder is locked until `close` or the end
    of the process. ValueError if another command works in it and this one does not wait, or if it
    holds the pieces of another job.
    """

    def __init__(
        self, folder: Path, job: Mapping[str, Any], count: int, ranks: Ranks, *, waits: bool = False
    ) -> None:
        self.folder = folder
        self.count = count
        self.ranks = ranks
        self.waits = waits
        self.job = json.loads(json.dumps(job))
        self.lock: lock.Held | None = None
        said = False
        # asked anew, so that no process waits long for another's answer
        while not ranks.agreed(self.claim):
            if not said:
                ranks.say(f"waiting for another process that works on {folder}")
            said = True
            time.sleep(0.5)

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
            if self.waits:
                return False
            raise
        file = self.folder / JOB
        if not file.is_file():
            write_atomically(file, json.dumps(self.job, indent=1) + "\n")
        elif (earlier := read_object(file)) != self.job:
            keys = sorted(
                key for key in earlier | self.job if earlier.get(key) != self.job.get(key)
            )
            said = "; ".join(
                f"{key} was {earlier.get(key)}, is {self.job.get(key)}" for key in keys
            )
            raise UserError(
                f"{self.folder} holds the unfinished work of another command ({said}); delete it "
                "or use another out."
            )
        return True

    def mine(self) -> list[int]:
        """Numbers of this process's pieces."""
        return list(range(self.ranks.rank, self.count, self.ranks.world_size))

    def missing(self) -> list[int]:
        """Those of them that are not there, or damaged."""
        return [number for number in self.mine() if self.found(number) is None]

    def found(self, number: int) -> Path | None:
        """The file of a piece whose content has the hash of its name. Any other file of that number
        is deleted."""
        for file in self.folder.glob(f"{number:06d}-*"):
            if (
                file.suffix == ".safetensors"
                and file_sha256(file)[:DIGITS] == file.stem.partition("-")[2]
            ):
                return file
            file.unlink()
        return None

    def write(self, number: int, tensors: Mapping[str, Tensor]) -> None:
        """Writes a piece; ValueError where the disk does not take it."""
        temporary = self.folder / f"{number:06d}-tmp"
        try:
            digest = write_tensors(temporary, {name: t.cpu() for name, t in tensors.items()}, {})[
                "sha256"
            ]
            rename(temporary, self.folder / f"{number:06d}-{digest[:DIGITS]}.safetensors")
            sync_folder(self.folder)
        except OSError as error:
            raise UserError(
                f"{self.folder}: piece {number} cannot be written ({error.strerror}); what is "
                "finished is kept. Mend that and run the same command again."
            ) from error

    def read(self, number: int) -> dict[str, Tensor]:
        """The tensors of a piece; ValueError if it is gone or damaged."""
        if (file := self.found(number)) is None:
            raise UserError(
                f"{self.folder}: piece {number} is gone or damaged; run the same command again."
            )
        return load(file.read_bytes())

    def close(self) -> None:
        """Waits for the other processes and lets go of the folder; the pieces stay."""
        self.ranks.wait_for_all()
        if self.lock is not None:
            self.lock.close()

    def remove(self) -> None:
        """Deletes the pieces, once all processes need them no more."""
        self.close()
        if self.ranks.first:
            shutil.rmtree(self.folder, ignore_errors=True)
