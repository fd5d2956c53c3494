"""Looks at runs: curves, samples, alerts, memory; as a web page, a picture, or in a terminal.

It reads files of runs (`metrics.jsonl`, `rollouts/`) while they are written, and no library of a
run: it starts at once, on a machine without an accelerator too.
"""
