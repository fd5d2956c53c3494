"""The commands of the package: `jaxrl_llm NAME`, and the files of `launch/`.

`options.py` says what each takes, `line.py` reads the command line; neither loads a library of a
run. A module for each command does its work.
"""
