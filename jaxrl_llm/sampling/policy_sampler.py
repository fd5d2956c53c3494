"""The policy sampler: an engine, and the weight transfer from the learner to it."""

import contextlib
import ctypes
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence

import jax
from absl import logging
from jax.sharding import Mesh, NamedSharding

from jaxrl_llm.agents.episode import call_format
from jaxrl_llm.config import ConfigError, RLConfig, RolloutConfig
from jaxrl_llm.config.rollout_data import BUILT_IN_ENGINE, VLLM_ENGINE
from jaxrl_llm.learner import job_models
from jaxrl_llm.learner.job_models import Models
from jaxrl_llm.metrics.timers import Clock
from jaxrl_llm.models import attention, lora, mixed_precision, quantization
from jaxrl_llm.models.hf import vision_config
from jaxrl_llm.models.transformer import Network, Params
from jaxrl_llm.rollout import engines, episodes, structured_outputs
from jaxrl_llm.rollout.engine import host_inputs, kv_cache
from jaxrl_llm.rollout.engine.grammars import Grammar, GrammarError
from jaxrl_llm.rollout.engine.requests import EngineStatistics, SamplingParams
from jaxrl_llm.rollout.engine_api import ClosableEngine, EngineArgs, SamplingEngine
from jaxrl_llm.rollout.episode_runner import EpisodeEnvironment
from jaxrl_llm.rollout.session_host import SessionHost
from jaxrl_llm.rollout.session_runner import session_rollouts
from jaxrl_llm.sampling.reply_grammars import StrictToolGrammars
from jaxrl_llm.sharding import device_pools
from jaxrl_llm.sharding.reshard import Resharder
from jaxrl_llm.types import Prompt, PromptBatch, Rollouts, Weights


