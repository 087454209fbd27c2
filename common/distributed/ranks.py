"""Ranks of a run: this process's rank, collectives between the ranks, and `JointWork`, which runs a
function on every rank and waits for all ranks."""

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

ENCODING_TIMEOUT = timedelta(days=7)
"""Timeout of collectives in commands that encode images or draw samples: so long, because the ranks
may finish at very different times."""
EXCHANGE_SECONDS = 1.0
"""Seconds between two progress reports that the ranks exchange during `JointWork`; a quarter of its
`patience` if that is shorter."""
Result = TypeVar("Result")


@dataclass(frozen=True)
class Ranks:
    """The rank of this process among all `world_size` processes of the run, and `local_rank`, its
    rank among the processes of its machine. Without a launcher such as torchrun, the process is
    rank 0 of 1."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0

    @classmethod
    def from_environment(cls) -> Ranks:
        """Returns a `Ranks` with the numbers in the environment variables RANK, WORLD_SIZE and
        LOCAL_RANK, or in Slurm's variables; rank 0 of 1 if neither are set. UserError if the
        variables contradict each other."""
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
        """True on rank 0, which writes files and prints."""
        return self.rank == 0

    @property
    def alone(self) -> bool:
        """True if there is only one rank, or if this process has not joined a process group."""
        return self.world_size == 1 or not dist.is_initialized()

    def say(self, text: str) -> None:
        """Prints `text` on rank 0; does nothing on the other ranks."""
        if self.first:
            print(text, flush=True)

    def check_batch(self, batch_size: int, accumulation_steps: int) -> None:
        """Raises UserError unless `batch_size`, the number of samples per step over all ranks,
        splits evenly into the micro-batches of all ranks."""
        if batch_size % (accumulation_steps * self.world_size):
            raise UserError(
                f"batch_size={batch_size} (global) is not a multiple of "
                f"accumulation_steps={accumulation_steps} × {self.world_size} processes; change "
                "one of them."
            )

    def device(self, chosen: torch.device) -> torch.device:
        """Returns this rank's GPU if `chosen` is a GPU, otherwise `chosen`; UserError if the
        machine has fewer GPUs than ranks."""
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
        """Joins the process group of all ranks, and stays in it until the process ends. If
        there is only one rank, it joins a process group of one rank if `even_alone` is true,
        otherwise none. `variables` are environment variables for NCCL. UserError if the process
        cannot reach the other ranks."""
        if dist.is_initialized() or (self.world_size == 1 and not even_alone):
            return

        # Put NCCL's variables into the environment, from which NCCL reads them, and choose the
        # backends.
        os.environ.update(variables)
        options: dict[str, Any] = {"backend": "gloo", "timeout": timeout}
        if device.type == "cuda":
            options["backend"] = "cpu:gloo,cuda:nccl"
            options["device_id"] = torch.device("cuda", device.index or 0)
        if self.world_size == 1:
            dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1, **options)
            return

        # Meet the other ranks at the address that the launcher has set in MASTER_ADDR and
        # MASTER_PORT.
        for name in ("MASTER_ADDR", "MASTER_PORT"):
            if name not in os.environ:
                raise UserError(
                    f"{name} is not set, and WORLD_SIZE is {self.world_size}; start with torchrun."
                )
        try:
            if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
                # Prefix the keys in the store by the number of the attempt: torchrun reuses its
                # store after a restart, and without the prefix PyTorch 2.13 finds the addresses of
                # ended processes in it.
                host = os.environ["MASTER_ADDR"]
                port = int(os.environ["MASTER_PORT"])
                store = dist.TCPStore(host, port, is_master=False, timeout=timeout)
                attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
                options["store"] = dist.PrefixStore(f"attempt-{attempt}", store)
            dist.init_process_group(rank=self.rank, world_size=self.world_size, **options)
        except (dist.DistError, RuntimeError) as error:
            address = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            raise UserError(
                f"rank {self.rank} cannot reach the others at {address} within {timeout} "
                f"({shorten_error(error)}); check MASTER_ADDR, MASTER_PORT and that all ranks run."
            ) from error

    def broadcast_result(self, choose: Callable[[], Result]) -> Result:
        """Calls `choose` on rank 0 only, and returns its result on all ranks. If `choose` raises an
        exception, all ranks raise that exception."""
        if self.alone:
            return choose()
        outcome: list[Any] = [None, None]
        if self.first:
            try:
                outcome[0] = choose()
            except Exception as error:
                outcome[1] = error
        dist.broadcast_object_list(outcome, src=0)
        result, failure = outcome
        if failure is not None:
            raise failure
        return result

    def gather_objects(self, item: Result, group: dist.ProcessGroup | None = None) -> list[Result]:
        """Returns the list of the `item`s of all ranks, in the order of the ranks."""
        if self.alone:
            return [item]
        items: list[Any] = [None] * self.world_size
        dist.all_gather_object(items, item, group=group)
        return items

    def all_reduce(self, values: Tensor, reduction: str = "mean") -> Tensor:
        """Returns the elementwise mean of `values` over all ranks, or the elementwise maximum if
        `reduction` is "max"."""
        if self.alone:
            return values
        values = values.clone()
        dist.all_reduce(values, dist.ReduceOp.MAX if reduction == "max" else dist.ReduceOp.SUM)
        return values / self.world_size if reduction == "mean" else values

    def begin_max(self, value: int) -> Callable[[], int]:
        """Starts to compute the maximum of `value` over all ranks, and returns at once a function
        that waits for the maximum and returns it."""
        values = torch.tensor(float(value))
        work: Any = dist.all_reduce(values, dist.ReduceOp.MAX, async_op=True)

        def result() -> int:
            work.wait()
            return int(values.item())

        return result

    def wait_for_all(self) -> None:
        """Blocks until every rank has called this method."""
        if self.world_size > 1:
            self.connect(torch.device("cpu"), ENCODING_TIMEOUT, {})
            dist.barrier()


class Share(NamedTuple):
    """A report that one rank sends to all ranks about its part of `JointWork`."""

    idle_seconds: float = 0.0
    """Seconds since the rank last made progress."""
    ended: bool = False
    result: Any = None
    failure: BaseException | None = None


class JointWork:
    """Runs a function on every rank, in a separate thread, and returns the results of all ranks to
    each rank.

    The function must call `advance` when it makes progress. If a rank makes no progress or sends no
    report for `patience`, the call of `run_everywhere` ends on all ranks with a TimeoutError. The
    ranks communicate in a separate process group, so training can continue at the same time.
    """

    def __init__(self, ranks: Ranks, patience: timedelta) -> None:
        self.ranks = ranks
        self.patience = patience.total_seconds()
        self.group: Any = None if ranks.alone else dist.new_group(backend="gloo", timeout=patience)
        self.done = 0
        """Number of bytes that this rank's function has written so far, as `advance` has counted
        them."""
        self.advanced = time.monotonic()

    def advance(self, count: int = 0) -> None:
        self.done += count
        self.advanced = time.monotonic()

    def run_everywhere(self, work: Callable[[], Any]) -> list[Any]:
        """Calls `work` on every rank and returns the results of all ranks, in the order of the
        ranks. All ranks must call the method.

        If `work` fails on one rank, all ranks raise its exception: an OSError once `work` has ended
        on all ranks, any other exception at once. TimeoutError if a rank makes no progress for
        `patience`.
        """
        ended_shares: list[Share] = []
        self.advance()
        # Use a daemon thread, which cannot keep the process alive if a disk hangs.
        thread = threading.Thread(
            target=lambda: ended_shares.append(run_share(work)),
            name=threading.current_thread().name,
            daemon=True,
        )
        thread.start()
        while True:
            thread.join(min(EXCHANGE_SECONDS, self.patience / 4))
            share = Share(idle_seconds=time.monotonic() - self.advanced)
            if ended_shares:
                share = ended_shares[0]
            try:
                shares = self.ranks.gather_objects(share, self.group)
            except RuntimeError as error:
                raise TimeoutError(
                    f"another process has ended, or has not answered for {self.patience:.0f} s"
                ) from error

            # Use this rank's own report instead of its gathered copy: exceptions lose their
            # traceback when they are gathered.
            shares[self.ranks.rank] = share
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
    """Calls `work` and returns its result, or the exception that it raised, in a `Share`. Replaces
    an OSError by one whose text is only the reason and the path of the file, such as "No space left
    on device: /data/x"."""
    try:
        return Share(ended=True, result=work())
    except OSError as error:
        file = f": {error.filename}" if error.filename else ""
        text = f"{error.strerror}{file}" if error.strerror else str(error)
        return Share(ended=True, failure=OSError(text))
    except BaseException as error:
        return Share(ended=True, failure=error)


SINGLE = Ranks()
"""Rank 0 of 1: the only process of a run without a launcher such as torchrun."""
