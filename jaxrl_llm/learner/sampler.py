"""The sampling side of a policy: an engine, and how trained weights get to it."""

import contextlib
import ctypes
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import jax
from absl import logging
from jax.sharding import Mesh, NamedSharding

from jaxrl_llm.config import RLConfig, RolloutConfig
from jaxrl_llm.learner import models as models_lib
from jaxrl_llm.learner.models import Models
from jaxrl_llm.metrics.clock import Clock
from jaxrl_llm.models import attention, casting, lora, low_precision
from jaxrl_llm.models.transformer import Network, Params
from jaxrl_llm.rollout import cache, episodes, inputs
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.play import World
from jaxrl_llm.rollout.requests import SamplingParams, Statistics
from jaxrl_llm.sharding import pools
from jaxrl_llm.sharding.reshard import Resharder
from jaxrl_llm.types import PromptBatch, Rollouts, Weights


@dataclasses.dataclass(frozen=True)
class Sampler:
    """What turns a trained policy into samples; holds no weights but `base`."""

    models: Models
    engine: Engine
    resharder: Resharder  # from the training layout to the rollout layout
    base: Params  # what the policy's adapters are added to; empty without adapters
    world: World | None = None  # what answers the policy; None: nothing does
    max_turn_tokens: int = 0  # with a world; 0: those of the whole response
    ahead: bool = False  # samples of later steps are drawn while a step is learned from
    keeps_old: bool = False  # weights stay usable when newer ones come

    @property
    def is_apart(self) -> bool:
        """Whether no device samples and learns."""
        meshes = self.models.meshes
        learners = pools.devices([meshes["policy"], meshes["critic"]])
        return set(learners).isdisjoint(meshes["rollout"].devices.flat)

    @property
    def _copies(self) -> bool:
        """Whether weights are copied to devices of rollout's own after they were resharded."""
        return self.resharder.mesh != self.models.meshes["rollout"]

    @property
    def rests(self) -> bool:
        """Whether nothing samples while a step is learned from, on devices that learn."""
        return not self.ahead and not self._copies

    def rollout(
        self,
        weights: Weights,
        prompts: PromptBatch,
        samples: Sequence[SamplingParams],
        key: jax.Array,
        ended: Callable[[Rollouts, int], None] | None = None,
    ) -> tuple[Rollouts, Statistics]:
        """Returns episodes of every prompt, as `episodes.rollout`."""
        tokenizer, turn, gallery = self.models.tokenizer, self.max_turn_tokens, self.models.gallery
        if gallery is not None:  # all at once: few calls of the tower
            gallery.vectors(image for prompt in prompts.prompts for image in prompt.images)
        see = None if gallery is None else gallery.sights
        return episodes.rollout(
            self.engine, weights, tokenizer, prompts, samples, key, self.world, turn, ended, see
        )

    def abstract(self) -> Params:
        """Returns shapes and shardings of `weights`."""
        target = self.models.meshes["rollout"]
        there = lambda a: jax.ShapeDtypeStruct(  # noqa: E731
            a.shape, a.dtype, sharding=NamedSharding(target, a.sharding.spec)
        )
        found = self.resharder.abstract()
        return jax.tree.map(there, found) if self._copies else found

    def weights(self, params: Params, old: Params | None = None) -> Params:
        """Returns policy weights in the rollout layout; `old` is of no use afterwards.

        They take the memory of `old`, if it is given and nothing else may still read it. Adapters
        are merged into the base. To devices that only sample the weights are copied from the same
        layout on the policy's devices, which is freed afterwards.
        """
        target = self.models.meshes["rollout"]
        first = old is None
        new = self._copies or self.keeps_old or self.rests
        memory = self.resharder.empty() if old is None or new else old
        if self.base:
            params = lora.joined(self.base, params)
        if "vision" in params:  # it reads images beside the engine
            assert self.models.gallery is not None
            self.models.gallery.renew(params["vision"])
            params = {name: value for name, value in params.items() if name != "vision"}
        moved = self.resharder.reshard(memory, params)
        if first and self.resharder.mesh.size > 1:
            logging.info("weights for sampling: %s", self.resharder.report())
        if not self._copies:
            return moved
        there = jax.tree.map(lambda a: NamedSharding(target, a.sharding.spec), moved)
        return pools.move(moved, there)

    def reshard(self, params: Params, old: Weights, version: int, clock: Clock) -> Weights:
        """Returns new weights for sampling, in the memory of the old ones; times `reshard`."""
        with clock("reshard") as watch:
            return Weights(watch(self.weights(params, old.params)), version)

    def release(self, weights: Weights) -> None:
        """Frees weights that have sampled a step, until the step's own come, if nothing samples."""
        if not self.rests:
            return
        leaves = jax.tree.leaves(weights.params)
        freed = sum(leaf.nbytes for leaf in leaves)
        for leaf in leaves:
            leaf.delete()
        if self.resharder.mesh.devices.flat[0].platform == "cpu" and freed >= _WORTH_GIVING_BACK:
            _give_back()

    def metrics(self) -> dict[str, float]:
        """Returns what resharding moves and needs, by the names of metrics."""
        found = self.resharder.report().metrics()
        if self._copies:  # each device's part of the rollout layout is copied
            found["reshard/copied_bytes"] = float(self._copied_bytes)
        return found

    @functools.cached_property
    def _copied_bytes(self) -> int:
        """Bytes of weights that each device of rollout's own pool gets from another pool."""
        shape = lambda a: a.sharding.shard_shape(a.shape)  # noqa: E731
        leaves = jax.tree.leaves(self.resharder.abstract())
        return sum(math.prod(shape(a)) * a.dtype.itemsize for a in leaves)


