"""The processes that a launcher such as torchrun started: who we are among them, what they tell
each other, and work that all of them wait for."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from common.errors import UserError
from common.text import shorten_error
from training.distributed import exit

ENCODING_TIMEOUT = timedelta(days=7)
"""For ranks that encode at different speed."""
EXCHANGE_SECONDS = 1.0
"""Seconds between two exchanges of how far each process is, while they work together."""
Result = TypeVar("Result")


@dataclass(frozen=True)
class Ranks:
    """This process's number among all, and on its machine; 0 of 1 without a launcher."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0

    @classmethod
    def from_environment(cls) -> Ranks:
        """From RANK, WORLD_SIZE and LOCAL_RANK, or Slurm's; ValueError if they contradict each
        other."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
        if "WORLD_SIZE" not in os.environ:
            if not {"SLURM_PROCID", "MASTER_ADDR"} <= os.environ.keys():
                return cls()
            names = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID")
        try:
            ranks = cls(*(int(os.environ.get(name) or 0) for name in names))
        except ValueError as error:
            raise UserError(
                f"RANK, WORLD_SIZE and LOCAL_RANK must be numbers ({error}); use torchrun."
            ) from error
        if not 0 <= ranks.rank < ranks.world_size:
            raise UserError(
                f"RANK={ranks.rank} does not fit WORLD_SIZE={ranks.world_size}; use torchrun."
            )
        return ranks

    @property
    def first(self) -> bool:
        """Whether this is the process that writes and speaks."""
        return self.rank == 0

    @property
    def alone(self) -> bool:
        """Whether there is no other process to communicate with."""
        return self.world_size == 1 or not dist.is_initialized()

    def say(self, text: str) -> None:
        """Prints; what several processes have to say is said once."""
        if self.first:
            print(text, flush=True)

    def check_batch(self, batch_size: int, accumulation_steps: int) -> None:
        """ValueError unless every process has the same number of samples in every micro-batch."""
        if batch_size % (accumulation_steps * self.world_size):
            raise UserError(
                f"batch_size={batch_size} (global) is not a multiple of "
                f"accumulation_steps={accumulation_steps} × {self.world_size} processes; change "
                "one of them."
            )

    def device(self, chosen: torch.device) -> torch.device:
        """The GPU of this process, where `chosen` is any GPU; ValueError if there are more
        processes than GPUs."""
        if chosen.type != "cuda" or self.world_size == 1:
            return chosen
        if self.local_rank >= torch.cuda.device_count():
            raise UserError(
                f"LOCAL_RANK={self.local_rank}, but this machine has {torch.cuda.device_count()} "
                "GPUs; start as many processes as it has (--nproc-per-node)."
            )
        device = torch.device("cuda", self.local_rank)
        torch.cuda.set_device(device)
        return device

    def connect(
        self,
        device: torch.device,
        timeout: timedelta,
        variables: Mapping[str, str],
        even_alone: bool = False,
    ) -> None:
        """Joins the process group; of one process only if `even_alone`. ValueError if the others
        cannot be reached."""
        if dist.is_initialized() or (self.world_size == 1 and not even_alone):
            return
        exit.group_joined = True
        os.environ.update(variables)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        how: dict[str, Any] = {"backend": backend, "timeout": timeout}
        if device.type == "cuda":
            how["device_id"] = torch.device("cuda", device.index or 0)
        if self.world_size == 1:
            dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1, **how)
            return
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if name not in os.environ:
                raise UserError(
                    f"{name} is not set, and WORLD_SIZE is {self.world_size}; start with torchrun."
                )
        try:
            if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
                # torchrun keeps one store over restarts; PyTorch 2.13 would find addresses of
                # processes in it that are gone.
                host = os.environ["MASTER_ADDR"]
                port = int(os.environ["MASTER_PORT"])
                store = dist.TCPStore(host, port, is_master=False, timeout=timeout)
                attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
                how["store"] = dist.PrefixStore(f"attempt-{attempt}", store)
            dist.init_process_group(rank=self.rank, world_size=self.world_size, **how)
        except (dist.DistError, RuntimeError) as error:
            where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            raise UserError(
                f"rank {self.rank} cannot reach the others at {where} within {timeout} "
                f"({shorten_error(error)}); check MASTER_ADDR, MASTER_PORT and that all ranks run."
            ) from error

    def broadcast_result(self, choose: Callable[[], Result]) -> Result:
        """Calls `choose` in the first process and returns its result in all of them; an exception
        there is raised in all of them too."""
        if self.alone:
            return choose()
        told: list[Any] = [None, None]
        if self.first:
            try:
                told[0] = choose()
            except Exception as error:
                told[1] = error
        dist.broadcast_object_list(told, src=0)
        result, failure = told
        if failure is not None:
            raise failure
        return result

    def gather_objects(self, item: Result, group: dist.ProcessGroup | None = None) -> list[Result]:
        """The objects of all processes, in order."""
        if self.alone:
            return [item]
        found: list[Any] = [None] * self.world_size
        dist.all_gather_object(found, item, group=group)
        return found

    def all_reduce(self, values: Tensor, how: str = "mean") -> Tensor:
        """Mean or maximum of a tensor over all processes."""
        if self.alone:
            return values
        values = values.clone()
        dist.all_reduce(values, dist.ReduceOp.MAX if how == "max" else dist.ReduceOp.SUM)
        return values / self.world_size if how == "mean" else values

    def begin_max(self, value: int) -> Callable[[], int]:
        """Begins to find the highest value of all processes; what it returns waits for that."""
        values = torch.tensor(float(value))
        work: Any = dist.all_reduce(values, dist.ReduceOp.MAX, async_op=True)

        def result() -> int:
            work.wait()
            return int(values.item())

        return result

    def wait_for_all(self) -> None:
        """Returns once every process has come here."""
        if self.world_size > 1:
            self.connect(torch.device("cpu"), ENCODING_TIMEOUT, {})
            dist.barrier()

    def close(self) -> None:
        if dist.is_available() and dist.is_initialized():
            dist.destroy_process_group()


class Share(NamedTuple):
    """What a process tells the others of its part in some work."""

    idle_seconds: float = 0.0
    """Seconds since it made progress."""
    ended: bool = False
    result: Any = None
    failure: BaseException | None = None


class JointWork:
    """Runs a function in every process, each in a thread of its own, and gives all of them all
    results.

    The function calls `advance` as it gets on. A process that has not done so for `patience`, or
    that does not answer for so long, ends the work of all with a TimeoutError. Training goes on
    beside it: the exchange has its own group.
    """

    def __init__(self, ranks: Ranks, patience: timedelta) -> None:
        self.ranks = ranks
        self.patience = patience.total_seconds()
        self.group: Any = None if ranks.alone else dist.new_group(backend="gloo", timeout=patience)
        self.done = 0
        """Bytes, of this process."""
        self.advanced = time.monotonic()

    def advance(self, count: int = 0) -> None:
        self.done = self.done + count
        self.advanced = time.monotonic()

    def run_everywhere(self, work: Callable[[], Any]) -> list[Any]:
        """The results of all processes, in order; all of them call it.

        An exception of one is raised in all: an OSError once none is at work any more, any other at
        once. TimeoutError as said above.
        """
        found: list[Share] = []
        self.advance()
        # In a thread that nobody has to wait for: a disk may hang.
        thread = threading.Thread(
            target=lambda: found.append(run_share(work)),
            name=threading.current_thread().name,
            daemon=True,
        )
        thread.start()
        while True:
            thread.join(min(EXCHANGE_SECONDS, self.patience / 4))
            own = found[0] if found else Share(idle_seconds=time.monotonic() - self.advanced)
            try:
                shares = self.ranks.gather_objects(own, self.group)
            except RuntimeError as error:
                raise TimeoutError(
                    f"another process has ended, or has not answered for {self.patience:.0f} s"
                ) from error

            shares[self.ranks.rank] = own  # what was sent and came back has no traceback
            ended = all(share.ended for share in shares)
            for rank, share in enumerate(shares):
                if share.idle_seconds > self.patience:
                    raise TimeoutError(
                        f"process {rank} has written nothing for {self.patience:.0f} s"
                    )
                if share.failure and (ended or not isinstance(share.failure, OSError)):
                    raise share.failure
            if ended:
                return [share.result for share in shares]


def run_share(work: Callable[[], Any]) -> Share:
    """Does the work, whatever it ends with."""
    try:
        return Share(ended=True, result=work())
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        text = f"{error.strerror}{where}" if error.strerror else str(error)
        return Share(ended=True, failure=OSError(text))
    except BaseException as error:
        return Share(ended=True, failure=error)


SINGLE = Ranks()
