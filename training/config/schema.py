"""The typed spine of the configuration: every key that is not a component's.

A field added here is a key on the command line; `check` refuses values that no run can have.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Device(str, Enum):
    auto = "auto"
    cuda = "cuda"
    cpu = "cpu"


class PrecisionName(str, Enum):
    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


class AttentionName(str, Enum):
    auto = "auto"
    flash = "flash"
    cudnn = "cudnn"
    efficient = "efficient"
    math = "math"
    flex = "flex"


class CheckpointPolicyName(str, Enum):
    blocks = "blocks"
    every_2 = "every_2"
    selective = "selective"


class CompileScope(str, Enum):
    blocks = "blocks"
    model = "model"


CompileMode = Enum(  # a call, because two of torch's names are no identifiers
    "CompileMode",
    {
        "default": "default",
        "max-autotune-no-cudagraphs": "max-autotune-no-cudagraphs",
        "reduce-overhead": "reduce-overhead",
    },
)


class OnUnavailable(str, Enum):
    degrade = "degrade"
    error = "error"


class ScheduleKind(str, Enum):
    constant = "constant"
    cosine = "cosine"


class Solver(str, Enum):
    euler = "euler"
    heun = "heun"


class LatentKind(str, Enum):
    mean_std = "mean_std"
    sample = "sample"


class LatentDtype(str, Enum):
    float16 = "float16"
    bfloat16 = "bfloat16"
    float32 = "float32"


class ParallelMode(str, Enum):
    auto = "auto"
    none = "none"
    ddp = "ddp"
    fsdp = "fsdp"
    hsdp = "hsdp"


class ReduceDtype(str, Enum):
    fp32 = "fp32"
    bf16 = "bf16"


@dataclass(frozen=True)
class ParallelConfig:
    """How several processes share the work (accel/parallel.py)."""

    mode: ParallelMode = ParallelMode.auto
    shard_degree: int | None = None
    reshard_after_forward: bool = True
    reduce_dtype: ReduceDtype = ReduceDtype.fp32
    bucket_cap_mb: int = 25
    gradient_as_bucket_view: bool = True
    cpu_offload: bool = False
    timeout_minutes: float = 30.0
    nccl: dict[str, str] = field(default_factory=dict)

    def check(self) -> None:
        """ValueError for a value that no run can have."""
        at_least(1, self, "bucket_cap_mb", prefix="runtime.parallel.")
        if self.shard_degree is not None:
            at_least(1, self, "shard_degree", prefix="runtime.parallel.")
        if self.timeout_minutes <= 0:
            raise ValueError(f"runtime.parallel.timeout_minutes={self.timeout_minutes} must be above 0.")
        if self.shard_degree is not None and self.mode is not ParallelMode.hsdp:
            raise ValueError(
                f"runtime.parallel.shard_degree={self.shard_degree} is for mode=hsdp; leave it out with "
                f"mode={self.mode.value}."
            )
        if wrong := [name for name in self.nccl if not name.startswith("NCCL_")]:
            raise ValueError(f"runtime.parallel.nccl.{wrong[0]} is no variable of NCCL; their names begin with NCCL_.")


@dataclass(frozen=True)
class RuntimeConfig:
    """How a run is executed; each key is one technique (see `python train.py --help`)."""

    device: Device = Device.auto
    tf32: bool = False
    cudnn_benchmark: bool = False
    precision: PrecisionName = PrecisionName.fp32
    residual_in_fp32: bool = True
    fused_add_norm: bool = False
    fused_scan: bool = False
    fused_conv: bool = False
    attention: AttentionName = AttentionName.auto
    gradient_checkpointing: bool = False
    checkpoint_policy: CheckpointPolicyName = CheckpointPolicyName.blocks
    compile: bool = False
    compile_scope: CompileScope = CompileScope.blocks
    compile_mode: CompileMode = CompileMode["default"]
    fused_adamw: bool = False
    empty_cache_at_eval: bool = False
    cuda_graph: bool = False
    on_unavailable: OnUnavailable = OnUnavailable.degrade
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def check(self, accumulation_steps: int = 1, deterministic: bool = False) -> None:
        """ValueError for techniques that contradict each other on any machine."""
        self.parallel.check()
        sharded = self.parallel.mode in (ParallelMode.fsdp, ParallelMode.hsdp)
        if sharded and self.compile and self.compile_scope is CompileScope.model:
            raise ValueError(
                f"runtime.compile_scope=model does not go with runtime.parallel.mode={self.parallel.mode.value}, which "
                f"gathers parameters block by block; use runtime.compile_scope=blocks."
            )
        if (
            self.cuda_graph
            and self.parallel.mode is not ParallelMode.none
            and self.parallel.mode is not ParallelMode.auto
        ):
            raise ValueError(
                f"runtime.cuda_graph=true was never tried with runtime.parallel.mode={self.parallel.mode.value}; use "
                f"runtime=production."
            )
        mode = self.compile_mode.value
        if not self.compile:
            return
        if mode == "reduce-overhead" and (
            self.cuda_graph or accumulation_steps > 1 or self.compile_scope is CompileScope.blocks
        ):
            raise ValueError(
                "runtime.compile_mode=reduce-overhead gives wrong gradients with accumulation and with blocks compiled "
                "one by one, and cannot be captured; use runtime.cuda_graph=true runtime.compile_mode=default, which "
                "works with both."
            )
        if mode == "max-autotune-no-cudagraphs" and deterministic:
            raise ValueError(
                "runtime.compile_mode=max-autotune-no-cudagraphs chooses kernels by their time, so runs differ; "
                "use runtime.compile_mode=default with deterministic=true."
            )


@dataclass(frozen=True)
class ScheduleConfig:
    """Learning-rate schedule, in samples (training/schedule.py)."""

    kind: ScheduleKind = ScheduleKind.constant
    warmup_samples: int = 0
    final: float = 0.0


@dataclass(frozen=True)
class EmaConfig:
    """Average of the parameters, in samples (training/ema.py)."""

    half_life_samples: float = 10_000.0
    ramp: float = 0.05


@dataclass(frozen=True)
class GuardsConfig:
    """What protects a run from bad steps (training/guards.py)."""

    max_skipped_in_row: int = 20
    spike_sigmas: float = 0.0
    spike_window: int = 128

    def check(self) -> None:
        """ValueError for a value that no run can have."""
        at_least(1, self, "max_skipped_in_row", prefix="guards.")
        at_least(0, self, "spike_sigmas", prefix="guards.")
        at_least(8, self, "spike_window", prefix="guards.")


@dataclass(frozen=True)
class SamplingConfig:
    """How sample grids are made."""

    solver: Solver = Solver.heun
    steps: int = 25
    guidance: float = 1.0
    guidance_interval: list[float] = field(default_factory=lambda: [0.0, 1.0])
    shift: float = 1.0
    per_class: int = 10


@dataclass(frozen=True)
class TrainConfig:
    """A training run; conf/train.yaml says what each key means."""

    seed: int = 0
    run_dir: str | None = None
    resume: str = "auto"
    init_from: str | None = None
    rehearsal: str | None = None
    total_samples: int = 1
    batch_size: int = 1
    accumulation_steps: int = 1
    max_grad_norm: float = 1.0
    log_every: int = 0
    save_every: int = 0
    sample_every: int = 0
    eval_every: int = 0
    keep_checkpoints: int = 2
    keep_every: int = 0
    async_checkpoints: bool = True
    deterministic: bool = False
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    ema: EmaConfig = field(default_factory=EmaConfig)
    guards: GuardsConfig = field(default_factory=GuardsConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    model: Any = None
    data: Any = None
    objective: Any = None
    optim: Any = None
    logger: Any = None

    def check(self) -> None:
        """ValueError for a value that no run can have."""
        at_least(1, self, "total_samples", "batch_size", "accumulation_steps", "keep_checkpoints")
        at_least(
            0, self, "seed", "max_grad_norm", "log_every", "save_every", "sample_every", "eval_every", "keep_every"
        )
        self.guards.check()
        at_least(0, self.schedule, "warmup_samples", "final", prefix="schedule.")
        at_least(1, self.sampling, "steps", "per_class", prefix="sampling.")
        if self.batch_size % self.accumulation_steps:
            raise ValueError(
                f"batch_size={self.batch_size} (global) is not a multiple of "
                f"accumulation_steps={self.accumulation_steps}; change one of them."
            )
        self.runtime.check(self.accumulation_steps, self.deterministic)
        interval = self.sampling.guidance_interval
        if len(interval) != 2 or interval[0] > interval[1]:
            raise ValueError(f"sampling.guidance_interval={interval} must be two increasing times, such as [0.1,0.9].")


@dataclass(frozen=True)
class PrecomputeConfig:
    """An encoding job; conf/precompute_latents.yaml says what each key means."""

    source: str | None = None
    out: str | None = None
    resolution: int = 256
    kind: LatentKind = LatentKind.mean_std
    dtype: LatentDtype = LatentDtype.float16
    flips: bool = False
    held_out: float = 0.02
    limit: int | None = None
    seed: int = 0
    batch_size: int = 32
    num_workers: int = 2
    shard_size: int = 2048
    block_size: int = 256
    min_psnr: float = 20.0
    dry_run: bool = False
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    encoder: Any = None

    def check(self) -> None:
        """ValueError for a value that no job can have."""
        for key, what in (("source", "a folder of images or tars"), ("out", "the folder for the latents")):
            if getattr(self, key) is None:
                raise ValueError(f"{key} is not set; say which: {key}=<{what}>.")
        at_least(1, self, "resolution", "batch_size", "shard_size", "block_size")
        at_least(0, self, "seed", "num_workers")
        self.runtime.check()
        if self.limit is not None:
            at_least(1, self, "limit")
        if not 0.0 <= self.held_out < 1.0:
            raise ValueError(
                f"held_out={self.held_out} must be at least 0 and below 1: the share of images kept out of training."
            )


def at_least(minimum: int, node: object, *keys: str, prefix: str = "") -> None:
    for key in keys:
        if getattr(node, key) < minimum:
            raise ValueError(f"{prefix}{key}={getattr(node, key)} must be at least {minimum}.")
