"""Adapters as a folder that `peft` loads: adapter_config.json and adapter_model.safetensors."""

import functools
import pathlib
from collections.abc import Iterator

import numpy as np
from flax import traverse_util

from jaxrl_llm.models import families, written_folder
from jaxrl_llm.models.families import TensorName
from jaxrl_llm.models.safetensors_file import TensorToWrite
from jaxrl_llm.models.transformer import Network, Params

_FACTORS = {"lora_a": "lora_A", "lora_b": "lora_B"}


def save(
    folder: str | pathlib.Path, network: Network, adapters: Params, base_model: str = ""
) -> None:
    """Writes the adapters of a network, as `written_folder.write`.

    `base_model` is the folder of the frozen weights that the file names; "" names none. The head of
    a scalar network is among the adapters, whole.

    Raises:
      CheckpointFormatError: If the folder holds something other than an earlier export.
    """
    folder = pathlib.Path(folder)
    written_folder.check_replaceable(folder)
    modules = {name.path[:-1]: name for name in families.tensor_names(network.shape)}
    score = adapters.get("score")
    leaves = traverse_util.flatten_dict({"layers": adapters["layers"]})
    targets = sorted({modules[path[:-1]].name.split(".")[-2] for path in leaves})

    def tensors() -> Iterator[TensorToWrite]:
        if score is not None:
            named = TensorName(("score",), "base_model.model.score.weight")
            read = functools.partial(written_folder.fetch, score, named, 0, score.dtype)
            yield TensorToWrite(named.name, np.dtype(score.dtype), score.shape, read)
        for layer in range(network.shape.num_layers):
            for path, leaf in leaves.items():
                module = modules[path[:-1]].name.removesuffix(".weight").removesuffix(".bias")
                theirs = f"base_model.model.{module}.{_FACTORS[path[-1]]}.weight"
                name = TensorName(path, theirs, transposed=True)
                shape = leaf.shape[:0:-1]
                read = functools.partial(written_folder.fetch, leaf, name, layer, leaf.dtype)
                yield TensorToWrite(theirs.format(layer), np.dtype(leaf.dtype), shape, read)

    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM" if score is None else "SEQ_CLS",
        "modules_to_save": None if score is None else ["score"],
        "base_model_name_or_path": base_model or None,
        "r": network.lora.rank,
        "lora_alpha": network.lora.alpha,
        "target_modules": targets,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    files = {"adapter_model.safetensors": list(tensors())}
    written_folder.write(folder, files, {"adapter_config.json": config})