@dataclasses.dataclass(frozen=True)
class PolicySampler:
    """Samples from a trained policy; holds no weights but `base`."""

    models: Models
    engine: SamplingEngine
    engine_args: EngineArgs  # to build engines of other sizes
    resharder: Resharder  # from the training layout to the rollout layout
    base: Params  # frozen weights under the adapters; empty without adapters
    # Environments and tools, or black-box agents; None: single-turn.
    world: EpisodeEnvironment | SessionHost | None = None
    max_turn_tokens: int = 0  # in episodes; 0: the limit of the whole response
    is_async: bool = False  # asynchronous: samples of later steps are drawn during training
    grammar: Grammar | None = None  # of every response; None: any text
    strict_tools: StrictToolGrammars | None = None  # of the turns of episodes; None: any text
    retains_old_weights: bool = False  # old weights stay usable after an update

    @property
    def has_own_devices(self) -> bool:
        """Whether sampling and training run on disjoint devices."""
        meshes = self.models.meshes
        learners = device_pools.all_devices([meshes["policy"], meshes["critic"]])
        return set(learners).isdisjoint(meshes["rollout"].devices.flat)

    @property
    def _copies_weights(self) -> bool:
        """Whether resharded weights are then copied to separate rollout devices."""
        return self.resharder.mesh != self.models.meshes["rollout"]

    @property
    def pauses_in_training(self) -> bool:
        """Whether sampling pauses during training on the same devices."""
        return not self.is_async and not self._copies_weights

    def rollout(
        self,
        weights: Weights,
        prompts: PromptBatch,
        samples: Sequence[SamplingParams],
        key: jax.Array,
        ended: Callable[[Rollouts, int], None] | None = None,
    ) -> tuple[Rollouts, EngineStatistics]:
        """Samples episodes of every prompt; see `episodes.rollout`."""
        tokenizer, turn, gallery = (
            self.models.tokenizer,
            self.max_turn_tokens,
            self.models.image_feature_cache,
        )
        if gallery is not None:  # batched: few calls of the vision encoder
            gallery.features(image for prompt in prompts.prompts for image in prompt.images)
        see = None if gallery is None else gallery.image_inputs
        if isinstance(self.world, SessionHost):
            return session_rollouts(
                self.engine, weights, tokenizer, prompts, samples, key, self.world, turn
            )

        def constrain(episode: int, tokens: Sequence[int]) -> Grammar | None:
            if self.strict_tools is None:
                return self.grammar
            return self.strict_tools.grammar(prompts.prompts[episode // len(samples)], tokens)

        return episodes.rollout(
            self.engine,
            weights,
            tokenizer,
            prompts,
            samples,
            key,
            self.world,
            turn,
            ended,
            see,
            constrain,
        )

    def abstract(self) -> Params:
        """Shapes and shardings of `weights`."""
        target = self.models.meshes["rollout"]
        on_target = lambda a: jax.ShapeDtypeStruct(  # noqa: E731
            a.shape, a.dtype, sharding=NamedSharding(target, a.sharding.spec)
        )
        abstract = self.resharder.abstract()
        return jax.tree.map(on_target, abstract) if self._copies_weights else abstract

    def weights(self, params: Params, old: Params | None = None) -> Params:
        """Reshards policy weights into the rollout layout; invalidates `old`.

        The memory of `old` is reused if nothing else may still read it. Adapters are merged into
        the base, unless it is quantized. For separate rollout devices the weights are first
        resharded on the policy's devices, then copied.
        """
        target = self.models.meshes["rollout"]
        first = old is None
        needs_new_memory = (
            self._copies_weights or self.retains_old_weights or self.pauses_in_training
        )
        memory = self.resharder.zeros() if old is None or needs_new_memory else old
        if self.base:
            params = lora.combine_params(self.base, params)
        if "vision" in params:  # the vision encoder runs outside the engine
            assert self.models.image_feature_cache is not None
            self.models.image_feature_cache.update_params(params["vision"])
            params = {name: value for name, value in params.items() if name != "vision"}
        resharded = self.resharder.reshard(memory, params)
        if first and self.resharder.mesh.size > 1:
            logging.info("weights for sampling: %s", self.resharder.report())
        if not self._copies_weights:
            return resharded
        shardings = jax.tree.map(lambda a: NamedSharding(target, a.sharding.spec), resharded)
        return device_pools.move_to_pool(resharded, shardings)

    def reshard(self, params: Params, old: Weights, version: int, clock: Clock) -> Weights:
        """Reshards new weights for sampling, reusing the old memory; timed as `reshard`."""
        with clock("reshard") as watch:
            return Weights(watch(self.weights(params, old.params)), version)

    def release(self, weights: Weights) -> None:
        """Frees the rollout weights during training, if sampling pauses then."""
        if not self.pauses_in_training:
            return
        leaves = jax.tree.leaves(weights.params)
        freed = sum(leaf.nbytes for leaf in leaves)
        for leaf in leaves:
            leaf.delete()
        if self.resharder.mesh.devices.flat[0].platform == "cpu" and freed >= _MIN_TRIM_BYTES:
            _trim_memory()

    def close(self) -> None:
        """Ends the process or connection that the engine may hold."""
        if isinstance(self.engine, ClosableEngine):
            self.engine.close()

    def metrics(self) -> dict[str, float]:
        """Metrics of resharding: bytes moved and temporary memory."""
        metrics = self.resharder.report().metrics()
        if self._copies_weights:  # each device's part of the rollout layout is copied
            metrics["reshard/copied_bytes"] = float(self._copied_bytes)
        return metrics

    @functools.cached_property
    def _copied_bytes(self) -> int:
        """Bytes copied to each device of a separate rollout pool."""
        shape = lambda a: a.sharding.shard_shape(a.shape)  # noqa: E731
        leaves = jax.tree.leaves(self.resharder.abstract())
        return sum(math.prod(shape(a)) * a.dtype.itemsize for a in leaves)


_MIN_TRIM_BYTES = 1 << 26  # freeing less is not worth a call of malloc_trim


def _trim_memory() -> None:
    """Returns freed heap memory to the operating system (CPU backend only).

    glibc keeps freed memory in fragments too small for the large arrays of an update: without this
    SmolLM2's peak is a quarter higher, and grows for some steps.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)


def check(config: RLConfig, models: Models) -> None:
    """Raises a ConfigError if `rollout.engine` cannot sample for this run; loads no weights."""
    # vLLM samples texts by models of text and images; `feature_cache.check_image_support` refuses
    # the images themselves.
    family = models.policy.shape.family
    samples_text_alone = config.rollout.engine == VLLM_ENGINE and vision_config.is_text_model_too(
        family
    )
    engines.check(
        config,
        reads_images=models.image_feature_cache is not None and not samples_text_alone,
        num_processes=jax.process_count(),
    )
    size, vocab_size = config.rollout.support_tokens, models.policy.shape.vocab_size
    if size > vocab_size:
        raise ConfigError(
            f"config.rollout.support_tokens: {size}, but the model has {vocab_size} tokens; use"
            " less, or 0"
        )
    response_grammar(config, models)
    if config.rollout.engine != BUILT_IN_ENGINE:
        make_sampler(config, models, {})


def response_grammar(config: RLConfig, models: Models) -> Grammar | None:
    """The compiled `rollout.schema`; a ConfigError if the model cannot follow it."""
    if not config.rollout.schema:
        return None
    source = structured_outputs.source_of(
        structured_outputs.json_part(config.rollout.json_schema), "config.rollout.schema"
    )
    try:
        compiler = _grammar_compiler(models.tokenizer, models.policy.shape.vocab_size)
        return compiler.compile(source)
    except GrammarError as error:
        raise ConfigError(str(error)) from error


def strict_tool_grammars(config: RLConfig, models: Models) -> StrictToolGrammars | None:
    """The grammars of `agent.strict_tools`, none compiled yet; None: it is off."""
    if not config.agent.strict_tools:
        return None
    tokenizer = models.tokenizer
    compiler = _grammar_compiler(tokenizer, models.policy.shape.vocab_size)
    return StrictToolGrammars(
        compiler, tokenizer, call_format(config.agent, tokenizer), models.eos_tokens
    )


def check_strict_tools(config: RLConfig, models: Models, prompts: Iterable[Prompt]) -> None:
    """Raises a ConfigError if calls of a prompt's tools cannot be constrained."""
    if (grammars := strict_tool_grammars(config, models)) is None:
        return
    try:
        for prompt in prompts:
            grammars.grammar(prompt)
    except GrammarError as error:
        raise ConfigError(str(error)) from error


# A run checks its grammars before it makes its sampler: both share the compiled ones.
_grammar_compiler = functools.lru_cache(maxsize=1)(structured_outputs.GrammarCompiler)


def make_sampler(
    config: RLConfig,
    models: Models,
    base: Params,
    world: EpisodeEnvironment | SessionHost | None = None,
    longest_prompt: int = 0,
) -> PolicySampler:
    """Builds the sampler of a run without compiling or allocating; arguments as in `PolicySampler`.

    With `longest_prompt` (tokens) prompts are prefilled in few shapes.

    Raises:
      ConfigError: If the engine of `rollout.engine` cannot be built.
    """
    mesh, target = models.mesh, models.meshes["rollout"]
    layout = config.mesh.rollout if device_pools.supports_staging(mesh, target) else "replicas"
    policy, tokenizer = models.policy.decoder, models.tokenizer
    suppressed = job_models.suppressed_tokens(config, models.unused_tokens)
    policy = dataclasses.replace(policy, suppressed_tokens=suppressed)
    network = rollout_network(config.rollout, policy, target)
    speculation = config.rollout.speculation
    window_cache = config.rollout.keeps_windows_only(config.agent)
    sizes = config.sampled_lengths, config.sequences_per_step, speculation.draft_tokens
    num_slots, fitting = kv_cache.fitting_cache_size(
        network,
        target,
        *sizes,
        config.rollout.num_slots,
        window_cache=window_cache,
    )
    prompts, most = config.trainer.prompts_per_step, config.max_sequence_tokens
    shapes = host_inputs.prefill_shapes(prompts, longest_prompt, most) if longest_prompt else ()
    if shapes and config.max_staleness > 0 and config.trainer.new_weights == "recompute":
        # for prompts with begun responses
        shapes += host_inputs.prefill_shapes(prompts, most, most)[-1:]
    args = EngineArgs(
        network,
        target,
        num_slots=num_slots,
        max_tokens=config.max_sequence_tokens,
        chunk_steps=config.rollout.chunk_steps,
        speculation=speculation,
        layout=layout,
        keeps_routes=config.router.needs_rollout_routes,
        cache_tokens=config.rollout.cache_tokens or fitting,
        decode=lambda tokens: str(tokenizer.decode(list(tokens), skip_special_tokens=True)),
        prompt_shapes=shapes,
        prefix_caching=config.rollout.prefix_caching,
        window_cache=window_cache,
    )
    return PolicySampler(
        models=models,
        engine=engines.build(config.rollout, args),
        engine_args=args,
        resharder=resharder(policy, network, device_pools.staging_mesh(mesh, target), layout),
        base=base,
        world=world,
        max_turn_tokens=config.agent.max_turn_tokens,
        is_async=config.trainer.sampling == "async",
        grammar=response_grammar(config, models),
        strict_tools=strict_tool_grammars(config, models),
        retains_old_weights=config.max_staleness > 0 and config.trainer.new_weights == "drain",
    )


def resharder(policy: Network, rollout: Network, mesh: Mesh, layout: str) -> Resharder:
    """The resharder from policy weights (with adapters) to rollout weights.

    Adapters are merged into plain kernels. Quantized kernels stay as they are, with the adapters
    beside them: merged, they would have to be rounded again.
    """
    stacks, merge = policy.shape.layer_stacks, job_models.adapter_merger(policy.lora)

    def convert(name: str, layer: Params) -> Params:
        return rollout.to_stored_layout(merge(layer), stacks[name].layer)

    abstract, axes, rollout_axes = (
        policy.abstract_params(),
        policy.logical_axes(),
        rollout.logical_axes(),
    )
    if policy.matmuls.quantization != "none":
        convert = lambda name, layer: layer  # noqa: E731
        abstract = lora.combine_params(abstract, policy.abstract_adapters())
        axes = lora.combine_params(axes, policy.adapter_axes())
        rollout_axes = lora.combine_params(rollout_axes, rollout.adapter_axes())
    return Resharder(
        abstract,
        axes,
        policy.sharding_units,
        mesh,
        functools.partial(mixed_precision.cast_dtypes, dtype=rollout.compute_dtype),
        layout,
        {name: stack.layer_indices for name, stack in stacks.items()},
        convert,
        rollout_axes,
    )


def rollout_network(config: RolloutConfig, policy: Network, mesh: Mesh) -> Network:
    """The policy network as the engine runs it: same arithmetic, its own dtype and kernels.

    A quantized base is sampled as it is trained.
    """
    dtype, kernel = policy.compute_dtype, policy.kernel
    if config.dtype not in ("compute", dtype):
        dtype, platform = config.dtype, mesh.devices.flat[0].platform
        kernel = attention.implementation_for("auto", platform, dtype, policy.shape.head_size)
    cache_dtype = "" if config.cache_dtype == "rollout" else config.cache_dtype
    network = dataclasses.replace(
        policy,
        compute_dtype=dtype,
        kernel=kernel,
        cache_dtype=quantization.CACHE_DTYPES.get(cache_dtype, cache_dtype),
    ).for_decoding(mesh)
    format = policy.matmuls.quantization
    if format == "none":
        format = config.quantization
    products = dataclasses.replace(network.matmuls, quantization=format)
    if policy.matmuls.quantization != "none":
        products = dataclasses.replace(products, min_transposed=0)
    return dataclasses.replace(network, matmuls=products)
