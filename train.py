"""Trains a latent generative model, and shows which accelerations were really on.

python train.py                                         on digits, about a minute on a laptop
python train.py runtime=fast model=dit_s data=resident data.path=latents/photos
python train.py experiment=fastrun ...                  minutes: does all work, how fast is it?
python train.py experiment=fullrun run_dir=runs/mine    the real run; the same command resumes
python train.py runtime.compile=true optim.lr=1e-4 ...  any key, also those of a chosen file
python train.py ... --cfg job --resolve                 prints the configuration as composed
"""

from common.require_python import PROCESS_START  # isort: skip
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from common.config.build import build
from common.config.compose import Composed, compose_from_hydra, report_user_errors
from common.distributed.exit import Request, StopRequest, run_app
from common.output import Progress
from training.sweeps import run_trial


def train(composed: Composed, began: float | None = None) -> dict[str, Any]:
    """Trains with the composed configuration, in six stages. Returns the run's summary, metric name
    -> value, which is also written to `run_dir/summary.json`. The time of the run counts from the
    moment at which time.perf_counter() returned `began`, or from this call on if that is None.

    With several processes the process group lasts until the process ends: a script of your own
    calls `train` inside `with exit_cleanly():` (common/distributed/exit.py).
    """
    from common.clock import CLOCK
    from common.environment import connect, seed
    from common.files import go_on_without
    from evaluation.evaluator import TrainingDistances  # imported here: torch slows down --help
    from training.assemble import assemble, describe_run, restore
    from training.checkpoint.snapshots import prepare_snapshots, save_snapshot_if_due
    from training.drawing import describe_shifts
    from training.evaluate import draw_sample_grid, score
    from training.failures import end_if_failed, explain_failures
    from training.preflight.memory import refuse_large_step
    from training.records.log_lines import format_log_line, format_summary
    from training.records.metrics import SafeLogger
    from training.run import RunFolder
    from training.weights.first_weights import insert_pretrained
    from training.weights.pretrained import build_autoencoder

    # 1. Set up the run: clock, processes, device, folder, seed, logger.
    CLOCK.begin(began)
    ranks, device = connect(composed.cfg)
    run = RunFolder.open(insert_pretrained(composed), ranks, device)
    if run.finished:
        return run.show_finished()
    seed(run.cfg)
    run.show_rehearsal()
    logger = SafeLogger(build(run.cfg.logger, "logger"), silent=not ranks.first)

    # 2. Build model, data and techniques. `warm_up` takes some steps and observes which techniques
    # are active.
    cfg = run.apply_measurements()
    training = assemble(cfg, device, ranks, run.folder)
    run.write_kernels(training)
    state = training.state
    meter = state.meter
    draws = cfg.sample_every or cfg.fd_every
    autoencoder = build_autoencoder(training.loader.spec, device) if draws else None
    distances = TrainingDistances(training, autoencoder) if cfg.fd_every and autoencoder else None
    with explain_failures(training, run.folder):
        refuse_large_step(training)
        ledger = training.warm_up()

    # 3. Restore the newest checkpoint, if there is one, or start from `resume` or `init_from`.
    checkpoints = run.open_checkpoints()
    described = describe_run(run.composed, training, ledger)
    origin = restore(cfg, state, checkpoints, described)
    origin += ranks.broadcast_result(lambda: prepare_snapshots(cfg, state, run.folder))
    origin += describe_shifts(cfg, training.loader.spec)
    progress = Progress(
        cfg.total_samples, "samples", state.samples, plain=False, silent=not ranks.first
    )

    # 4. Define tasks between two steps (report, draw). The meter pauses during a task, so that the
    # task's time does not lower the training rate.
    def report(metrics: dict[str, Any]) -> None:
        run.append_metrics(metrics, training.stack)
        logger.log(metrics, state.samples)
        progress.say(format_log_line(metrics, progress.format_time_left()))

    def draw() -> None:
        assert autoencoder
        file = run.folder / f"samples/step-{state.step}.png"
        with go_on_without(file.parent):
            grid = draw_sample_grid(training, autoencoder, file)
            logger.image("sample_grid", grid, state.samples)

    # 5. Loop: score, report, draw and save if due after the last step, then take the next step.
    stop_request = StopRequest(
        checkpoints.has_failed,
        training.has_skipped_too_many,
        begin_max=ranks.begin_max if ranks.world_size > 1 else None,
    )
    with stop_request, logger, explain_failures(training, run.folder), checkpoints:
        run.announce_start(training, ledger, logger, origin)
        if distances:
            distances.record(run.folder)
        run.continue_records(state)
        meter.start()

        while True:
            # Decide what is due after this step. If the run was asked to stop, save a checkpoint
            # before it ends.
            request = stop_request.poll()
            stopping = request is Request.stop
            ending = state.done and state.moved
            report_due = ending or state.is_due(cfg.log_every, cfg.eval_every, cfg.fd_every)

            # Score before saving, because a checkpoint stores the scores. Save also if the score
            # that decides which checkpoint is the best has never been better.
            scores: dict[str, float] = {}
            if report_due:
                with meter.pause():
                    metrics = training.close_window()
                    scores = score(training, distances)
                    metrics |= checkpoints.report_times() | scores | training.note_skipped_data()
                    report(metrics)
            wanted = (stopping and state.moved) or checkpoints.is_best(scores)
            save_due = state.is_due(cfg.save_every) or (wanted and cfg.save_every > 0)
            if ending or request is Request.look:
                end_if_failed(training, run.folder, checkpoints, request)
            if state.is_due(cfg.sample_every):
                with meter.pause():
                    draw()
            # Write the snapshot before the checkpoint, because a run that resumes from the
            # checkpoint does not write earlier snapshots again.
            save_snapshot_if_due(cfg, state, ranks, run.folder, described)
            if save_due:
                with meter.pause():
                    training.note_skipped_data()
                    checkpoints.save(state, described, scores)
            run.write_time(state, saved=save_due)
            if state.done:
                break
            if stopping:
                checkpoints.finish()
                run.stop(state)

            training.take_step()
            progress.advance(cfg.batch_size)
    progress.close()

    # 6. Summarise.
    summary = run.summarise(state, ledger)
    logger.finish(summary)
    ranks.say(f"\nsummary\n{format_summary(summary)}")
    run.close()
    return summary


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(cfg: DictConfig) -> float | None:
    if HydraConfig.get().mode is RunMode.MULTIRUN:
        return run_trial(train, cfg)
    with report_user_errors():
        train(compose_from_hydra(cfg), PROCESS_START)
    return None


if __name__ == "__main__":
    run_app(main, "train", __doc__)
