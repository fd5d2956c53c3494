"""The model card of an export: README.md with the hub's YAML header, made from the run's files.

Local paths do not appear in it, only the names of files: a card may be public.
"""

import dataclasses
import importlib.metadata
import importlib.util
import logging
import math
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from huggingface_hub import ModelCard, ModelCardData

from jaxrl_llm.errors import UserError
from jaxrl_llm.storage import bucket, hub
from jaxrl_llm.storage.address import BucketAddress, HubAddress, Location, parse_address
from jaxrl_llm.storage.upload import CARD_FILE, TAG
from jaxrl_llm.viewer.runs import RecordedRun

logger = logging.getLogger(__name__)

CURVES_FILE = "curves.png"

# The settings that a card lists, where the job has them and they are not empty.
_SETTINGS: Sequence[tuple[str, str]] = (
    ("recipe", "algorithm.recipe"),
    ("learning rate", "trainer.optimizer.learning_rate"),
    ("steps of the run", "trainer.num_steps"),
    ("prompts per step", "trainer.prompts_per_step"),
    ("samples per prompt", "algorithm.samples_per_prompt"),
    ("minibatch size", "trainer.minibatch_size"),
    ("epochs per step", "trainer.epochs"),
    ("batch size", "trainer.batch_size"),
    ("tokens of a prompt, at most", "data.max_prompt_tokens"),
    ("tokens of a response, at most", "rollout.max_response_tokens"),
    ("tokens of a sequence, at most", "trainer.max_sequence_tokens"),
    ("sampling temperature", "rollout.temperature"),
    ("KL coefficient", "algorithm.kl_coef"),
    ("LoRA rank", "lora.rank"),
    ("LoRA alpha", "lora.alpha"),
    ("dtype of the weights", "model.param_dtype"),
    ("seed", "seed"),
)
_JOB_NAMES = {
    "rl": "reinforcement learning",
    "sft": "supervised fine-tuning",
    "dpo": "direct preference optimization",
    "reward_model": "training of a reward model",
}
_JOB_TAGS = {"rl": "reinforcement-learning", "reward_model": "reward-model"}
_EVALUATION = re.compile(r"val-core/.+/(?:mean|pass|maj)@\d+|val/.+")
_CACHE_FOLDER = re.compile(r"models--([^/]+)--([^/]+)/snapshots/[0-9a-f]+/?$")
_LICENSE_KEYS = ("license", "license_name", "license_link")


@dataclasses.dataclass(frozen=True)
class Exported:
    """A folder that is to get a card."""

    folder: pathlib.Path
    name: str  # under which it is loaded: "org/name", an address, a path
    step: int  # of the weights
    format: Literal["hf", "gguf", "peft"]
    auto_class: str  # the class of transformers that loads it: "AutoModelForCausalLM"


def write_card(exported: Exported, workdir: str, config: Mapping[str, Any]) -> None:
    """Writes README.md, and with matplotlib the curves of the run, into an exported folder.

    Args:
      config: All settings of the run, nested, as in its config.json.
    """
    run = RecordedRun(workdir)
    has_curves = bool(run.columns) and importlib.util.find_spec("matplotlib") is not None
    if has_curves:
        from jaxrl_llm.viewer import curve_plot

        curve_plot.save_curves([run], str(exported.folder / CURVES_FILE))
    elif run.columns:
        logger.warning("the model card has no curves; pip install 'jaxrl_llm[plot]' draws them")
    text = card_text(exported, run, config, has_curves)
    (exported.folder / CARD_FILE).write_text(text, encoding="utf-8")


