"""Trains a latent generative model. This file is a run, read top to bottom.

python train.py                              handwritten digits, about a minute on a laptop
python train.py experiment=fastrun ...       minutes: does everything work, how fast is it?
python train.py experiment=fullrun run_dir=runs/mine ...   the real run; the same command again resumes
"""

import os
import time
from functools import partial
from typing import Any

import hydra
from omegaconf import DictConfig

from training.config.compose import Composed, composed_by_hydra, one_sentence
from training.process.exit import run_app

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiled warm-up step is ours; its messages help nobody


def train(composed: Composed) -> dict[str, Any]:
    """Runs what `composed` describes and returns its summary, which `run_dir/summary.json` holds too."""
    from training.assemble import (
        build_loader,
        build_optimizer,
        build_stack,
        build_step,
        identity,
        restore,
    )
    from training.config.build import build  # torch comes in with what follows, so that --help stays quick
    from training.evaluate import evaluate, sample_grid
    from training.guards import failures_explained, stop_if_hopeless
    from training.pretrained import build_autoencoder, build_model
    from training.process.loggers import SafeLogger
    from training.process.progress import Progress
    from training.process.stop import StopRequest
    from training.report import log_line, summary_table
    from training.run import Run

    # 1. Where we run.
    cfg = composed.cfg
    run = Run(composed)
    ranks = run.ranks
    micro_batch = cfg.batch_size // cfg.accumulation_steps // ranks.world_size
    run.show_rehearsal()

    # 2. What we train, and on what.
    loader = build_loader(cfg.data, cfg.seed, micro_batch, run.device, ranks)
    objective = build(cfg.objective, "objective")
    logger = SafeLogger(build(cfg.logger, "logger"), silent=not ranks.first)
    autoencoder = build_autoencoder(loader.spec, run.device) if cfg.sample_every else None
    model = build_model(cfg.model, loader.spec, run.device)

    # 3. What makes it fast, then the optimizer, and one step observed to see what is really on.
    stack = build_stack(cfg, run.device)
    stack.on_process()
    model = stack.on_model(model)
    optimizer = build_optimizer(cfg.optim, model, stack)
    state, step = build_step(cfg, model, loader, objective, optimizer, stack, ranks)
    meter = state.meter
    began = time.perf_counter()
    explained = partial(failures_explained, cfg, step, state, run.device, run.folder)
    with explained(), state.preserved():
        step.schedule(0)
        ledger = stack.warm_up(lambda: step([next(loader) for _ in range(cfg.accumulation_steps)]), model.blocks)
    warm_up_seconds = time.perf_counter() - began

    # 4. Where we left off.
    checkpoints = run.checkpoints()
    described = identity(composed, loader.spec, ledger)
    where = restore(cfg, state, checkpoints, described)

    # 5. The loop.
    progress = Progress(cfg.total_samples, "samples", initial=state.samples, silent=not ranks.first)
    with StopRequest(ranks, checkpoints.failed) as stop, logger, checkpoints, explained():
        run.open(ledger, logger, where)
        run.keep_metrics_before(state.step)
        meter.start()
        while state.samples < cfg.total_samples:
            with meter.waiting():
                batches = [next(loader) for _ in range(cfg.accumulation_steps)]
            step.schedule(state.samples)
            meter.update(step(batches))
            state.advance(cfg.batch_size)
            progress.advance(cfg.batch_size)
            stopping = bool(stop)
            last, eval_loss = state.samples >= cfg.total_samples, None

            if last or state.due(cfg.log_every) or state.due(cfg.eval_every):
                metrics = {"step": state.step, "samples": state.samples} | meter.report(step.lr)
                metrics |= checkpoints.figures()
                state.skipped_steps += metrics["skipped"]
                with meter.paused():
                    if cfg.eval_every and (last or state.due(cfg.eval_every)):
                        metrics |= evaluate(step, state, micro_batch)
                        eval_loss = metrics.get("eval_loss")
                    run.append_metrics(metrics)
                    logger.log(metrics, state.samples)
                    progress.say(log_line(metrics))
                    stop_if_hopeless(cfg, run.folder, step, state, batches)
            with meter.paused():
                if autoencoder and (last or state.due(cfg.sample_every)):
                    file = run.folder / "samples" / f"step-{state.step}.png"
                    sample_grid(step, state, loader.spec, autoencoder, cfg.sampling, file, micro_batch)
                    logger.image("samples", file, state.samples)
                if cfg.save_every and (last or stopping or state.due(cfg.save_every)):
                    checkpoints.save(state, described, eval_loss)
            if stopping and not last:
                checkpoints.finish()
                run.stop(state, saved=cfg.save_every > 0)
    progress.close()

    # 6. What came of it.
    summary = run.summarise(state, ledger, warm_up_seconds, checkpoints)
    logger.finish(summary)
    ranks.say(f"\nsummary\n{summary_table(summary)}")
    run.close()
    return summary


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(cfg: DictConfig) -> None:
    with one_sentence():
        train(composed_by_hydra(cfg))


if __name__ == "__main__":
    run_app(main)
