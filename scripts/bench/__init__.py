"""Measures training: `python -m scripts.bench <command> key=value …`.

    ladder        from what a newcomer writes to runtime=max, one technique more per rung
    techniques    each technique alone over eager, and removed from max
    kernels       each fused operator beside its definition: time, share of the copy rate
    mixers        a training step of each mixer at equal parameters
    data          samples a second of each loader, and of the usual pipelines; precompute by parts
    step          one configuration by phases, with a verdict: what bounds it, which keys to try next
    trace         a profiler trace of a few steps
    antipatterns  what each known mistake costs here
    precision     fp32, bf16 and fp16 over several seeds
    saves         what a checkpoint costs, in the background and in the foreground
    claims        what guides promise, and what is measured here
    compare       what differs between two runs: bench compare RUN_A RUN_B
    readme        writes the README's table of techniques from the results in docs/benchmarks

Keys of the command itself come first (`<command> --help` lists them); any other `key=value` is an override of the
training configuration, on top of the `setting`. Results are JSON with the environment beside a table on the terminal.
techniques, mixers and precision are in variants.py, antipatterns and claims in practices.py, the others in their own.
"""