_WORTH_GIVING_BACK = 1 << 26  # bytes: of less the system would hardly see anything


def _give_back() -> None:
    """Gives the system the memory that the process has freed: on CPUs arrays lie in it too.

    The allocator keeps what steps and compilers freed in pieces that an update's large arrays do
    not fit into: without this SmolLM2's peak is a quarter higher, and grows for some steps.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)


def build(
    config: RLConfig,
    models: Models,
    base: Params,
    world: World | None = None,
    longest_prompt: int = 0,
) -> Sampler:
    """Returns the sampler of a run. Compiles and allocates nothing; arguments as in `Sampler`.

    Prompts of up to `longest_prompt` tokens, if that is given, are read in few shapes.
    """
    mesh, target = models.mesh, models.meshes["rollout"]
    layout = config.mesh.rollout if pools.fits(mesh, target) else "replicas"
    policy, tokenizer = models.policy.decoder, models.tokenizer
    suppressed = models_lib.suppressed_tokens(config, models.unused_tokens)
    policy = dataclasses.replace(policy, suppressed_tokens=suppressed)
    network = rollout_network(config.rollout, policy, target)
    speculation = config.rollout.speculation
    sizes = config.sampled_lengths, config.sequences_per_step, speculation.draft_tokens
    num_slots, fitting = cache.fitting(network, target, *sizes, config.rollout.num_slots)
    prompts, most = config.trainer.prompts_per_step, config.max_sequence_tokens
    shapes = inputs.few_shapes(prompts, longest_prompt, most) if longest_prompt else ()
    if shapes and config.max_staleness > 0 and config.trainer.new_weights == "recompute":
        shapes += inputs.few_shapes(prompts, most, most)[-1:]  # for prompts with begun responses
    return Sampler(
        models=models,
        engine=Engine(
            network,
            target,
            num_slots=num_slots,
            max_tokens=config.max_sequence_tokens,
            chunk_steps=config.rollout.chunk_steps,
            speculation=speculation,
            layout=layout,
            keeps_routes=config.router.replay in ("compare", "rollout"),
            cache_tokens=config.rollout.cache_tokens or fitting,
            decode=lambda tokens: str(tokenizer.decode(list(tokens), skip_special_tokens=True)),
            prompt_shapes=shapes,
        ),
        resharder=resharder(policy, network, pools.staging(mesh, target), layout),
        base=base,
        world=world,
        max_turn_tokens=config.agent.max_turn_tokens,
        ahead=config.trainer.sampling == "async",
        keeps_old=config.max_staleness > 0 and config.trainer.new_weights == "drain",
    )


def resharder(policy: Network, rollout: Network, mesh: Mesh, layout: str) -> Resharder:
    """Returns what turns weights of the policy, adapters too, into weights that decode."""
    stacks, merge = policy.shape.stacks, models_lib.merge_adapters(policy.lora)
    return Resharder(
        policy.abstract(),
        policy.logical_axes(),
        policy.units,
        mesh,
        functools.partial(casting.dtypes, dtype=rollout.compute_dtype),
        layout,
        {name: stack.numbers for name, stack in stacks.items()},
        lambda name, layer: rollout.stored(merge(layer), stacks[name].layer),
        rollout.logical_axes(),
    )


def rollout_network(config: RolloutConfig, policy: Network, mesh: Mesh) -> Network:
    """Returns the policy as the engine runs it: same arithmetic, its own dtype and kernels."""
    dtype, kernel = policy.compute_dtype, policy.kernel
    if config.dtype not in ("compute", dtype):
        dtype, platform = config.dtype, mesh.devices.flat[0].platform
        kernel = attention.implementation_for("auto", platform, dtype, policy.shape.head_size)
    kept = "" if config.cache_dtype == "rollout" else config.cache_dtype
    network = dataclasses.replace(
        policy,
        compute_dtype=dtype,
        kernel=kernel,
        cache_dtype=low_precision.CACHE_DTYPES.get(kept, kept),
    ).for_decoding(mesh)
    products = dataclasses.replace(network.products, quantization=config.quantization)
    return dataclasses.replace(network, products=products)
