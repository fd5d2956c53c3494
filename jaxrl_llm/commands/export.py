"""Exports the weights of a run as a Hugging Face folder or a GGUF file, and uploads them."""

import os
import pathlib
import tempfile

import numpy as np
from absl import logging

from jaxrl_llm import errors, saved_policy
from jaxrl_llm.commands.options import ExportOptions
from jaxrl_llm.config import bridge
from jaxrl_llm.models.hf import checkpoint, config_reader, peft_adapter
from jaxrl_llm.saved_policy import SavedRun
from jaxrl_llm.sharding import multihost
from jaxrl_llm.storage import files, upload
from jaxrl_llm.storage.address import HubAddress, LocalAddress, Location, is_remote, parse_address
from jaxrl_llm.viewer import model_card


def main(options: ExportOptions) -> None:
    if options.format == "gguf":
        errors.check_package("gguf", "gguf", "--format=gguf")
    if not options.to:
        written, step = _write(options, options.out)
        what = "adapters" if options.adapters else "weights"
        logging.info("the %s after step %d are in %s", what, step, written)
        return
    target = parse_address(options.to, names="model")
    is_local = isinstance(target, LocalAddress)
    if is_local and (options.out or options.public):
        message = f"{options.to!r} is a folder of this machine; leave out --out and --public"
        errors.raise_flag_problems([("to", message)])
    upload.check_target(target, options.public)
    name = target.repo if isinstance(target, HubAddress) else target.text
    with tempfile.TemporaryDirectory(prefix="jaxrl_llm_export_") as temporary:
        folder = options.out or os.path.join(temporary, pathlib.PurePath(name).name)
        if isinstance(target, LocalAddress) and not options.dry_run:
            folder = target.path
        _, step = _write(options, folder, card_name=name)
        if multihost.is_first():
            _print_or_upload(options, pathlib.Path(folder), target, step)


def _write(options: ExportOptions, out: str, card_name: str = "") -> tuple[pathlib.Path, int]:
    """Writes a folder or file, with a card under the name `card_name` if any; its path and step."""
    run = saved_policy.load_run(options.workdir, options.best)
    if options.adapters:
        written, step = _write_adapters(options, run, out)
    elif options.format == "gguf":
        written, step = _write_gguf(options, run, out)
    else:
        written, step = _write_folder(options, run, out)
    if card_name and multihost.is_first():
        auto_class = "AutoModelForCausalLM"
        if run.network.head == "scalar":
            auto_class = "AutoModelForSequenceClassification"
        elif run.models.image_processor is not None:
            auto_class = "AutoModelForImageTextToText"
        exported = model_card.Exported(
            folder=pathlib.Path(out),
            name=card_name,
            step=step,
            format="peft" if options.adapters else options.format,
            auto_class=auto_class,
        )
        model_card.write_card(exported, options.workdir, bridge.to_dict(run.config))
    return written, step


def _print_or_upload(
    options: ExportOptions, folder: pathlib.Path, target: Location, step: int
) -> None:
    """Uploads a folder; in a dry run prints its card and files instead."""
    if options.dry_run:
        print((folder / upload.CARD_FILE).read_text("utf-8"))
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            print(f"{path.stat().st_size:>15,} {path.relative_to(folder).as_posix()}")
        visibility = ", a public repository" if options.public else ", a private repository"
        where = options.to + (visibility if isinstance(target, HubAddress) else "")
        print(f"these would be written to {where}; nothing was")
        return
    message = f"step {step}, by jaxrl_llm"
    place = upload.upload_folder(folder, target, public=options.public, message=message)
    logging.info("step %d is at %s", step, place)


def _write_adapters(options: ExportOptions, run: SavedRun, out: str) -> tuple[pathlib.Path, int]:
    """Writes the adapters of a run as a folder for `peft`; its path, and the step."""
    if not run.config.lora.rank:
        message = f"the run in {options.workdir} has no adapters (lora.rank=0); leave it out"
        errors.raise_flag_problems([("adapters", message)])
    base_model = run.config.model.path
    if options.to and base_model and not is_remote(base_model):
        # Others have no use for a path of this machine.
        base_model = model_card.base_model_fields(base_model).get("base_model", "")
    params, step = run.read_params()
    peft_adapter.save(out, run.network, params, base_model)
    return pathlib.Path(out), step


def _write_folder(options: ExportOptions, run: SavedRun, out: str) -> tuple[pathlib.Path, int]:
    """Writes the weights of a run, adapters merged, as a model folder; its path, and the step."""
    params, step = run.read_params()
    models, path = run.models, run.config.model.path
    network, weights = run.plain_network, run.full_params(params)
    if models.image_feature_cache is not None and network.head == "lm":
        network, weights = models.image_feature_cache.with_tower(network, weights)
    checkpoint.save(
        out,
        network,
        weights,
        tokenizer=models.tokenizer,
        source_config=config_reader.read_config(path) if path else None,
        dtype=options.dtype or None,
        eos_token_ids=models.eos_tokens,
        generation_config=config_reader.generation_config(path) if path else {},
    )
    if models.image_processor is not None and multihost.is_first():
        models.image_processor.save(out)
    return pathlib.Path(out), step


def _write_gguf(options: ExportOptions, run: SavedRun, out: str) -> tuple[pathlib.Path, int]:
    """Writes the weights of a run, adapters merged, as a GGUF file; its path, and the step."""
    from jaxrl_llm.data import gguf_tokenizer
    from jaxrl_llm.models.hf import gguf_writer

    path = pathlib.Path(out)
    if path.suffix != ".gguf":  # hubs and Ollama find the type in the file's name
        path /= f"{path.resolve().name}-{options.gguf_type.upper()}.gguf"
    gguf_writer.check(run.network)
    gguf_writer.check_replaceable(path)
    tokenizer, vocab_size = run.models.tokenizer, run.network.shape.vocab_size
    fields = gguf_tokenizer.to_fields(tokenizer, vocab_size, run.models.eos_tokens)
    params, step = run.read_params()
    gguf_writer.save(
        path,
        run.plain_network,
        checkpoint.gathering_reader(run.full_params(params), np.dtype(np.float32)),
        fields,
        weight_type=options.gguf_type,
        general_fields={"general.name": files.folder_name(options.workdir)},
    )
    return path, step
