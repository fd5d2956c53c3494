"""The commands of the package: `jaxrl_llm NAME`, and the scripts of `launch/`.

`options.py` defines the flags of each, `command_line.py` parses the command line; neither imports a
training library. Each command is implemented by a module of its own.
"""
