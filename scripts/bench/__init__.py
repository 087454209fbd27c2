"""Measures training: `python -m scripts.bench <command> key=value …`.

    gpu           all of it and the tests on a GPU, in slots of minutes; the same command goes on
    publish       pages, charts and tables from measured rows

    doctor        the machine, and its measured rates
    calibration   which fused kernels a run of each model would choose here
    tests         the tests that need a GPU, a row each
    ladder        from what a newcomer writes to runtime=max, one technique more per rung
    techniques    each technique alone over eager in fp32 and bf16, and removed from max
    kernels       each fused operator beside its definition: time, share of the copy rate
    mixers        a training step of each mixer at equal parameters
    hotspots      where the time of a step goes: ops with bytes, FLOPs, and their share of the rates
    data          samples a second of each loader, and of the usual pipelines; precompute by parts
    step          one configuration by phases, with a verdict: what bounds it, which keys to try
    next saves         what a checkpoint costs, in the background and in the foreground precision
    fp32, bf16 and fp16 over several seeds memory        small optimizer states, bf16 weights, fp8,
    offload: loss, bytes, seconds over several seeds plan          memory and step time that
    scripts.plan predicts, beside what is measured claims        what guides promise, and what is
    measured here antipatterns  what each known mistake costs here

    trace         a profiler trace of a few steps
    compare       what differs between two runs: bench compare RUN_A RUN_B

Keys of the command itself come first (`<command> --help` lists them); any other `key=value` is an
override of the training configuration, on top of the `setting`. Each row is kept in `out`
(rows.jsonl) as soon as it is measured, and not measured again while code, hardware and versions are
the same.
"""
