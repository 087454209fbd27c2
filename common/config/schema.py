"""Dataclasses that define the keys of the configuration: their types, defaults and meanings. The
keys of components, such as model and data, are the arguments of their classes.

A field added here becomes a key on the command line. Defaults stand only here: a file in `conf/`
holds only values that differ from the defaults. A field's type and the method `check` decide which
values are valid. This file must not import torch, so that `--help` stays quick.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from enum import Enum, StrEnum
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any

from annotated_types import Ge, Gt, Le

from common.config.contradictions import check_contradictions, check_nccl, is_colour, list_sides
from common.errors import UserError
from common.text import is_shift

if TYPE_CHECKING:
    from pydantic import TypeAdapter

Device = StrEnum("Device", "auto cuda cpu")
PrecisionName = StrEnum("PrecisionName", "fp32 bf16 fp16 fp8")
Fp8Recipe = StrEnum("Fp8Recipe", "tensorwise rowwise rowwise_with_gw_hp")
FloatName = StrEnum("FloatName", "fp32 bf16")
Solver = StrEnum("Solver", "euler heun ab2 sde")
"""Names of the solvers that `sample` in models/sampler.py implements."""
AttentionName = StrEnum("AttentionName", "auto flash cudnn efficient math flex flash3 flash4")
CompileScope = StrEnum("CompileScope", "blocks model")
CompileMode = StrEnum("CompileMode", "default max-autotune-no-cudagraphs reduce-overhead")
OnUnavailable = StrEnum("OnUnavailable", "degrade error emulate")
ScheduleKind = StrEnum("ScheduleKind", "constant cosine")
ParallelMode = StrEnum("ParallelMode", "auto none ddp fsdp hsdp")
LatentKind = StrEnum("LatentKind", "mean_std sample")
CaptionLines = StrEnum("CaptionLines", "each whole")
CaptionsMissing = StrEnum("CaptionsMissing", "empty drop refuse")
LatentDtype = StrEnum("LatentDtype", "float16 bfloat16 float32 uint8")
LedgerLength = StrEnum("LedgerLength", "short full")
TextDtype = StrEnum("TextDtype", "float16 int8")
Positive = Annotated[int, Ge(1)]
Above0 = Annotated[float, Gt(0)]
Natural = Annotated[int, Ge(0)]
"""An integer of at least 0."""
EnoughSamples = Annotated[int, Ge(8)]
"""A number of samples, at least 8: the distances between two sets of images cannot be computed from
fewer."""


@dataclass(frozen=True)
class ParallelConfig:
    """Parallelism between several processes (accel/techniques/parallel.py)."""

    mode: ParallelMode = ParallelMode.auto
    """How processes share a run: `auto`: ddp if there are several, otherwise none; fsdp shards
    over all processes, hsdp over groups of shard_degree processes."""
    shard_degree: Positive | None = None
    """For hsdp: number of processes among which one copy of the model is sharded; null: the
    number of GPUs of one machine."""
    reshard_after_forward: bool = True
    """For fsdp and hsdp, whether gathered parameters are freed after a block's forward pass;
    `true`: they are gathered again for its backward pass; `false`: they stay in memory until
    then."""
    reduce_dtype: FloatName = FloatName.fp32
    """Dtype in which ranks exchange gradients; bf16 sends half the bytes of fp32."""
    bucket_cap_mb: Positive = 25
    """For ddp: MiB of gradients in one all-reduce."""
    gradient_as_bucket_view: bool = True
    """For ddp: gradients are views of the all-reduce buckets, which saves a copy."""
    cpu_offload: bool = False
    """For fsdp and hsdp: parameters and the optimizer's state stay in host memory."""
    timeout_minutes: Annotated[float, Gt(0), Le(1_000_000)] = 30.0
    """Longest time, in minutes, that a rank may make no progress; after this time the run ends
    with an error."""
    nccl: dict[str, str] = field(default_factory=dict)
    """NCCL's environment variables, such as {NCCL_DEBUG: INFO}."""

    def check(self) -> None:
        """Raises UserError for a shard degree without hsdp, and for NCCL variables that a
        configuration must not set."""
        if self.shard_degree is not None and self.mode is not ParallelMode.hsdp:
            raise UserError(
                f"runtime.parallel.shard_degree={self.shard_degree} is for hsdp; leave it out "
                f"with runtime.parallel.mode={self.mode}."
            )
        check_nccl(self.nccl)