def card_text(
    exported: Exported, run: RecordedRun, config: Mapping[str, Any], has_curves: bool
) -> str:
    """The text of a model card."""
    base = base_model_fields(config["model"]["path"])
    sections = [
        _introduction(exported, config, base),
        _loading(exported, base),
        "## Training\n\n" + _table(("setting", "value"), _settings(config)),
        _data_section(config),
        _evaluation_section(run, exported.step),
        f"## Curves\n\n![metrics by step]({CURVES_FILE})" if has_curves else "",
    ]
    body = "\n\n".join(section for section in sections if section)
    return f"---\n{_header(exported, config, base).to_yaml()}\n---\n\n{body}\n"


def base_model_fields(path: str) -> dict[str, str]:
    """Name and license of the model that a run began with, as in a card's header.

    The name is known of a name on the hub and of its cache, the license if the model's card says.
    """
    if not path:
        return {}
    fields: dict[str, str] = {}
    address = parse_address(path)  # a run's config has names of the hub in full
    if match := _CACHE_FOLDER.search(pathlib.Path(path).resolve().as_posix()):
        fields["base_model"] = f"{match[1]}/{match[2]}"
    if isinstance(address, HubAddress):
        fields["base_model"] = address.repo
    try:
        card = ModelCard(_base_card(address), ignore_metadata_errors=True).data
    except (OSError, UserError, ValueError) as error:
        logger.warning("the license of %s is not known: %s", path, error)
        return fields
    return fields | {key: str(value) for key in _LICENSE_KEYS if (value := card.get(key))}


def _base_card(address: Location) -> str:
    if isinstance(address, HubAddress):
        return (hub.download(address, [CARD_FILE]) / CARD_FILE).read_text("utf-8")
    if isinstance(address, BucketAddress):
        num_bytes = bucket.list_files(address).get(CARD_FILE, 0)
        return bucket.read_range(address, CARD_FILE, 0, num_bytes).decode("utf-8")
    return (pathlib.Path(address.path) / CARD_FILE).read_text("utf-8")


def _header(
    exported: Exported, config: Mapping[str, Any], base: Mapping[str, str]
) -> ModelCardData:
    recipe = config.get("algorithm", {}).get("recipe")
    tags = [TAG, *filter(None, (_JOB_TAGS.get(config["job"], config["job"]), recipe))]
    if exported.format == "gguf":
        tags.append("gguf")
    fields: dict[str, Any] = {**base, "tags": tags, "pipeline_tag": _pipeline_tag(exported)}
    if datasets := sorted({repo for repo, _ in _data_files(config) if repo}):
        fields["datasets"] = datasets
    if "base_model" in base:
        relations: Mapping[str, str] = {"peft": "adapter", "gguf": "quantized", "hf": "finetune"}
        fields["base_model_relation"] = relations[exported.format]
    libraries: Mapping[str, str] = {"hf": "transformers", "peft": "peft", "gguf": "gguf"}
    return ModelCardData(library_name=libraries[exported.format], **fields)


def _pipeline_tag(exported: Exported) -> str:
    return {
        "AutoModelForSequenceClassification": "text-classification",
        "AutoModelForImageTextToText": "image-text-to-text",
    }.get(exported.auto_class, "text-generation")


def _introduction(exported: Exported, config: Mapping[str, Any], base: Mapping[str, str]) -> str:
    title = exported.name.rstrip("/").rpartition("/")[2]
    begin = "random weights"
    if config["model"]["path"]:
        begin = pathlib.PurePath(config["model"]["path"]).name
    if repo := base.get("base_model"):
        begin = f"[{repo}](https://huggingface.co/{repo})"
    what = "Adapters" if exported.format == "peft" else "Weights"
    recipe = config.get("algorithm", {}).get("recipe")
    method = _JOB_NAMES[config["job"]] + (f" ({recipe})" if recipe else "")
    version = importlib.metadata.version("jaxrl_llm")
    return (
        f"# {title}\n\n{what} after step {exported.step} of {method} with jaxrl_llm {version},"
        f" from {begin}."
    )


