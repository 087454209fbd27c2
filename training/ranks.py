"""Who we are among the processes that a launcher such as torchrun started."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch

LONGEST_WAIT = timedelta(days=7)
"""For ranks that encode at different speed."""


@dataclass(frozen=True)
class Ranks:
    """This process's number among all, and on its machine; 0 of 1 without a launcher."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0

    @classmethod
    def from_environment(cls) -> Ranks:
        """From RANK, WORLD_SIZE and LOCAL_RANK; ValueError if they contradict each other."""
        found = {name: os.environ.get(name.upper()) for name in ("rank", "world_size", "local_rank")}
        if found["world_size"] is None:
            return cls()
        try:
            ranks = cls(**{name: int(value or 0) for name, value in found.items()})
        except ValueError as error:
            raise ValueError(f"RANK, WORLD_SIZE and LOCAL_RANK must be numbers ({error}); use torchrun.") from error
        if not 0 <= ranks.rank < ranks.world_size:
            raise ValueError(f"RANK={ranks.rank} does not fit WORLD_SIZE={ranks.world_size}; use torchrun.")
        return ranks

    def device(self, chosen: torch.device) -> torch.device:
        """The GPU of this process, where `chosen` is any GPU."""
        if chosen.type != "cuda" or self.world_size == 1:
            return chosen
        device = torch.device("cuda", self.local_rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device

    def wait_for_all(self) -> None:
        """Returns once every process has come here."""
        if self.world_size > 1:
            if not torch.distributed.is_initialized():
                torch.distributed.init_process_group("gloo", timeout=LONGEST_WAIT)
            torch.distributed.barrier()

    def close(self) -> None:
        if self.world_size > 1 and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