def to_plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings with the values of enum members in place of the members."""
    return {key: v.value if isinstance(v, Enum) else v for key, v in settings.items()}


CHECKPOINT_POLICY = re.compile(r"blocks|selective|every_([2-9]|[1-9]\d+)")
KernelChoice = bool | str
"""Value of the runtime key of a Triton kernel. false: use the PyTorch code that defines the
operation; true: use the kernel; "auto": measure both and use the faster."""


@dataclass(frozen=True)
class RuntimeConfig:
    """Techniques of a run, each with one key. The defaults are `runtime=eager`, the baseline
    without techniques."""

    device: Device = Device.auto
    """`auto`: the GPU if there is one, otherwise the CPU."""
    tf32: bool = False
    """Compute fp32 matrix products and convolutions in TensorFloat-32."""
    cudnn_benchmark: bool = False
    """Let cuDNN measure its convolution algorithms and take the fastest."""
    precision: PrecisionName = PrecisionName.fp32
    """Precision of matrix products; fp16 also scales the loss, by a factor that is adapted on the
    device; fp8 uses torchao."""
    fp8_recipe: Fp8Recipe = Fp8Recipe.tensorwise
    """Scales of precision=fp8; tensorwise: one for each tensor; rowwise: one for each row;
    rowwise_with_gw_hp: as rowwise, but the gradients of weights are computed in bf16."""
    weights: FloatName = FloatName.fp32
    """Dtype in which the weight matrices of linear layers are stored; an optimizer step rounds
    bf16 up or down at random, right on average; averages of the weights (EMA) stay in fp32."""
    residual_in_fp32: bool = True
    """Keep the residual stream between blocks in fp32, also under autocast."""
    fused_add_norm: KernelChoice = False
    """Triton kernel of residual add and norm; for this and the next four keys: `false`: use the
    PyTorch code that defines the operation; `true`: use the Triton kernel if its results agree
    with that code; `auto`: use the faster of the two on this machine."""
    fused_scan: KernelChoice = False
    """Triton kernel of the state-space scan."""
    fused_conv: KernelChoice = False
    """Triton kernel of the local mixing: short convolution and activation."""
    fused_swiglu: KernelChoice = False
    """Triton kernel of SwiGLU's activation."""
    fused_rope: KernelChoice = False
    """Triton kernel of the norm of queries and keys with their rotary embedding."""
    attention: AttentionName = AttentionName.auto
    """Kernel of softmax attention; `auto`: PyTorch chooses."""
    gradient_checkpointing: bool = False
    """Recompute activations of blocks in the backward pass, which saves memory and costs time."""
    checkpoint_policy: str = "blocks"
    """What gradient_checkpointing recomputes; blocks: all blocks; every_<n>: every n-th block;
    selective: in all blocks, all activations but the results of matrix products, attention and
    scans."""
    compile: bool = False
    """Compile the model with torch.compile."""
    compile_scope: CompileScope = CompileScope.blocks
    """What is compiled; blocks: each block of the model by itself; model: the model as one graph,
    which takes longer to compile."""
    compile_mode: CompileMode = CompileMode["default"]
    """Mode of torch.compile; reduce-overhead needs compile_scope=model and
    accumulation_steps=1."""
    fused_adamw: bool = False
    """Update all parameters in a few kernels (fused=True of PyTorch's AdamW)."""
    offload_optimizer: bool = False
    """Keep the optimizer's state in host memory; it moves to the device part by part in each
    step."""
    offload_activations: bool = False
    """Keep the activations saved for the backward pass in host memory until the backward pass uses
    them."""
    empty_cache_at_eval: bool = False
    """Free PyTorch's cached GPU memory before evaluations."""
    cuda_graph: bool = False
    """Capture the whole training step as a CUDA graph."""
    tune: bool = False
    """Measure before training which techniques make the step fastest on this machine, and use
    these; runtime=auto sets tune=true."""
    tune_seconds: Above0 = 120.0
    """Longest time, in seconds, that `tune` may take."""
    on_unavailable: OnUnavailable = OnUnavailable.degrade
    """What to do if a technique is unavailable; degrade: run without it; error: stop; emulate: on
    a CPU, emulate the technique slowly if the CPU can, otherwise run without it."""
    parallel: ParallelConfig = field(default_factory=ParallelConfig)

    def check(
        self, accumulation_steps: int = 1, deterministic: bool = False, optimizer: str | None = None
    ) -> None:
        """Raises UserError for an invalid value, and for techniques that contradict each other on
        every machine."""
        self.parallel.check()
        for key in KERNEL_KEYS:
            value = vars(self)[key]
            if value not in (False, True, "auto"):
                raise UserError(f"runtime.{key}={value} must be false, true or auto.")
        if not CHECKPOINT_POLICY.fullmatch(self.checkpoint_policy):
            raise UserError(
                f"runtime.checkpoint_policy={self.checkpoint_policy} must be blocks, selective, or "
                "every_<n> with n from 2 on, such as every_4."
            )
        check_contradictions(self, accumulation_steps, deterministic, optimizer)

    def values(self) -> dict[str, Any]:
        """Returns key -> value for all techniques and their options, including the keys of
        `parallel`. The key `parallel` itself maps to the parallel mode, such as "ddp". Enum members
        become strings."""
        return to_plain(vars(self) | vars(self.parallel) | {"parallel": self.parallel.mode})


