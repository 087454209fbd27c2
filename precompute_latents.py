"""Encodes images into shards of latents with a manifest, once per data set.

    python precompute_latents.py source=photos out=latents/photos encoder=sd dry_run=true
    python precompute_latents.py source=photos out=latents/photos encoder=sd
    torchrun --nproc-per-node 8 precompute_latents.py source=photos out=latents/photos encoder=sd
    python precompute_latents.py source=photos out=latents/photos encoder=local \\
        encoder.path=models/my-vae

On several machines, one command each for part=0/3, 1/3 and 2/3, and finish=true at the end:

    python precompute_latents.py source=photos out=latents/photos encoder=sd part=0/3
    python precompute_latents.py out=latents/photos finish=true

If the command was stopped, run it again: it continues the job.
"""

import common.require_python  # isort: skip  # noqa: F401  # refuses a Python that is too old
import shlex
import time
from pathlib import Path

import hydra
from omegaconf import DictConfig

from common.config.compose import Composed, compose_from_hydra, report_user_errors
from common.distributed.exit import run_app


def precompute(composed: Composed) -> Path:
    """Encodes the images that `composed.cfg` names, and returns the path of the manifest. With
    dry_run=true it only prints an estimate of size and time, and writes no manifest. For a part of
    a job it writes no manifest either; with finish=true it writes that of all parts."""
    from accel.stack import SAME_BYTES, TECHNIQUES, AccelerationStack
    from common.config.build import build
    from common.distributed.ranks import Ranks
    from common.environment import pick_device
    from common.errors import UserError
    from encoding.caption_job import CaptionJob
    from encoding.encoder import (
        PSNR_IMAGES,
        EncodeStep,
        ShardEncoder,
        estimate,
        measure_psnr,
        read_first_images,
        refuse_large_encoding,
    )
    from encoding.job import (
        describe_job,
        describe_result,
        finish_job,
        hold_folder,
        list_settings,
        plan_shards,
        read_job,
        refuse_other_source,
        write_manifest,
    )
    from encoding.reuse import EarlierSet
    from encoding.shards import WHOLE, Part
    from encoding.sources import list_job_images
    from models.images import Autoencoder

    cfg = composed.cfg
    out = Path(cfg.out).expanduser()
    ranks = Ranks.from_environment()
    if cfg.finish:
        needed = ("out=", "finish=")
        others = [word for word in composed.overrides if not word.lstrip("+").startswith(needed)]
        if others:
            raise UserError(f"finish=true needs only out; leave {' '.join(others)} out.")
        if ranks.first:
            print(describe_result(finish_job(out), out))
        return out / "manifest.json"

    # 1. List the images, plan the shards, and load the encoder.
    device = ranks.device(pick_device(cfg.runtime.device))
    earlier = read_job(out)
    images, cfg = list_job_images(cfg, earlier)
    plan = plan_shards(images, cfg)
    settings = list_settings(cfg) | {"source_sha256": images.sha256()}
    refuse_other_source(out, earlier, plan, settings)
    reused = EarlierSet(cfg.reuse, settings) if cfg.reuse else None
    part = Part.parse(cfg.part)
    plan.part = part.divide(ranks.rank, ranks.world_size)
    ranks.say(images.describe(str(cfg.source), len(plan.images)))
    autoencoder = build(cfg.encoder, "encoder", kind=Autoencoder).to(device)
    if cfg.text_encoder:
        captions = [entry.captions for _, entry in plan.images]
        known = reused and reused.open_captions(vars(cfg))
        plan.captions = CaptionJob(captions, cfg, device, known)
        ranks.say(plan.captions.describe())

    # 2. Accelerate the encoder, and encode one batch to check which techniques were active.
    stack = AccelerationStack(
        cfg.runtime.values(),
        device,
        on_unavailable=cfg.runtime.on_unavailable,
        only=[kind.key for kind in TECHNIQUES if "precompute" in kind.used_in],
        same_bytes=f"{SAME_BYTES}; same_bytes=false gives that up" if cfg.same_bytes else "",
    )
    stack.on_process()
    autoencoder = stack.on_model(autoencoder)
    step = stack.on_step(EncodeStep(autoencoder))
    refuse_large_encoding(step, cfg, device)
    first = read_first_images(images, cfg, device)
    batch = first[: cfg.batch_size]
    ledger = stack.warm_up(lambda: step(batch))
    ranks.say(f"\nledger ({device})\n{ledger.format_table(cfg.ledger)}\n")

    # 3. Check that encoding and decoding the first images reaches `min_psnr`.
    quality = measure_psnr(step, autoencoder, first[:PSNR_IMAGES], cfg)
    shape = tuple(step(batch)[0].shape[1:])
    ranks.say(f"reconstruction of the first images: {quality:.2f} dB; latents {shape}")

    encoder = ShardEncoder(step, cfg, out, device, plan.captions, reused)
    if cfg.dry_run:
        ranks.say(estimate(encoder, images, plan))
        return out / "manifest.json"

    # 4. Encode all images, shard by shard; the ranks share the shards, as parts do.
    job = describe_job(plan, images, cfg, autoencoder, shape, quality, ledger.precision)
    if reused is not None:
        reused.refuse_others(job)
    ranks.wait_for_all()  # and join a group, so that a rank that dies ends the others
    with hold_folder(out, plan.part, job):
        began = time.perf_counter()
        if plan.captions is not None:
            plan.captions.run(out, plan.part)
        encoder.run(plan)
        ranks.wait_for_all()
        command = shlex.join(["python", "precompute_latents.py", f"out={out}", "finish=true"])
        result = f"part={part} is encoded. When all parts are encoded, run: {command}"
        if ranks.first and part == WHOLE:
            result = describe_result(write_manifest(out), out)

    # 5. Report the time and the result, with the next command.
    seconds = time.perf_counter() - began
    shares = [f"{name} {spent / seconds:.0%}" for name, spent in encoder.seconds.items()]
    breakdown = f" ({', '.join(shares)})" if shares else ""
    ranks.say(f"encoded in {seconds:.0f} s{breakdown}\n{result}")
    return out / "manifest.json"


@hydra.main(version_base="1.3", config_path="conf", config_name="precompute_latents")
def main(cfg: DictConfig) -> None:
    with report_user_errors("precompute_latents"):
        precompute(compose_from_hydra(cfg))


if __name__ == "__main__":
    run_app(main, "precompute_latents", __doc__)
