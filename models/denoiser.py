"""The denoiser: cuts a noisy latent into patches (tokens), and maps them through a stack of blocks
to a velocity, or to the clean latent, from which the velocity follows.

Letters: B samples, C channels, H W latent height and width, L tokens, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from common.condition import Condition
from common.errors import UserError
from models.block import Block, Norm, SwiGLU, build_blocks
from models.layers import (
    InternalHead,
    LabelEmbedding,
    TimestepEmbedding,
    build_patch_embedding,
    init_linear,
    sincos_positions,
)
from models.shape import Shape
from models.text import Conditioning, build_text_embedding

Prediction = Literal["velocity", "clean"]
SMALLEST_TIME = 1e-6
"""Time below which a velocity is computed from a clean latent as at this time."""


class Denoiser(nn.Module):
    """A velocity model `v(x, t, y)` for latents of any size, with any mixer.

    `channels`, `height`, `width` and `num_classes`, the null label, describe the data; `dim`,
    `depth`, `head_dim`, `patch_size` and `drop_path` the model. `mixer(dim=, head_dim=, grid=)`
    builds one token mixer; if `mixer` has a parameter `layer`, it also gets the number of blocks
    before this one that have the same kind of mixer. If `attention_every` is k > 0, `attention`
    builds the mixer of every k-th block instead: a hybrid. With `mlp_ratio` 0 a block is the mixer
    alone (the Mamba recipe); otherwise `mlp(dim, hidden)` follows the mixer, with a hidden width of
    about mlp_ratio · dim (the transformer recipe). `mlp`, `norm` and `time_scale` (the factor by
    which t is multiplied before its sinusoids) exist for weights that were trained elsewhere
    (scripts/import_weights.py).

    `conditioning` is "class", "text" or "class_and_text"; `text`, a dict, describes the texts
    (models/text.py). With `text_tokens` the layers of attention also attend to their tokens. A
    sample with the null label gets the empty text.

    `prediction` says what the heads estimate: "velocity", or "clean" for the clean latent z, from
    which the velocity is (x - z)/t. A patch of many values, such as 16×16 pixels, has few values of
    z that are likely, but noise of any values: z is what a narrow network can learn (JiT,
    https://arxiv.org/abs/2511.13720). If `patch_rank` is r > 0, patches are embedded through r
    channels, as there.

    If `internal_block` is k > 0, a second head estimates the velocity from the residual stream
    after block k, from 1, for internal guidance; it changes no other gradient. Training may add
    further heads (training/heads.py).

    Training expects of any denoiser: `forward(x, t, y)`, `blocks` (an nn.ModuleList of modules with
    the arguments and results of models/block.py), `num_classes`, `tokens`, `depth`, `drop_path`
    (0.0 for none), `init_weights()`, `flops_per_sample()` and `no_weight_decay()`. Its constructor
    gets `channels`, `height`, `width`, `num_classes` and, if its configuration has a `conditioning`
    other than "class", `text`. Then y is a `Condition` (common/condition.py), or labels alone for
    the empty text, which must also replace the text of a sample with the null label.

    Conventions: x = (1-t)·z + t·ε and v = ε - z, with the clean latent z and the noise ε, so t = 1
    is noise. Labels y are int64; the label `num_classes` is the null label, no class.
    """

    def __init__(
        self,
        *,
        channels: int,
        height: int,
        width: int,
        num_classes: int,
        dim: int,
        depth: int,
        head_dim: int,
        patch_size: int,
        mixer: Callable[..., nn.Module],
        attention_every: int = 0,
        attention: Callable[..., nn.Module] | None = None,
        mlp_ratio: float = 0.0,
        drop_path: float = 0.0,
        internal_block: int = 0,
        eps: float = 1e-6,
        mlp: Callable[..., nn.Module] = SwiGLU,
        norm: Norm = "rms",
        time_scale: float = 1000.0,
        conditioning: Conditioning = "class",
        text_tokens: bool = False,
        text: Mapping[str, Any] | None = None,
        prediction: Prediction = "velocity",
        patch_rank: int = 0,
    ) -> None:
        super().__init__()
        shape = Shape(
            height=height,
            width=width,
            dim=dim,
            head_dim=head_dim,
            depth=depth,
            patch_size=patch_size,
            mlp_ratio=mlp_ratio,
            drop_path=drop_path,
            attention_every=attention_every,
            internal_block=internal_block,
        )
        self.channels = channels
        self.num_classes = num_classes
        self.patch_size = patch_size
        self.grid = shape.grid
        self.tokens = shape.tokens
        self.depth = depth
        self.dim = dim
        self.drop_path = drop_path
        patch_values = channels * patch_size**2
        self.prediction = prediction
        self.patch_embed = build_patch_embedding(patch_values, patch_rank, dim)
        self.pos_embed = nn.Parameter(torch.empty(1, self.tokens, dim))
        self.time_embed = TimestepEmbedding(dim, time_scale)
        self.label_embed = None if conditioning == "text" else LabelEmbedding(dim, num_classes)
        self.text_embed = build_text_embedding(conditioning, text_tokens, text, dim)

        read_tokens = getattr(self.text_embed, "count", 0)
        self.blocks = build_blocks(shape, mixer, attention, read_tokens, mlp, eps, norm)

        # One linear layer computes all modulations: those of the blocks, and a scale and a shift of
        # the final norm.
        self.modulations = shape.modulations
        self.modulation = nn.Linear(dim, (depth * self.modulations + 2) * dim)
        self.head = nn.Linear(dim, patch_values)
        self.internal_block = internal_block
        self.internal = InternalHead(dim, patch_values, eps) if internal_block else None
        if not self.pos_embed.is_meta:
            self.init_weights()

    def init_weights(self) -> None:
        """Initialises every parameter and buffer. The constructor calls this method, except on the
        meta device: then call it after `to_empty()`.

        Modulations start at zero, so each block starts as the identity. The head starts at zero, so
        the model predicts zeros.
        """
        if isinstance(self.patch_embed, nn.Linear):
            init_linear(self.patch_embed)
        else:
            self.patch_embed.init_weights()
        with torch.no_grad():
            self.pos_embed.copy_(sincos_positions(self.grid, self.dim))
        optional = [self.label_embed, self.text_embed, self.internal]
        parts = [self.time_embed, *self.blocks, *filter(None, optional)]
        for part in parts:
            part.init_weights()  # pyright: ignore[reportCallIssue]
        for layer in (self.modulation, self.head):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
        self.init_buffers()

    def init_buffers(self) -> None:
        """Fills the layers' buffers, such as token orders and rotations, which files of weights do
        not contain."""
        for part in self.modules():
            if part is not self and hasattr(part, "init_buffers"):
                part.init_buffers()  # pyright: ignore[reportCallIssue]

    def forward(
        self,
        x: Float[Tensor, "B C H W"],
        t: Float[Tensor, "B"],
        y: Int[Tensor, "B"] | Condition,
        drop_uniforms: Float[Tensor, "B depth"] | None = None,
        internal_guidance: float | None = None,
    ) -> Float[Tensor, "B C H W"]:
        """Computes the velocity at (x, t) for labels y, or for labels and texts y (without texts:
        the empty text).

        `drop_uniforms` (B, depth), random numbers in (0, 1), decide which blocks each sample drops;
        None: no sample drops a block. `internal_guidance` w moves the velocity v away from the
        estimate u of the internal head, to u + w·(v - u), at almost no cost (Internal Guidance,
        https://arxiv.org/abs/2512.24176); None: returns v.
        """
        taps = [] if internal_guidance is None else [self.internal_block]
        velocity, streams, embedded = self.run_blocks(x, t, y, taps, drop_uniforms)
        if internal_guidance is not None:
            stream = streams[self.internal_block]
            inner = self.estimate_velocity(stream, embedded, x, t).float()
            velocity = inner + internal_guidance * (velocity.float() - inner)
        return velocity

    def run_blocks(
        self,
        x: Float[Tensor, "B C H W"],
        t: Float[Tensor, "B"],
        y: Int[Tensor, "B"] | Condition,
        taps: Collection[int],
        drop_uniforms: Float[Tensor, "B depth"] | None = None,
    ) -> tuple[Float[Tensor, "B C H W"], dict[int, Tensor], Float[Tensor, "B D"]]:
        """Computes the velocity as `forward` does, without internal guidance. Also returns what
        heads read: number of a block in `taps`, from 1 -> the residual stream (B, L, D) after it,
        in fp32 with the tokens in raster order; and the embedding of time and condition."""
        embedded, text_inputs = self.embed_condition(t, y)
        cond = self.modulation(embedded)
        cond, last = cond.unflatten(1, (-1, self.dim)).split(
            (self.depth * self.modulations, 2), dim=1
        )
        cond = cond.unflatten(1, (self.depth, self.modulations))
        if drop_uniforms is not None:
            cond = self.drop_blocks(cond, drop_uniforms)
        # Start the residual stream as the position embedding, and pass the embedded patches as the
        # first branch: the first block adds them to the stream in fp32.
        branch = self.patch_embed(self.patchify(x))
        gate = torch.ones_like(branch[:, 0])
        residual = self.pos_embed.expand_as(branch).contiguous()
        streams: dict[int, Tensor] = {}
        # Split `cond` by unbind, because its backward pass is one copy, while the backward pass of
        # cond[:, i] writes a gradient as large as `cond` for each block.
        for number, modulations in enumerate(cond.unbind(1), start=1):
            block = cast("Block", self.blocks[number - 1])
            read = text_inputs if block.reads_text else []
            branch, gate, residual = block(
                branch, gate, residual, modulations, *read, grid=self.grid
            )
            if number in taps:
                streams[number] = block.read_stream(branch, gate, residual)

        # Compute the final norm by the last block's `normalise`: it adds the last branch to the
        # stream and norms the sum in one operation, by the fused kernel if that is on.
        final = cast("Block", self.blocks[-1])
        scale, shift = last.unbind(1)
        h, _ = final.normalise(branch, gate, residual, scale, shift, len(final.layers))
        return self.read_velocity(self.head(h), x, t), streams, embedded

    def estimate_velocity(
        self, stream: Float[Tensor, "B L D"], embedded: Float[Tensor, "B D"], x: Tensor, t: Tensor
    ) -> Float[Tensor, "B C H W"]:
        """Computes the internal head's velocity at (x, t) from the stream after block
        `internal_block` and the embedding of time and condition."""
        return self.read_velocity(cast("InternalHead", self.internal)(stream, embedded), x, t)

    def read_velocity(
        self, patches: Float[Tensor, "B L E"], x: Tensor, t: Tensor
    ) -> Float[Tensor, "B C H W"]:
        """Computes the velocity at (x, t) from what a head returns, the velocity itself or the
        clean latent z (`prediction`); then it is (x - z)/t, in fp32. A subclass whose heads predict
        something else overrides this method."""
        predicted = self.unpatchify(patches)
        if self.prediction == "velocity":
            return predicted
        time = t.float().clamp(min=SMALLEST_TIME).view(-1, 1, 1, 1)
        return (x.float() - predicted.float()) / time

    def embed_condition(
        self, t: Float[Tensor, "B"], y: Int[Tensor, "B"] | Condition
    ) -> tuple[Float[Tensor, "B D"], list[Tensor]]:
        """Embeds time, label and text; returns their vector, and the tokens of the texts with their
        mask, if the model reads tokens."""
        labels, text = (y, None) if isinstance(y, Tensor) else y
        embedded = self.time_embed(t)
        text_inputs: list[Tensor] = []
        if self.label_embed is not None:
            embedded = embedded + self.label_embed(labels)
        if self.text_embed is not None:
            vector, *text_inputs = self.text_embed(text, labels == self.num_classes)
            embedded = embedded + vector
        return nn.functional.silu(embedded), text_inputs

    def drop_blocks(self, cond: Tensor, uniforms: Tensor) -> Tensor:
        """Returns `cond` with the gates of dropped blocks set to 0, and the gates of all other
        blocks divided by 1 - rate, which keeps the expected output of the block: stochastic depth.

        Huang et al. 2016, https://arxiv.org/abs/1603.09382. The rate, the probability that a sample
        drops a block, grows linearly with the block's index, from 0 for the first block to
        `drop_path` for the last.
        """
        rate = torch.linspace(0.0, self.drop_path, self.depth, device=cond.device)
        keep = ((uniforms >= rate) / (1.0 - rate))[:, :, None, None]
        # The modulations of a block are scale, shift and gate of each layer in turn, so every third
        # modulation is a gate.
        is_gate = torch.arange(self.modulations, device=cond.device) % 3 == 2
        return torch.where(is_gate[:, None], cond * keep.to(cond.dtype), cond)

    def patchify(self, x: Float[Tensor, "B C H W"]) -> Float[Tensor, "B L E"]:
        """Cuts latents into patches of E = C · patch_size² values."""
        p = self.patch_size
        patches = x.unflatten(3, (-1, p)).unflatten(2, (-1, p))  # (B, C, rows, p, columns, p)
        return patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)

    def unpatchify(self, tokens: Float[Tensor, "B L E"]) -> Float[Tensor, "B C H W"]:
        """Joins patches to latents; the inverse of `patchify`."""
        p = self.patch_size
        patches = tokens.unflatten(2, (self.channels, p, p)).unflatten(1, self.grid)
        return patches.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)

    def no_weight_decay(self) -> set[str]:
        """Returns the names of the parameters that get no weight decay: vectors, embeddings,
        weights of norms and convolutions, and the scan's A, D and bias of dt."""
        exempt = ("A_log", "dt_bias", "D", "norm_weight", "pos_embed", "conv_weight")
        return {
            name
            for name, p in self.named_parameters()
            if p.ndim < 2 or name.rsplit(".", 1)[-1] in exempt or name.startswith("label_embed")
        }

    def list_unclipped(self) -> list[nn.Parameter]:
        """Lists the parameters whose gradients do not count for clipping: those of the internal
        head, which must not change how the rest learns."""
        return [] if self.internal is None else list(self.internal.parameters())

    def flops_per_sample(self) -> int:
        """Computes the FLOPs of one forward pass of one sample in training by formulas: matrix
        products, scan or attention, convolution, modulations, internal head.

        A training step costs three times as much (the backward pass has two products for each
        product of the forward pass). Elementwise operations and recomputation do not count.
        UserError if a subclass has a part without a method `flops`.
        """
        parts = dict(self.named_children())
        parts.pop("label_embed", None)  # a look-up
        total = 0
        for name, uses in (("patch_embed", self.tokens), ("head", self.tokens), ("modulation", 1)):
            if isinstance(parts[name], nn.Linear):
                total += 2 * uses * cast("nn.Linear", parts.pop(name)).weight.numel()

        # Any other part must count itself: a subclass may add parts.
        for name, part in parts.items():
            if name != "blocks" and not hasattr(part, "flops"):
                raise UserError(
                    f"the model's part {name} has no method flops(tokens), which counts the FLOPs "
                    "of one forward pass of one sample; add one."
                )
        counted: list[Any] = [*parts.pop("blocks").children(), *parts.values()]
        return total + sum(part.flops(self.tokens) for part in counted)