KERNEL_KEYS = tuple(node.name for node in fields(RuntimeConfig) if node.type == "KernelChoice")
"""Runtime keys that switch fastlatent's own Triton kernels."""


@dataclass(frozen=True)
class ScheduleConfig:
    """Learning-rate schedule. The learning rate depends on the number of samples that training has
    seen, not on the number of steps (training/optim/schedule.py)."""

    kind: ScheduleKind = ScheduleKind.cosine
    """Course of the learning rate after the warm-up."""
    warmup_samples: Natural = 1280
    """Training samples in which the learning rate rises from 0."""
    final: Annotated[float, Ge(0), Le(1)] = 0.0
    """For cosine: learning rate at the end of the run, as a fraction of optim.lr."""


@dataclass(frozen=True)
class EmaConfig:
    """Exponential moving average (EMA) of the parameters; its half-life is in samples, not in steps
    (training/step.py)."""

    half_life_samples: float = 2000.0
    """Half-life of the average, in training samples."""
    ramp: float = 0.05
    """Upper limit of the half-life, as a fraction of the samples seen so far; early in training
    this limit is below half_life_samples and shortens the half-life."""
    snapshots: Natural = 0
    """Number of snapshots of two more averages, spread evenly over the run; scripts.average makes
    averages of other lengths from them after the run; 0: none."""


@dataclass(frozen=True)
class GuardsConfig:
    """Protection from steps whose gradient norm is NaN, infinite or a spike (training/step.py,
    training/failures.py)."""

    max_skipped_in_row: Positive = 20
    """Number of skipped steps in a row after which a run writes a description of the last step to
    its folder `dumps` and stops."""
    spike_sigmas: Annotated[float, Ge(0)] = 0.0
    """Also skip a step whose gradient norm is this many standard deviations above the mean of the
    last `spike_window` norms; 0: off."""
    spike_window: Annotated[int, Ge(8), Le(100_000)] = 128
    """Number of latest finite gradient norms from which each step computes the mean and standard
    deviation for `spike_sigmas`."""


@dataclass(frozen=True)
class SamplingConfig:
    """Settings for drawing samples during training and by `scripts.sample` (models/sampler.py)."""

    solver: Solver = Solver.heun
    """Solver of the differential equation; sde draws noise in each step."""
    steps: Positive = 20
    """Steps of the solver."""
    guidance: float = 1.5
    """Scale of classifier-free guidance; 1: no guidance."""
    guidance_interval: list[float] = field(default_factory=lambda: [0.0, 1.0])
    """Smallest and largest time t at which guidance is on: t = 1 is noise, t = 0 is data."""
    internal_guidance: float = 1.0
    """Scale of internal guidance, which costs almost no time and needs a model that was trained
    with model.internal_block; 1: none; try 1.2."""
    internal_interval: list[float] = field(default_factory=lambda: [0.0, 1.0])
    """Smallest and largest time t at which internal guidance is on."""
    shift: Any = None
    """Shift s of the solver's times: t' = s·t / (1 + (s - 1)·t); s > 1 spends more steps near t =
    1, the noise; 1: equally long steps; auto: the larger one of 1 and √(values of a latent / 4096);
    null: that of the objective, timestep_shift; 1 for a weights file outside its run."""
    per_class: Positive = 10
    """Samples to draw per class; also the number of columns of a sample grid in training."""

    def check(self, prefix: str = "sampling.") -> None:
        """Raises UserError for a value with which sampling is impossible; `prefix` stands before
        the key in the error's message."""
        refuse_values(self, prefix)
        if self.shift is not None and not is_shift(self.shift):
            raise UserError(f"{prefix}shift={self.shift} must be above 0, auto or null.")
        for key in ("guidance_interval", "internal_interval"):
            interval = vars(self)[key]
            if len(interval) != 2 or interval[0] > interval[1]:
                raise UserError(
                    f"{prefix}{key}={interval} must be two increasing times, such as [0.1,0.9]."
                )


