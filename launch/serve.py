"""Serves a model with OpenAI's HTTP API: `python launch/serve.py --model=FOLDER`.

`--model` is a Hugging Face folder, `--workdir` the folder of a run. SIGTERM stops the server after
the accepted requests are done. SIGHUP makes it read the newest weights. See docs/serving.md.
"""

import sys

from absl import flags, logging

from jaxrl_llm import program
from jaxrl_llm.learner import saved
from jaxrl_llm.serving.driver import Driver

try:
    from jaxrl_llm.serving import server
    from jaxrl_llm.serving.app import make_app
    from jaxrl_llm.serving.metrics import Metrics
except ModuleNotFoundError as error:
    sys.exit(f"{error}; serving needs more than the package: pip install -e '.[serve]'")

MODEL = flags.DEFINE_string("model", "", "Hugging Face folder.")
WORKDIR = flags.DEFINE_string("workdir", "", "Folder of a run.")
NAME = flags.DEFINE_string("name", "", "Model name for clients; empty: the folder's name.")
HOST = flags.DEFINE_string("host", "127.0.0.1", "Address to listen on; there is no access control.")
PORT = flags.DEFINE_integer("port", 8000, "Port to listen on; 0: any free port.", 0, 65535)
SLOTS = flags.DEFINE_integer("num_slots", 0, "Samples decoded at the same time; 0: chosen.", 0)
MAX_TOKENS = flags.DEFINE_integer("max_tokens", 0, "Prompt and reply; 0: up to 4096.", 0)
MAX_WAITING = flags.DEFINE_integer("max_waiting", 256, "Samples that may wait for a slot.", 0)
CHUNK = flags.DEFINE_integer("chunk_steps", 8, "Decode steps per chunk.", 1, 128)
DRAFT = flags.DEFINE_integer("draft_tokens", 0, "Draft tokens per decode step; 0: none.", 0, 16)
DTYPE = flags.DEFINE_enum("dtype", "", ["", "float32", "bfloat16"], "For --model; empty: chosen.")
TENSOR = flags.DEFINE_integer("tensor", 1, "Devices that share each layer of --model.", 1)
WARM_UP = flags.DEFINE_integer("warm_up_prompts", 1, "Prompts in one prefill; 0: no warm-up.", 0)
GRACE_S = flags.DEFINE_float("grace_s", 30.0, "Time for requests after SIGTERM.", 0.0)
REQUEST_S = flags.DEFINE_float("request_s", 600.0, "Maximum time of a request.", 0.1)
BODY_BYTES = flags.DEFINE_integer("body_bytes", 2**20, "Maximum body of a request.", 1)


def main():
    if bool(MODEL.value) == bool(WORKDIR.value):
        program.refuse([("model", "give either --model or --workdir")])
    program.keep_compilations(MODEL.value or WORKDIR.value)
    listener = server.listen(HOST.value, PORT.value)
    if MODEL.value:
        source = saved.from_model(saved.model_config(MODEL.value, DTYPE.value, TENSOR.value))
    else:
        source = saved.from_run(WORKDIR.value)
    served = server.served(source, NAME.value, MAX_TOKENS.value)
    engine = server.engine(source, served, SLOTS.value, CHUNK.value, DRAFT.value)
    logging.info("reading the weights of %s", source.name)
    params = source.weights().params
    driver = Driver(engine, params, max_waiting=MAX_WAITING.value)
    app = make_app(served, driver, Metrics(driver), REQUEST_S.value, BODY_BYTES.value)
    longest = served.max_tokens - 1  # one token must fit
    filters = (False, True) if WARM_UP.value else ()
    programs = engine.jitted.programs(WARM_UP.value, longest, filters)
    del params  # otherwise they stay in memory after SIGHUP has loaded new weights
    read = lambda: source.weights().params  # noqa: E731
    server.run(
        app,
        driver,
        listener,
        programs=programs,
        reload=read,
        grace_s=GRACE_S.value,
        max_connections=max(256, 4 * driver.capacity),
    )


if __name__ == "__main__":
    program.run(main)
