"""All that is to be measured on a GPU, in ten minutes: ``python -m benchmarks.gpu_day --minutes 10 --out DIR``.

Stages in order of worth (`stages.STAGES`), each in a process of its own, each of its items with a limit in seconds. A
row is written to DIR/rows.jsonl as it comes, so that a crash or a hang loses one row, and the next call goes on with
what is missing. Models are made on the spot.
"""
