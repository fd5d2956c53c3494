"""Writes what a run learned as a Hugging Face folder, with merged LoRA adapters or only these.

A policy becomes a causal language model, a reward model a sequence classifier with one label.

`python launch/export.py --workdir=DIR --out=DIR`
"""

from absl import flags, logging

from jaxrl_llm import program
from jaxrl_llm.learner import saved
from jaxrl_llm.models import families, huggingface, peft_folder

WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run.", required=True)
OUT = flags.DEFINE_string(
    "out", None, "Folder to write: new, empty or an earlier export.", required=True
)
DTYPE = flags.DEFINE_enum(
    "dtype", "", ["", "float32", "bfloat16", "float16"], "Of the tensors; empty: as the run."
)
ADAPTERS = flags.DEFINE_bool("adapters", False, "Write only the adapters, as a folder for `peft`.")
BEST = flags.DEFINE_bool(
    "best", False, "Export the step with the best checkpoint.best_metric, not the newest."
)


def main():
    found = saved.learned(WORKDIR.value, BEST.value)
    params, step = found.read()
    models, path = found.models, found.config.model.path
    if ADAPTERS.value:
        if not found.config.lora.rank:
            message = f"the run in {WORKDIR.value} has no adapters (lora.rank=0); leave it out"
            program.refuse([("adapters", message)])
        peft_folder.save(OUT.value, found.network, params, path)
        logging.info("the adapters after step %d are in %s", step, OUT.value)
        return
    huggingface.save(
        OUT.value,
        found.network,
        found.whole(params),
        tokenizer=models.tokenizer,
        source_config=families.read_config(path) if path else None,
        dtype=DTYPE.value or None,
        eos_token_ids=models.eos_tokens,
    )
    logging.info("the weights after step %d are in %s", step, OUT.value)


if __name__ == "__main__":
    program.run(main)
