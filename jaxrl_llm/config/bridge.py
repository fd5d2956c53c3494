"""Conversion between config dicts and the typed config of a job."""

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from ml_collections import config_dict as ml_config

from jaxrl_llm.config.algorithm import AlgorithmConfig
from jaxrl_llm.config.job import DPOConfig, JobConfig, RewardModelingConfig, RLConfig, SFTConfig
from jaxrl_llm.config.recipes import RECIPES
from jaxrl_llm.config.validation import ConfigGroup
from jaxrl_llm.errors import ConfigError

# The jobs, by the value of `config.job`.
JOBS: Mapping[str, type[JobConfig]]
JOBS = {"rl": RLConfig, "sft": SFTConfig, "dpo": DPOConfig, "reward_model": RewardModelingConfig}


def default_config_dict(job: str = "rl") -> ml_config.ConfigDict:
    """All keys of a job's config with their defaults, for a config file to change.

    Fields of `algorithm` are unset placeholders, because a recipe may set them. Groups of named
    entries (`rewards.functions`) are empty and take entries as dicts or ConfigDicts.
    """
    return _defaults(JOBS[job]())


def _defaults(group: Any) -> ml_config.ConfigDict:
    hints = typing.get_type_hints(type(group))
    # Not type safe: wrong types are reported together by `from_config_dict`.
    values = ml_config.ConfigDict(type_safe=False)
    for name, value in vars(group).items():
        if dataclasses.is_dataclass(value):
            values[name] = _defaults(value)
        elif isinstance(value, Mapping):
            values[name] = ml_config.ConfigDict()
        elif isinstance(group, AlgorithmConfig):
            # The type of the allowed values.
            origin, args = typing.get_origin(hints[name]), typing.get_args(hints[name])
            kind = type(args[0]) if origin is Literal else origin or hints[name]
            values[name] = ml_config.placeholder(kind)
        else:
            values[name] = value
    return values


def from_config_dict(values: Mapping[str, Any] | ml_config.ConfigDict) -> JobConfig:
    """Builds the typed, validated config of the job named in `values`; the default is RL.

    A field that is missing or None takes the value of the recipe `algorithm.recipe`, then the
    default of its dataclass. ConfigError lists every problem: unknown fields, wrong types, values
    outside their range, and fields that contradict each other (checked once all groups are built).
    The default of `algorithm.correction` is "token" where samples may be stale, or are of rounded
    weights.
    """
    errors: list[str] = []
    job = values.get("job") or "rl"
    if not isinstance(job, str) or job not in JOBS:
        raise ConfigError(f"config.job: unknown job {job!r}; known: {', '.join(JOBS)}")
    config = _build(JOBS[job](), values, "config", errors)
    if errors:
        raise ConfigError(errors)
    return config.with_value_defaults(values)


_INVALID: Any = object()
# Values renamed since earlier versions: old to new.
_RENAMED_VALUES: Mapping[str, Mapping[str, str]] = {
    "config.trainer.sampling": {"now": "sync", "ahead": "async"},
    "config.trainer.new_weights": {"finish": "drain", "read_again": "recompute"},
}
# Fields of earlier versions: old to new.
_RENAMED_FIELDS: Mapping[str, str] = {
    f"config.algorithm.{old}": f"config.algorithm.loss_args.{new}"
    for old, new in {
        "dual_clip": "dual_clip",
        "sapo_tau_pos": "tau_pos",
        "sapo_tau_neg": "tau_neg",
        "dro_beta": "beta",
        "clip_cov_share": "share",
        "clip_cov_low": "low",
        "clip_cov_high": "high",
        "kl_cov_share": "share",
        "kl_cov_coef": "coef",
    }.items()
}


def _build(default: Any, values: Any, path: str, errors: list[str]) -> Any:
    """Builds a group from `values` over `default`; `_INVALID` after appending to `errors`."""
    cls: Any = type(default)
    if not isinstance(values, (Mapping, ml_config.ConfigDict)):
        errors.append(f"{path}: expected a group of {cls.__name__} fields, got {values!r}")
        return _INVALID
    hints = typing.get_type_hints(cls)
    errors.extend(unknown_field(name, hints, path) for name in values if name not in hints)
    settings = {name: value for name, value in values.items() if value is not None}
    if cls is AlgorithmConfig:
        settings = _over_recipe(default, settings)
    fields = vars(default).copy()
    for name, expected in hints.items():
        where = f"{path}.{name}"
        if dataclasses.is_dataclass(expected):
            # Built even if unset, because a recipe may set its values.
            fields[name] = _build(fields[name], settings.get(name, {}), where, errors)
        elif name in settings:
            fields[name] = _convert(expected, settings[name], where, errors)
    if any(value is _INVALID for value in fields.values()):
        return _INVALID
    built = cls(**fields)
    errors.extend(f"{path}.{name}: {message}" for name, message in built.problems())
    return built


