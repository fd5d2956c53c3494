"""Exports the weights of a run as a Hugging Face folder or a GGUF file."""

import pathlib

import numpy as np
from absl import logging

from jaxrl_llm import errors, saved_policy
from jaxrl_llm.commands.options import ExportOptions
from jaxrl_llm.models.hf import checkpoint, config_reader, peft_adapter
from jaxrl_llm.saved_policy import SavedRun
from jaxrl_llm.sharding import multihost


def main(options: ExportOptions) -> None:
    if options.format == "gguf":
        errors.check_package("gguf", "gguf", "--format=gguf")
    run = saved_policy.load_run(options.workdir, options.best)
    if options.adapters:
        written, step = _write_adapters(options, run)
    elif options.format == "gguf":
        written, step = _write_gguf(options, run)
    else:
        written, step = _write_folder(options, run)
    what = "adapters" if options.adapters else "weights"
    logging.info("the %s after step %d are in %s", what, step, written)


def _write_adapters(options: ExportOptions, run: SavedRun) -> tuple[pathlib.Path, int]:
    """Writes the adapters of a run as a folder for `peft`; its path, and the step."""
    if not run.config.lora.rank:
        message = f"the run in {options.workdir} has no adapters (lora.rank=0); leave it out"
        errors.raise_flag_problems([("adapters", message)])
    params, step = run.read_params()
    peft_adapter.save(options.out, run.network, params, run.config.model.path)
    return pathlib.Path(options.out), step


def _write_folder(options: ExportOptions, run: SavedRun) -> tuple[pathlib.Path, int]:
    """Writes the weights of a run, adapters merged, as a model folder; its path, and the step."""
    params, step = run.read_params()
    models, path = run.models, run.config.model.path
    network, weights = run.network, run.full_params(params)
    if models.image_feature_cache is not None and network.head == "lm":
        network, weights = models.image_feature_cache.with_tower(network, weights)
    checkpoint.save(
        options.out,
        network,
        weights,
        tokenizer=models.tokenizer,
        source_config=config_reader.read_config(path) if path else None,
        dtype=options.dtype or None,
        eos_token_ids=models.eos_tokens,
        generation_config=config_reader.generation_config(path) if path else {},
    )
    if models.image_processor is not None and multihost.is_first():
        models.image_processor.save(options.out)
    return pathlib.Path(options.out), step


def _write_gguf(options: ExportOptions, run: SavedRun) -> tuple[pathlib.Path, int]:
    """Writes the weights of a run, adapters merged, as a GGUF file; its path, and the step."""
    from jaxrl_llm.data import gguf_tokenizer
    from jaxrl_llm.models.hf import gguf_writer

    path = pathlib.Path(options.out)
    if path.suffix != ".gguf":  # hubs and Ollama find the type in the file's name
        path /= f"{path.resolve().name}-{options.gguf_type.upper()}.gguf"
    gguf_writer.check(run.network)
    gguf_writer.check_replaceable(path)
    tokenizer, vocab_size = run.models.tokenizer, run.network.shape.vocab_size
    fields = gguf_tokenizer.to_fields(tokenizer, vocab_size, run.models.eos_tokens)
    params, step = run.read_params()
    gguf_writer.save(
        path,
        run.network,
        checkpoint.gathering_reader(run.full_params(params), np.dtype(np.float32)),
        fields,
        weight_type=options.gguf_type,
        general_fields={"general.name": pathlib.Path(options.workdir).resolve().name},
    )
    return path, step
