"""Serves a model with JetStream's gRPC server: `python launch/serve_jetstream.py --model=FOLDER`.

This is for clients that use JetStream's protocol; otherwise use `launch/serve.py`. docs/serving.md
says what to install.
"""

from jaxrl_llm.commands import command_line

if __name__ == "__main__":
    command_line.run("serve_jetstream")
