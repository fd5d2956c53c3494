"""Datasets on the Hugging Face hub: their configs and splits, and commits pinned in a config."""

import difflib
import fnmatch
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import yaml
from huggingface_hub.repocard import metadata_load

from jaxrl_llm.config.datasets.slices import split_slice
from jaxrl_llm.data.errors import DataError
from jaxrl_llm.storage import hub
from jaxrl_llm.storage.address import HubAddress, parse_address

# A dataset by name, and which of its configs and splits: openai/gsm8k:main:train.
_SELECTION = re.compile(
    r"(?P<repo>(?:hf://(?:datasets/)?)?[^:/@\[\]]+/[^:/@\[\]]+(?:@[^:\[\]]+)?)"
    r"(?P<names>(?::[^:/\[\]*?]+){1,2})"
)


class HubData(NamedTuple):
    """Files of a dataset on the hub."""

    address: HubAddress
    names: tuple[str, ...] = ()  # (split,) or (config, split) instead of a path

    @property
    def text(self) -> str:
        """The address as a config has it."""
        return ":".join([self.address.text, *self.names])


def parse_data(text: str, is_file: bool) -> HubData | None:
    """The dataset on the hub that an address without its slice names; None if it is elsewhere.

    `org/name` is one unless there is such a local path, or `is_file`: it ends as files of rows do.

    Raises:
      AddressError: If the text is no address.
    """
    if match := _SELECTION.fullmatch(text):
        text = match["repo"]
    names = tuple(match["names"].strip(":").split(":")) if match else ()
    address = parse_address(text, None if is_file and not names else "dataset")
    if not isinstance(address, HubAddress):
        return None
    if address.repo_type != "dataset":
        raise DataError(f"{text}: is the address of a model; write hf://datasets/{address.repo}")
    return HubData(address, names)


def dataset_files(data: HubData, suffixes: Sequence[str]) -> list[str]:
    """Addresses of the files, with the commit, in order of their names.

    Args:
      suffixes: Ends of the names of files of rows, in lower case; others are passed over.

    Raises:
      HubError: If the dataset or its files cannot be found or read.
      DataError: If it has no such config or split; the message lists those that it has.
    """
    address = hub.resolve_commit(data.address)
    if any(character in address.path for character in "*?["):
        paths = [file.path for file in hub.matching_files(address)]
    else:
        paths = [file.path for file in hub.list_files(address)]
    paths = [path for path in paths if path.lower().endswith(tuple(suffixes))]
    if data.names or not address.path:
        paths = _split_paths(address, paths, data.names)
    if not paths:
        known = ", ".join(suffixes)
        raise DataError(f"{data.text}: no files with rows at this address; known: {known}")
    return [address._replace(path=path).text for path in paths]


def _split_paths(address: HubAddress, paths: Sequence[str], names: Sequence[str]) -> list[str]:
    """The paths of a split of a config, as the dataset's card has them, or by their names."""
    splits = _card_splits(address, paths) or _named_splits(paths)
    configs = dict.fromkeys(config for config, _ in splits)
    config = names[0] if len(names) == 2 else ""
    if config and config not in configs:
        raise _unknown_name(address, "config", config, configs)
    if not config and len(configs) > 1:
        example = f"{address.repo}:{next(iter(configs))}:{names[-1] if names else 'train'}"
        raise DataError(
            f"{address.name}: has the configs {', '.join(configs)}; name one, as {example}"
        )
    config = config or next(iter(configs), "")
    of_config = {split: found for (name, split), found in splits.items() if name == config}
    if not names and len(of_config) > 1:
        example = f"{address.repo}:{next(iter(of_config))}"
        raise DataError(
            f"{address.name}: has the splits {', '.join(of_config)}; name one, as {example}"
        )
    split = names[-1] if names else next(iter(of_config), "")
    if split not in of_config:
        raise _unknown_name(address, "split", split, of_config)
    return of_config[split]


def _unknown_name(address: HubAddress, kind: str, name: str, known: Iterable[str]) -> DataError:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    has = ", ".join(known) or "none"
    return DataError(f"{address.name}: no {kind} {name!r}; {hint}It has: {has}")


def _card_splits(address: HubAddress, paths: Sequence[str]) -> dict[tuple[str, str], list[str]]:
    """(config, split) -> paths by the `configs` of the card; empty if it has none."""
    card = address._replace(path="README.md")
    if not any(file.path == card.path for file in hub.list_files(address._replace(path=""))):
        return {}
    try:
        metadata = metadata_load(hub.download(address, [card.path]) / card.path) or {}
    except yaml.YAMLError as error:
        raise DataError(f"{card.name}: its head is no YAML: {error}; name files instead") from error
    splits = {}
    for config in metadata.get("configs") or ():
        name, folder = str(config.get("config_name", "default")), config.get("data_dir") or ""
        for split, patterns in _data_files(config.get("data_files")):
            patterns = [f"{folder}/{pattern}".strip("/") for pattern in patterns]
            splits[name, split] = [
                path
                for path in paths
                if any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)
            ]
    return splits


def _data_files(value: Any) -> Iterator[tuple[str, list[str]]]:
    """(split, patterns) of the forms in which a card may write `data_files`."""
    if isinstance(value, Mapping):
        value = [{"split": split, "path": path} for split, path in value.items()]
    entries = [value] if isinstance(value, str) else value or []
    loose = [entry for entry in entries if isinstance(entry, str)]
    if loose:
        yield "train", loose
    for entry in entries:
        if isinstance(entry, Mapping):
            path = entry.get("path", [])
            yield str(entry.get("split", "train")), [path] if isinstance(path, str) else path


_SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}


def _named_splits(paths: Sequence[str]) -> dict[tuple[str, str], list[str]]:
    """(config, split) -> paths by the words in them; the config is the folder of the files.

    >>> _named_splits(["main/train-0.parquet", "main/test-0.parquet", "data/dev.jsonl"])
    {('main', 'train'): ['main/train-0.parquet'], ('main', 'test'): ['main/test-0.parquet'], \
('default', 'validation'): ['data/dev.jsonl']}
    """
    splits: dict[tuple[str, str], list[str]] = {}
    for path in paths:
        words = re.split(r"[/._\- ]|(?<=[a-z])(?=\d)", path.lower())
        named = [split for split, names in _SPLITS.items() if {*names} & {*words}]
        folders = [part for part in path.split("/")[:-1] if part.lower() not in _no_configs()]
        config = "/".join(folders) or "default"
        splits.setdefault((config, named[0] if named else "train"), []).append(path)
    return splits


def _no_configs() -> set[str]:
    """Names of folders that are no configs."""
    return {"data", *(name for names in _SPLITS.values() for name in names)}


def pinned_entry(entry: str, is_file: bool, saved: Iterable[str] = ()) -> str:
    """An entry of `train_files` with the commit that its dataset has now, or had in a saved run.

    Entries that are not on the hub, and those with a commit, stay as they are.

    Raises:
      HubError: If the dataset cannot be found.
    """
    text, rows = split_slice(entry)
    data = parse_data(text, is_file)
    if data is None:
        return entry
    for other in saved:
        saved_text, saved_rows = split_slice(other)
        known = parse_data(saved_text, False) if saved_text.startswith("hf://") else None
        if known and saved_rows == rows and known.names == data.names:
            address = data.address._replace(commit="")
            if not data.address.commit and known.address._replace(commit="") == address:
                return other
    pinned = data._replace(address=hub.resolve_commit(data.address)).text
    return pinned if rows is None else f"{pinned}[{rows.start}:{rows.stop}]"