@dataclass(frozen=True)
class FdConfig:
    """Settings of two distances between generated samples and training images: the Fréchet distance
    fd and the kernel distance kd. A run measures both every `fd_every` steps
    (evaluation/evaluator.py)."""

    count: EnoughSamples = 1000
    """Number of samples to generate; fd needs more than twice as many samples as the features
    have dimensions, kd does not."""
    features: list[str] = field(default_factory=lambda: ["encoder", "random"])
    """Feature extractors, which map images to vectors: encoder, random, inception, dinov2, or
    classes in packages that the key extensions names."""
    reference: str | None = None
    """Folder of images to compare with; null: decode training latents instead."""
    reference_count: EnoughSamples = 10_000
    """Largest number of reference images to use."""
    convert_profile: bool = True
    """Convert the colours of reference images with an ICC profile to sRGB; `false`: read them as
    sRGB, as runs did that began before this key."""
    inception: str | None = None
    """Path of the file with torch-fidelity's Inception weights."""
    dinov2: str | None = None
    """Folder of the DINOv2 model, or its id on the Hugging Face hub."""
    picture_encoder: str | None = None
    """Folder or hub id of an autoencoder in the format of diffusers; with it the feature space
    `picture` takes the place of `encoder`, and models of all latent spaces have comparable
    distances."""

    @property
    def spaces(self) -> list[str]:
        """Names of the feature spaces: `features`, with `picture` for `encoder` if
        `picture_encoder` is set."""
        encoder = "picture" if self.picture_encoder else "encoder"
        return [encoder if name == "encoder" else name for name in self.features]

    def list_scores(self) -> list[str]:
        """Lists the names of both distances in each feature space, such as fd_encoder."""
        return [f"{kind}_{name}" for kind in ("fd", "kd") for name in self.spaces]


def refuse_unmeasured(key: str, name: str, measured: list[str]) -> None:
    """Raises UserError if `name`, the value of the key `key`, is not in `measured`, the metrics of
    the run."""
    if name not in measured:
        raise UserError(f"{key}={name} is not measured by this run; choose {', '.join(measured)}.")


