"""`rollout.engine`: from a name in the config to a sampling engine that fits the run."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from jaxrl_llm.algorithms import lookup
from jaxrl_llm.config import ConfigError, RLConfig, RolloutConfig
from jaxrl_llm.config.rollout_data import BUILT_IN_ENGINE, VLLM_ENGINE
from jaxrl_llm.errors import UserError
from jaxrl_llm.rollout.engine.engine import Engine
from jaxrl_llm.rollout.engine_api import Capabilities, EngineArgs, EngineFactory, SamplingEngine
from jaxrl_llm.rollout.vllm_engine.engine import VllmEngine

_SETTING = "config.rollout.engine"
_MEMBERS = tuple(name for name in vars(SamplingEngine) if not name.startswith("_"))


class _BuiltIn:
    """The factory of the built-in engine."""

    capabilities = Capabilities(**{f.name: True for f in dataclasses.fields(Capabilities)})

    def __call__(self, args: EngineArgs, /) -> SamplingEngine:
        return Engine(**vars(args))


ENGINES: Mapping[str, EngineFactory] = {BUILT_IN_ENGINE: _BuiltIn(), VLLM_ENGINE: VllmEngine}


def factory(name: str) -> EngineFactory:
    """Returns the factory of an engine: a row of `ENGINES`, or a class or function by import path.

    Raises:
      ConfigError: If it cannot be imported or called, or declares no valid capabilities.
    """
    try:
        found: Callable[..., Any] = lookup.resolve(name, ENGINES, "engine")
    except Exception as error:  # whatever the user's module raises when it is imported
        raise ConfigError(f"{_SETTING}: {error}") from error
    declared = capabilities(found)
    if not isinstance(declared, Capabilities):
        raise ConfigError(
            f"{_SETTING}: {name!r} has capabilities of {type(declared).__name__}; make them a"
            " jaxrl_llm.rollout.engine_api.Capabilities"
        )
    return found


def capabilities(factory: EngineFactory) -> Capabilities:
    """Returns the capabilities that a factory declares, none by default."""
    return getattr(factory, "capabilities", Capabilities())


def build(rollout: RolloutConfig, args: EngineArgs) -> SamplingEngine:
    """Returns the engine that `rollout.engine` names.

    Raises:
      ConfigError: As `factory`; if building fails, or the engine lacks a member of the protocol.
    """
    name = rollout.engine
    make = factory(name)
    if name == VLLM_ENGINE:
        return VllmEngine(args, rollout.vllm)
    if name in ENGINES:
        return make(args)
    try:
        engine = make(args)
    except UserError:
        raise
    except Exception as error:  # whatever the user's code raises
        raise ConfigError(
            f"{_SETTING}: {name!r} could not be built from EngineArgs:"
            f" {type(error).__name__}: {error}"
        ) from error
    if missing := [member for member in _MEMBERS if not hasattr(engine, member)]:
        raise ConfigError(
            f"{_SETTING}: {name!r} built a {type(engine).__name__} without {', '.join(missing)};"
            " an engine has all members of jaxrl_llm.rollout.engine_api.SamplingEngine"
        )
    return engine


def check(config: RLConfig, *, reads_images: bool, num_processes: int) -> None:
    """Raises a ConfigError that lists the settings that need more than the engine can do.

    Args:
      reads_images: Whether prompts may have images.
      num_processes: Of the run.
    """
    name = config.rollout.engine
    declared = capabilities(factory(name))
    problems = [
        f"{setting} needs an engine with the capability {needed!r}, which {name!r} does not"
        f" declare; {remedy}, or set rollout.engine={BUILT_IN_ENGINE!r}"
        for needed, setting, remedy in _needs(config, reads_images, num_processes)
        if not getattr(declared, needed)
    ]
    if problems:
        raise ConfigError(problems)


def _needs(
    config: RLConfig, reads_images: bool, num_processes: int
) -> Iterator[tuple[str, str, str]]:
    """Yields (capability, the setting that needs it, how to do without)."""
    rollout, evaluation, model = config.rollout, config.evaluation, config.model

    def setting(path: str, value: Any) -> str:
        return f"config.{path}: {value!r}"

    if num_processes > 1:
        yield "multi_process", f"{_SETTING}: a run of {num_processes} processes", "run one process"
    for name, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)):
        if (value := getattr(rollout, name)) != off:
            yield "filtered_sampling", setting(f"rollout.{name}", value), f"set it to {off}"
    if support_tokens := rollout.support_tokens:
        where = setting("rollout.support_tokens", support_tokens)
        yield "sampling_support", where, "set it to 0"
    if evaluation.is_enabled and evaluation.top_p != 1.0:
        where = setting("evaluation.top_p", evaluation.top_p)
        yield "filtered_sampling", where, "set it to 1.0"
    if rollout.stop_strings:
        where = setting("rollout.stop_strings", rollout.stop_strings)
        yield "stop_strings", where, "use rollout.stop_tokens"
    if draft_tokens := rollout.speculation.draft_tokens:
        where = setting("rollout.speculation.draft_tokens", draft_tokens)
        yield "speculation", where, "set it to 0"
    if rollout.quantization != "none":
        where = setting("rollout.quantization", rollout.quantization)
        yield "low_precision", where, "set it to 'none'"
    if rollout.cache_dtype == "fp8":
        where = setting("rollout.cache_dtype", rollout.cache_dtype)
        yield "low_precision", where, "set it to 'rollout'"
    if config.router.needs_rollout_routes:
        where = setting("router.replay", config.router.replay)
        yield "router_replay", where, "set it to 'off'"
    if reads_images:
        source = setting("model.path", model.path) if model.path else ""
        where = source or setting("model.family", model.family)
        yield "images", f"{where} reads images and", "take a text-only model"
    if config.max_staleness > 0 and config.trainer.new_weights == "keep":
        where = setting("trainer.new_weights", "keep")
        yield "in_flight_updates", where, "set it to 'recompute'"
