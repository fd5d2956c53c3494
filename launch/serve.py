"""Serves a model with OpenAI's HTTP API: `python launch/serve.py --model=FOLDER`.

`--model` is a Hugging Face folder, `--workdir` the folder of a run. SIGTERM stops the server after
the accepted requests are done. SIGHUP makes it read the newest weights. See docs/serving.md.
"""

from jaxrl_llm.commands import command_line

if __name__ == "__main__":
    command_line.run("serve")
