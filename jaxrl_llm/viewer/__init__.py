"""A viewer of runs: curves, samples, alerts, memory; on a web page, in a PNG, in a terminal.

It reads the files of a run (`metrics.jsonl`, `rollouts/`) while they are written, and imports no
training library: it starts at once, also on a machine without an accelerator.
"""