@dataclass(frozen=True)
class TrainConfig:
    """A training run. The defaults train on handwritten digits in about a minute."""

    seed: Natural = 0
    """Seed of the weights, the order of the data, noise and times."""
    run_dir: str | None = None
    """Folder of the run; null: runs/<date>-<time>-<model>-<runtime>. With a folder set, the same
    command again resumes the run."""
    resume: str = "auto"
    """Where a run starts; `auto`: at the newest checkpoint in run_dir, if there is one; `never`:
    anew; or the path of a run or checkpoint."""
    init_from: str | None = None
    """Weights from which a new run starts: path of a .safetensors file, a checkpoint or a run
    folder; positions are resized to the data's height and width."""
    rehearsal: str | None = None
    """Name of an experiment, such as fastrun: when this run starts, it prints the speed and the
    ledger (which techniques were on) of the latest run of that experiment with the same model and
    runtime."""
    ledger: LedgerLength = LedgerLength.short
    """Which techniques the printed ledger shows; short: those that are on, or were asked for and
    could be on; full: all, as ledger.json has them."""
    extensions: list[str] = field(default_factory=list)
    """Packages of your own, whose classes a `_target_` may name; settable only on the command
    line or in the environment, never in a file, because importing a package runs its code."""
    total_samples: Positive = 102_400
    """Length of the run in training samples; schedule and EMA also count samples, so they do not
    depend on batch_size."""
    epochs: Above0 | None = None
    """The length in passes over the training images, in place of total_samples."""
    budget_minutes: Above0 | None = None
    """The length in minutes of steps, evaluations and grids, in place of total_samples: a new run
    measures how many samples that allows; warm-up, averages and intervals then change in the
    proportion of these samples to total_samples."""
    batch_size: Positive = 64
    """Samples per step, over all processes."""
    accumulation_steps: Positive = 1
    """Micro-batches per step."""
    max_grad_norm: Annotated[float, Ge(0)] = 1.0
    """Largest gradient norm: gradients above it are scaled down to it; 0: no clipping."""
    deterministic: bool = False
    """Make a resumed run give the same bits as one that never stopped."""
    log_every: Natural = 50
    """Steps between two lines of the log; this and the next four keys are intervals in steps; 0:
    never; an action whose interval is above 0 also happens at the end of the run."""
    eval_every: Natural = 400
    """Steps between two measurements of the held-out loss."""
    sample_every: Natural = 800
    """Steps between two grids of samples."""
    fd_every: Natural = 0
    """Steps between two measurements of the distances that `fd` describes."""
    save_every: Natural = 400
    """Steps between two checkpoints."""
    keep_checkpoints: Positive = 2
    """Number of newest checkpoints to keep; the run also keeps the checkpoint with the lowest
    value of the score that `keep_best` names."""
    keep_best: str = "eval_loss"
    """Score that decides which checkpoint is the best: the one with the lowest value; eval_loss
    or, if fd_every is set, fd_<features> or kd_<features>, such as fd_dinov2."""
    sweep_metric: str | None = None
    """Metric that a run of a sweep (-m) returns to hydra/sweeper: its last loss, eval_loss,
    fd_<features> or kd_<features>, or samples_per_s; null: none."""
    keep_every: Natural = 0
    """Keep checkpoints at multiples of this number of steps for good; 0: none."""
    async_checkpoints: bool = True
    """Write checkpoints in the background; training waits only while the state is copied."""
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    ema: EmaConfig = field(default_factory=EmaConfig)
    guards: GuardsConfig = field(default_factory=GuardsConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    fd: FdConfig = field(default_factory=FdConfig)
    model: Any = None
    adapter: Any = None
    data: Any = None
    objective: Any = None
    optim: Any = None
    logger: Any = None

    def list_metrics(self) -> list[str]:
        """Lists the metrics that `sweep_metric` may name, which this run measures at its end."""
        scores = ["eval_loss"] if self.eval_every else []
        scores += self.fd.list_scores() if self.fd_every else []
        return [*scores, "loss", "samples_per_s"]

    def check(self) -> None:
        """Raises UserError for a value, or a combination of keys, with which no run can train."""
        refuse_values(self)
        if self.init_from is None and (self.adapter or (self.model or {}).get("of")):
            raise UserError(
                f"{'adapter' if self.adapter else 'model=pretrained'} needs a trained model; set "
                "init_from=<weights file, checkpoint or run>."
            )

        # Refuse keys that contradict each other.
        optim = self.optim or {}
        momentum = optim.get("momentum", 0.0)
        # With a momentum below 0 or from 1 on the updates diverge.
        if isinstance(momentum, int | float) and not 0.0 <= momentum < 1.0:
            raise UserError(f"optim.momentum={momentum} must be at least 0 and below 1.")
        self.sampling.check()
        refuse_unmeasured("keep_best", self.keep_best, ["eval_loss", *self.fd.list_scores()])
        if self.sweep_metric is not None:
            refuse_unmeasured("sweep_metric", self.sweep_metric, self.list_metrics())
        if self.keep_best != "eval_loss" and (not self.fd_every or self.save_every % self.fd_every):
            raise UserError(
                f"keep_best={self.keep_best} needs that figure at every checkpoint; set fd_every "
                f"to a divisor of save_every={self.save_every} (it is {self.fd_every})."
            )
        if self.batch_size % self.accumulation_steps:
            raise UserError(
                f"batch_size={self.batch_size} (global) is not a multiple of "
                f"accumulation_steps={self.accumulation_steps}; change one of them."
            )
        self.runtime.check(self.accumulation_steps, self.deterministic, optim.get("_target_"))


def find_direction(metric: str | None) -> str:
    """Returns the direction, in Optuna's word, in which values of a metric that `sweep_metric` may
    name get better."""
    return "maximize" if metric == "samples_per_s" else "minimize"


@dataclass(frozen=True)
class PrecomputeConfig:
    """A job of precompute_latents.py, which encodes images to latents."""

    source: str | None = None
    """Images: a folder with one subfolder per class, WebDataset tars with images and .cls
    members, or a folder that Hugging Face's library `datasets` saved with save_to_disk."""
    out: str | None = None
    """Output folder, for shards of latents and manifest.json."""
    ledger: LedgerLength = LedgerLength.short
    """Which techniques the printed ledger shows, as for a training run."""
    extensions: list[str] = field(default_factory=list)
    """Packages of your own, whose classes a `_target_` may name; settable only on the command
    line or in the environment, never in a file, because importing a package runs its code."""
    classes: Any = "given"
    """Where the classes come from; `given`: the source's subfolders, .cls members or label column;
    a number: how many there are, for a source that does not name them; `none`: every label is
    0."""
    allow_cut: bool = False
    """Use the images of a truncated or damaged tar that come before the damage."""
    resolution: Any = 256
    """Size, in pixels, that images are scaled and cropped to: the side of a square, or
    [height,width]."""
    background: str = "white"
    """Colour behind transparent pixels: a name such as white, or #rrggbb, which needs both kinds
    of quotes: background="'#rrggbb'"."""
    max_megapixels: Above0 = 80.0
    """Largest size of an image, in megapixels; the job skips larger images; to decode an image, a
    worker needs 7 to 20 bytes of memory per pixel."""
    convert_profile: bool = True
    """Convert the colours of images with an ICC profile to sRGB; `false`: read the colours of all
    images as sRGB, as jobs did that began before this key."""
    kind: LatentKind = LatentKind.mean_std
    """What is stored of the encoder's posterior; mean_std: mean and std, from which training draws
    a sample in each step; sample: one sample."""
    dtype: LatentDtype = LatentDtype.float16
    """Dtype of the stored latents; uint8 holds whole numbers alone, as encoder=pixels gives."""
    flips: bool = False
    """Encode each image's mirror image too; mirroring a latent does not give the latent of the
    mirrored image."""
    captions: str = "given"
    """Where the captions come from, for a text_encoder; `given`: from a .txt, .caption or .json
    beside each image, metadata.jsonl, members of the tars, or a column of `datasets`; or a table
    by file name, .jsonl, .csv or COCO's .json; or a text file with a template on each line, such
    as "a photo of {}", in which the class's name replaces {}."""
    caption_lines: CaptionLines | None = None
    """What one caption is; each: a line of a text; whole: the text; null: each line, but all of a
    text with an empty line between others, which separates paragraphs."""
    captions_missing: CaptionsMissing | None = None
    """What becomes of images without a caption; empty: they get the empty one; drop: they are left
    out; refuse: the job stops; null: empty for up to half of the images, else refuse."""
    max_captions: Positive = 8
    """Largest number of captions of an image; the rest is left out."""
    text_tokens: Natural = 64
    """Largest number of tokens that are stored of a caption; 0: only one vector for each
    caption."""
    text_dtype: TextDtype = TextDtype.float16
    """Dtype of the stored tokens; int8 halves them."""
    held_out: Any = 0.02
    """Images that are kept out of training, to measure eval_loss: a fraction below 1, a number,
    or another source, such as a folder validation/, whose classes have the same names."""
    reuse: str | None = None
    """The `out` of an earlier command: images and captions that it has encoded with equal settings
    are copied from there."""
    limit: Positive | None = None
    """Number of images to use, chosen by seed; null: all."""
    seed: Natural = 0
    """Seed for the order of the images in the shards, and for the random samples that the job
    stores if kind=sample."""
    batch_size: Positive = 32
    """Images that are encoded at a time."""
    num_workers: Natural = 2
    """Number of processes that decode images."""
    shard_size: Positive = 2048
    """Number of images in each shard, which is a tar file."""
    block_size: Positive = 256
    """Number of samples in each block, which is a member of a shard's tar."""
    part: str = "0/1"
    """Part of the shards to encode, i/n with i from 0 to n-1, beside commands that encode the
    others."""
    finish: bool = False
    """Once all parts are there, check their shards and write manifest.json; needs only `out`."""
    min_psnr: float = 20.0
    """Lowest PSNR, in dB, that the first images may have after encoding and decoding; the job
    stops if their PSNR is lower."""
    same_bytes: bool = True
    """Make a resumed job write the same bytes as one that was not interrupted; `false`: cuDNN may
    choose algorithms by their measured time, so the bytes may differ."""
    dry_run: bool = False
    """Write no latents, but report which files the job reads, and forecast how many images, bytes
    and minutes the job needs."""
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)
    encoder: Any = None
    text_encoder: Any = None

    def check(self) -> None:
        """Raises UserError for a value with which no encoding job can run."""
        if not self.source and not self.finish:
            raise UserError("source is not set; say which: source=<a folder of images or tars>.")
        if not self.out:
            raise UserError("out is not set; say which: out=<the folder for the latents>.")
        refuse_values(self)

        # Check what the types of the fields cannot express.
        list_sides(self.resolution)
        numbers = re.fullmatch(r"(\d{1,6})/(\d{1,6})", self.part)
        if not numbers or int(numbers[1]) >= int(numbers[2]):
            raise UserError(f"part={self.part} must be i/n with i below n, such as part=0/8.")
        is_count = type(self.classes) is int and self.classes >= 1
        if not is_count and self.classes not in ("given", "none"):
            raise UserError(f"classes={self.classes} must be given, none, or a number from 1 on.")
        value = self.held_out
        is_number = type(value) in (int, float) and value >= 0 and (value < 1 or value % 1 == 0)
        if not isinstance(value, str) and not is_number:
            raise UserError(
                f"held_out={value} must be a fraction from 0 to below 1, a number of images, or a "
                "folder, tar or dataset."
            )
        if self.captions != "given" and not self.text_encoder:
            raise UserError(
                f"captions={self.captions} needs an encoder; add text_encoder=wordllama or another."
            )
        self.runtime.check()
        if not is_colour(self.background):
            raise UserError(
                f"background={self.background} is no opaque colour; give a name such as white or "
                "gray, or #rrggbb in quotes: background=\"'#ffffff'\"."
            )