def _over_recipe(default: AlgorithmConfig, settings: Mapping[str, Any]) -> dict[str, Any]:
    """The row of the chosen recipe, overridden by `settings`.

    Loss arguments are overridden one by one; those of the row are left out if the settings choose
    another loss.
    """
    recipe = settings.get("recipe", default.recipe)
    row = RECIPES.get(recipe, {}) if isinstance(recipe, str) else {}
    loss, loss_args = row.get("policy_loss", default.policy_loss), settings.get("loss_args", {})
    merged = {**row, **settings}
    if isinstance(loss_args, (Mapping, ml_config.ConfigDict)):
        inherited = row.get("loss_args", {}) if merged.get("policy_loss", loss) == loss else {}
        chosen = {name: value for name, value in loss_args.items() if value is not None}
        merged["loss_args"] = {**inherited, **chosen}
    return merged


def _convert(expected: Any, value: Any, path: str, errors: list[str]) -> Any:
    """Converts `value` to the annotated type; `_INVALID` after appending to `errors`."""
    origin, args = typing.get_origin(expected), typing.get_args(expected)
    if isinstance(expected, type) and issubclass(expected, ConfigGroup):
        return _build(expected(), value, path, errors)
    if origin is Mapping and isinstance(value, (Mapping, ml_config.ConfigDict)):
        entries = {name: entry for name, entry in value.items() if entry is not None}
        converted = {n: _convert(args[1], v, f"{path}.{n}", errors) for n, v in entries.items()}
        valid = all(entry is not _INVALID for entry in converted.values())
        return types.MappingProxyType(converted) if valid else _INVALID
    if origin is tuple and isinstance(value, (tuple, list)):
        items = [_convert(args[0], v, f"{path}[{i}]", errors) for i, v in enumerate(value)]
        return _INVALID if any(item is _INVALID for item in items) else tuple(items)
    if origin is Literal:
        if any(value == choice and type(value) is type(choice) for choice in args):
            return value
        choices = ", ".join(map(repr, args))
        renamed = _RENAMED_VALUES.get(path, {}).get(str(value))
        hint = f"; it is called {renamed!r}" if renamed else suggestion(value, args)
        errors.append(f"{path}: expected one of {choices}, got {value!r}{hint}")
        return _INVALID
    if expected is float:
        if type(value) in (int, float):
            try:
                return float(value)
            except OverflowError:  # an integer beyond 1.8e308, which no range holds
                return math.inf if value > 0 else -math.inf
        if value in ("inf", "-inf"):  # how `to_dict` writes them; JSON has no infinity
            return float(value)
    elif type(value) is expected:
        return value
    errors.append(f"{path}: expected {type_description(expected)}, got {value!r}")
    return _INVALID


def unknown_field(name: str, known: Mapping[str, Any] | Sequence[str], path: str) -> str:
    """Error message for a field that a group does not have, with its present or nearest name."""
    if renamed := _RENAMED_FIELDS.get(f"{path}.{name}"):
        return f"{path}.{name}: unknown field; it is called {renamed!r}"
    hint = suggestion(name, list(known)) or f"; known: {', '.join(known)}"
    return f"{path}.{name}: unknown field{hint}"


def suggestion(value: Any, known: Sequence[Any]) -> str:
    """Remedy for an unknown name: the most similar one, or "" if none is."""
    guess = difflib.get_close_matches(str(value), [str(choice) for choice in known], n=1)
    return f"; did you mean {guess[0]!r}?" if guess else ""


def type_description(expected: Any) -> str:
    origin, args = typing.get_origin(expected), typing.get_args(expected)
    if origin is tuple:
        return f"a tuple of {args[0].__name__}"
    if origin is Mapping:
        is_group, kind = dataclasses.is_dataclass(args[1]), args[1].__name__
        return f"named groups of {kind} fields" if is_group else f"names with {kind} values"
    return str(expected.__name__)


def to_dict(value: Any) -> Any:
    """Converts a config to nested dicts for JSON: tuples become lists, infinities "inf", "-inf"."""
    if dataclasses.is_dataclass(value):
        value = vars(value)
    if isinstance(value, Mapping):
        return {name: to_dict(entry) for name, entry in value.items()}
    if isinstance(value, tuple):
        return [to_dict(item) for item in value]
    if isinstance(value, float) and math.isinf(value):
        return str(value)
    return value
