"""Trains a latent generative model. This file is a run, read top to bottom.

python train.py                              handwritten digits, about a minute on a laptop
python train.py experiment=fastrun ...       minutes: does everything work, how fast is it?
python train.py experiment=fullrun run_dir=runs/mine ...   the real run; the same command again
resumes
"""

import common.require_python  # isort: skip  # noqa: F401
import os
from contextlib import nullcontext
from typing import Any

import hydra
from omegaconf import DictConfig

from training.config.compose import Composed, composed_by_hydra, one_sentence
from training.distributed.exit import run_app

# the profiled warm-up step is ours; its messages help nobody
os.environ.setdefault("KINETO_LOG_LEVEL", "99")


def train(composed: Composed) -> dict[str, Any]:
    """Runs what `composed` describes and returns its summary, which `run_dir/summary.json` holds
    too."""
    from common.progress import Progress
    from evaluation.in_run import InRun
    from training.assemble import assemble, describe_run, restore
    from training.config.build import build  # torch comes in with these, so that --help stays quick
    from training.distributed.stop_request import Asked, StopRequest
    from training.evaluate import evaluate, sample_grid
    from training.failures import end_if_bad, failures_explained
    from training.loggers import SafeLogger
    from training.report import log_line, summary_table
    from training.run import Run
    from training.weights.adapter_base import with_model
    from training.weights.pretrained import build_autoencoder

    # 1. Where we run.
    composed = with_model(composed)
    cfg = composed.cfg
    run = Run(composed)
    if run.finished:
        return run.show_finished()
    ranks = run.ranks
    run.show_rehearsal()
    logger = SafeLogger(build(cfg.logger, "logger"), silent=not ranks.first)

    # 2. What we train, on what, and what makes it fast; one observed step shows which of it is
    # really on.
    cfg = run.tuned()
    training = assemble(cfg, run.device, ranks, run.folder)
    run.keep_kernels(training.kernels)
    state = training.state
    step = training.step
    meter = training.state.meter
    spec = training.loader.spec
    autoencoder = build_autoencoder(spec, run.device) if cfg.sample_every or cfg.fd_every else None
    distances = InRun(training, autoencoder) if cfg.fd_every and autoencoder else None
    with failures_explained(training, run.folder):
        ledger = training.warm_up()
    run.stack = training.stack

    # 3. Where we left off.
    checkpoints = run.checkpoints()
    described = describe_run(composed, spec, ledger, training.base)
    where = restore(cfg, state, checkpoints, described)

    # 4. The loop: what is due after the step before, then a step.
    progress = Progress(
        cfg.total_samples, "samples", initial=state.samples, plain=False, silent=not ranks.first
    )
    explained = failures_explained(training, run.folder)
    with (
        StopRequest(ranks, checkpoints.failed, training.skips_only) as stop,
        logger,
        explained,
        checkpoints,
    ):
        run.open(ledger, logger, where)
        if distances:
            distances.record(run.folder)
        meter.earlier_seconds = run.keep_metrics_before(state.step)
        meter.start()
        batches = []
        while True:
            done = state.done
            asked = stop.asked()
            scores = {}
            if any(map(state.due, (cfg.log_every, cfg.eval_every, cfg.fd_every))) or (
                done and state.moved
            ):
                metrics = {"step": state.step, "samples": state.samples} | meter.report(step.lr)
                metrics |= checkpoints.figures()
                state.skipped_steps += metrics["skipped"]
                with meter.paused():
                    if state.due(cfg.eval_every):
                        metrics |= (scores := evaluate(training))
                    if distances and state.due(cfg.fd_every):
                        metrics |= (measured := distances())
                        scores = scores | measured
                    metrics |= training.note_skipped_data()
                    run.append_metrics(metrics)
                    logger.log(metrics, state.samples)
                    progress.say(log_line(metrics, progress.left()))
            if asked is Asked.look or (done and state.moved):
                end_if_bad(training, run.folder, batches, checkpoints, asked)
            drawing = autoencoder if state.due(cfg.sample_every) else None
            saving = state.due(cfg.save_every) or (
                asked is Asked.stop and state.moved and cfg.save_every
            )
            with meter.paused() if drawing or saving else nullcontext():
                if drawing:
                    file = run.folder / "samples" / f"step-{state.step}.png"
                    logger.image("sample_grid", sample_grid(training, drawing, file), state.samples)
                if saving:
                    training.note_skipped_data()
                    checkpoints.save(state, described, scores)
            run.keep_time(state, now=bool(saving))
            if done:
                break
            if asked is Asked.stop:
                checkpoints.finish()
                run.stop(state)

            with meter.waiting():
                batches = training.next_batches()
            step.schedule(state.samples)
            meter.update(step(batches))
            state.advance(cfg.batch_size)
            progress.advance(cfg.batch_size)
    progress.close()

    # 5. What came of it.
    summary = run.summarise(state, ledger, checkpoints)
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