def _loading(exported: Exported, base: Mapping[str, str]) -> str:
    name, auto_class = exported.name, exported.auto_class
    if exported.format == "gguf":
        file = next(iter(sorted(exported.folder.glob("*.gguf"))), pathlib.Path("model.gguf")).name
        kind = file.removesuffix(".gguf").rpartition("-")[2]
        lines = [f"llama-server -hf {name}:{kind}", f"ollama run hf.co/{name}:{kind}"]
        if not re.fullmatch(r"[^/:]+/[^/:]+", name):
            lines = [f"llama-server -m {file}"]
        return "## Loading\n\n" + "\n".join(f"    {line}" for line in lines)
    lines = [f"from transformers import {auto_class}, AutoTokenizer"]
    if exported.format == "peft":
        base_name = base.get("base_model", "BASE_MODEL")
        lines += [
            "from peft import PeftModel",
            "",
            f'base = {auto_class}.from_pretrained("{base_name}", dtype="auto")',
            f'model = PeftModel.from_pretrained(base, "{name}")',
            f'tokenizer = AutoTokenizer.from_pretrained("{base_name}")',
        ]
    else:
        lines += [
            "",
            f'model = {auto_class}.from_pretrained("{name}", dtype="auto")',
            f'tokenizer = AutoTokenizer.from_pretrained("{name}")',
        ]
    return "## Loading\n\n```python\n" + "\n".join(lines) + "\n```"


def _settings(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for label, key in _SETTINGS:
        value: Any = config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        if value not in (None, "", 0) and not (key == "lora.alpha" and not config["lora"]["rank"]):
            yield label, f"{value:g}" if isinstance(value, float) else str(value)
    functions = config.get("rewards", {}).get("functions", {})
    models = config.get("rewards", {}).get("models", {})
    if rewards := [_function_name(each["function"]) for each in functions.values()]:
        yield "reward functions", ", ".join(rewards)
    if models:
        yield "reward models", ", ".join(_shown_path(each["path"]) for each in models.values())


def _function_name(function: str) -> str:
    file, colon, name = function.partition(":")
    return f"{pathlib.PurePath(file).name}{colon}{name}"


def _shown_path(path: str) -> str:
    """A name or address whole; of a local path its last part."""
    address = parse_address(path)
    return address.text if isinstance(address, HubAddress) else pathlib.PurePath(path).name


def _data_files(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(repository or "", name to show) of each file that the run was trained with."""
    for path in config["data"].get("train_files", ()):
        address = parse_address(str(path))
        repo = address.repo if isinstance(address, HubAddress) else ""
        yield repo, address.text if repo else pathlib.PurePath(str(path)).name


def _data_section(config: Mapping[str, Any]) -> str:
    files = list(_data_files(config))
    if not files:
        return f"## Data\n\nThe built-in task `{config['data']['task']}`."
    lines = []
    for repo, name in files:
        link = f" ([{repo}](https://huggingface.co/datasets/{repo}))" if repo else ""
        lines.append(f"- `{name}`{link}")
    return "## Data\n\n" + "\n".join(lines)


def _evaluation_section(run: RecordedRun, step: int) -> str:
    """First values of held-out evaluations, and those at the step of the weights or last before."""
    rows = []
    for name in sorted(filter(_EVALUATION.fullmatch, run.columns)):
        steps, values = run.columns[name]
        known = [
            (at, value)
            for at, value in zip(steps, values, strict=False)
            if at <= step and math.isfinite(value)
        ]
        if known:
            (first_step, first), (last_step, last) = known[0], known[-1]
            rows.append((name, f"{first:.4g} ({first_step})", f"{last:.4g} ({last_step})"))
    if not rows:
        return ""
    return "## Evaluation\n\n" + _table(("metric", "first (step)", "last (step)"), rows)


def _table(head: Sequence[str], rows: Any) -> str:
    lines = [head, ["---"] * len(head), *rows]
    cells = ([str(cell).replace("|", "\\|").replace("\n", " ") for cell in line] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)