BOUND_TEXTS = {
    "greater_than_equal": "at least {ge:.15g}",
    "greater_than": "above {gt:.15g}",
    "less_than_equal": "at most {le:.15g}",
    "less_than": "below {lt:.15g}",
    "missing": "longer",
    "too_long": "shorter",
}
"""Type of a validation error of pydantic -> what the value must be, for the message to the user.
The bound in pydantic's error replaces {ge}, {gt}, {le} or {lt}. `missing` means a list that is too
short, `too_long` one that is too long."""


@cache
def make_type_adapter(kind: type) -> TypeAdapter[Any]:
    """Returns pydantic's TypeAdapter, which validates objects of the dataclass `kind`; made once
    per class."""
    from pydantic import TypeAdapter  # imported here, so that `--help` stays quick

    return TypeAdapter(kind)


def refuse_values(node: Any, prefix: str = "") -> None:
    """Raises UserError if a field of the dataclass object `node` has a value that the field's type
    does not allow; `prefix` stands before the key in the error's message."""
    from pydantic import ValidationError

    try:
        make_type_adapter(type(node)).validate_python(asdict(node))
    except ValidationError as error:
        fault = error.errors()[0]
        key = prefix + ".".join(map(str, fault["loc"]))
        raise UserError(f"{key}={fault['input']} must be {describe_bound(fault)}.") from None


def refuse_unset(node: Any, hints: Mapping[str, str]) -> None:
    """Raises UserError if a field of the dataclass object `node` that `hints` names is None; its
    hint says what to set."""
    for key, hint in hints.items():
        if vars(node)[key] is None:
            raise UserError(f"{key} is not set; say {key}={hint}.")


def describe_bound(fault: Mapping[str, Any]) -> str:
    """Returns what a value must be, such as "at least 1". `fault` is one entry of the list that
    pydantic's `ValidationError.errors()` returns."""
    bound: str = BOUND_TEXTS.get(fault["type"]) or fault["msg"].removeprefix("Input should be ")
    return bound.format(**fault.get("ctx", {}))
