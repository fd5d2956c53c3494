"""What the models predict for sampled tokens: log-probs, values, scores of whole sequences."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxrl_llm.algorithms import needs
from jaxrl_llm.config import RLConfig
from jaxrl_llm.data import packing
from jaxrl_llm.data.packing import Microbatch, PackedBatch
from jaxrl_llm.learner import eyes, wide
from jaxrl_llm.learner import routing as routing_lib
from jaxrl_llm.learner.eyes import Eyes
from jaxrl_llm.learner.models import Models
from jaxrl_llm.learner.weights import Frozen, LearnerState, Scalar
from jaxrl_llm.metrics.clock import Clock
from jaxrl_llm.models import heads, lora, pipeline
from jaxrl_llm.models.likeliest import likeliest_tokens
from jaxrl_llm.models.places import Chosen, Everywhere, Places
from jaxrl_llm.models.reading import Reading
from jaxrl_llm.models.router import Routed, Routing
from jaxrl_llm.models.sights import Sights
from jaxrl_llm.models.transformer import Network, Params
from jaxrl_llm.sharding import mesh as mesh_lib
from jaxrl_llm.sharding import pools, telling
from jaxrl_llm.types import Predictions, Rollouts

Programs = tuple[Any, Any]  # as `scoring_programs` returns them


@dataclasses.dataclass(frozen=True)
class Reader:
    """How a network reads the sequences of a step."""

    network: Network
    tokens: Int[Array, "B T"]
    # What routers are told of a microbatch; None: nothing is given, all its tokens count.
    told: Callable[[Microbatch], Routing | None] = lambda microbatch: None
    eyes: Eyes | None = None  # read the images of batches; None: their vectors are known

    @property
    def stages(self) -> int:
        """The network's stages."""
        return self.network.shape.stages

    def passed(self, params: Params, packed: PackedBatch) -> PackedBatch:
        """Returns a batch whose images are seen, and microbatches have passed several stages."""
        if self.eyes is not None:
            packed = self.eyes.seen(params, packed)
        if self.stages == 1:
            return packed
        turned = packed.on_stages(self.stages)
        found = self.made(params, turned, packed.count)
        microbatches = dataclasses.replace(turned.microbatches, passed=found)
        return dataclasses.replace(turned, microbatches=microbatches)

    def made(self, params: Params, turned: PackedBatch, count: Int[Array, ""]) -> pipeline.Passed:
        """Returns what stages make of microbatches in turns, of which `count` hold tokens."""

        def one(microbatch: Microbatch):
            reading = _reading(microbatch, self.told(microbatch))
            return microbatch.packed(self.tokens), reading

        tokens, reading = jax.vmap(mesh_lib.on_stages(one))(turned.microbatches)
        return pipeline.passed(self.network, params, tokens, reading, count, turned.vectors)


def _reading(microbatch: Microbatch, routing: Routing | None) -> Reading:
    sights = None
    if microbatch.parts.shape[-1]:
        sights = Sights(microbatch.parts, microbatch.seen[..., 0], microbatch.vectors)
    return Reading(
        microbatch.positions,
        microbatch.segment_ids,
        microbatch.prefix_ids,
        microbatch.key_blocks,
        routing or Routing(microbatch.segment_ids != 0),
        sights,
    )


def _read(
    network: Network,
    params: Params,
    tokens: Array,
    microbatch: Microbatch,
    routing: Routing | None = None,
):
    """Returns packed tokens, hidden states [R, W, D], the weight of the head, routers' doings."""
    packed, reading = microbatch.packed(tokens), _reading(microbatch, routing)
    if network.shape.stages > 1:
        hidden, routed = pipeline.finished(network, params, microbatch.passed, reading)
    else:
        hidden, routed = network.read(params, packed, *reading)
    return packed, hidden, network.head_weight(params), routed


def _places(microbatch: Microbatch) -> Places:
    """Returns where the tokens are whose log-probs are wanted."""
    if microbatch.scores_everything:
        return Everywhere(microbatch.segment_ids)
    return Chosen(microbatch.scored, microbatch.before, microbatch.segment_ids.shape[1])


def token_statistics(
    network: Network,
    params: Params,
    tokens: Array,
    microbatch: Microbatch,
    *,
    temperature: float,
    chunk: int,
    entropy: heads.Entropy,
    routing: Routing | None = None,
    listed: Int[Array, "R W k"] | None = None,
) -> tuple[heads.Statistics, Routed | None]:
    """Returns what the policy says of tokens in packed rows [R, W]; zero at unscored tokens.

    And what the routers did, who are told `routing`; None without experts. `entropy` and `listed`
    are those of `heads.token_statistics`.
    """
    packed, hidden, weight, routed = _read(network, params, tokens, microbatch, routing)
    found = heads.token_statistics(
        hidden,
        weight,
        packed,
        _places(microbatch),
        temperature=temperature,
        chunk=chunk,
        entropy=entropy,
        cap=network.shape.logit_cap,
        listed=listed,
        suppressed=network.suppressed_tokens,
    )
    return found, routed


def token_likeliest(
    network: Network,
    params: Params,
    tokens: Array,
    microbatch: Microbatch,
    count: int,
    **settings: Any,
) -> tuple[Int[Array, "R W k"], Float[Array, "R W k"]]:
    """Returns `likeliest_tokens` in place of each scored token of packed rows; else zero."""
    _, hidden, weight, _ = _read(network, params, tokens, microbatch)
    settings |= {"cap": network.shape.logit_cap, "suppressed": network.suppressed_tokens}
    return likeliest_tokens(hidden, weight, _places(microbatch), count, **settings)


def token_values(
    network: Network,
    params: Params,
    tokens: Array,
    microbatch: Microbatch,
    routing: Routing | None = None,
) -> tuple[Float[Array, "R W"], Routed | None]:
    """Returns the value just before each token of packed rows; zero at unscored tokens.

    And what the routers did, as `token_statistics`.
    """
    _, hidden, weight, routed = _read(network, params, tokens, microbatch, routing)
    return heads.token_values(hidden, weight, _places(microbatch)), routed


def sequence_scores(
    network: Network,
    params: Params,
    tokens: Array,
    lengths: Array,
    microbatch: Microbatch,
    routing: Routing | None = None,
) -> tuple[Float[Array, " b"], Routed | None]:
    """Returns the score at the last token of each sequence of the microbatch.

    And what the routers did, as `token_statistics`.
    """
    _, hidden, weight, routed = _read(network, params, tokens, microbatch, routing)
    last = microbatch.starts + jnp.maximum(microbatch.take(lengths), 1) - 1
    at_end = hidden[microbatch.rows, last][:, None]
    return heads.sequence_scores(at_end, weight, jnp.zeros_like(last)), routed


def is_on_policy(config: RLConfig) -> bool:
    """Returns whether a step is one update that needs no log-probs of the policy before it.

    The ratio to the old policy is then 1: the update takes its own log-probs, without a gradient,
    for the old ones, which saves a pass. False if samples may be of older weights, or if anything
    before the update reads what the policy predicts: an algorithm (`needs.Needs.old_log_probs`),
    or an alert that may skip the update.
    """
    algorithm, trainer = config.algorithm, config.trainer
    one_update = trainer.epochs == 1 and config.minibatch_size == config.sequences_per_step
    alerts = config.alerts.entropy.action, config.alerts.log_prob_difference.action
    reads_old = needs.of(algorithm).old_log_probs or algorithm.old_log_probs == "rollout"
    fresh = not config.max_staleness
    return fresh and one_update and not reads_old and "skip" not in alerts


def scoring_programs(config: RLConfig, models: Models) -> Programs:
    """Returns the jitted programs that ask a policy and a critic about all tokens of a step.

    `of_policy(base, params, tokens, lengths, packed, *, entropy, records)` gives log-probs,
    entropies and sums of squared probabilities, `of_critic(params, tokens, lengths, packed)`
    values, [B, T] each. `base` is what the adapters `params` are added to; `{}` without adapters.
    Routers follow the routes of `packed`, if it has any. With `records` the experts that packed
    tokens visited are the second of two results, [M, R, W, routes].
    """
    sees = eyes.of(config, models.policy)

    @functools.partial(jax.jit, static_argnames=("entropy", "records"))
    def of_policy(
        base,
        params,
        tokens,
        lengths,
        packed: PackedBatch,
        *,
        entropy: heads.Entropy,
        records: bool = False,
    ):
        whole = lora.joined(base, params)

        def told(microbatch: Microbatch) -> Routing | None:
            known = bool(microbatch.routes.shape[-1])
            return Routing(microbatch.segment_ids != 0, microbatch.routes) if known else None

        def ask(microbatch: Microbatch):
            found, routed = token_statistics(
                models.policy,
                whole,
                tokens,
                microbatch,
                temperature=config.rollout.temperature or 1.0,
                chunk=config.model.vocab_chunk,
                entropy=entropy,
                routing=told(microbatch),
            )
            of_tokens = found[:3]
            unpacked = (microbatch.unpacked(each, lengths, tokens.shape[1]) for each in of_tokens)
            visited: Any = ()
            if records:
                assert routed is not None
                visited = models.policy.routes(routed.chosen)
            return tuple(unpacked), visited

        packed = Reader(models.policy, tokens, told, sees).passed(whole, packed)
        found, visited = packing.both_ways(packed, ask, *tokens.shape)
        return (found, visited) if records else found

    @jax.jit
    def of_critic(params, tokens, lengths, packed: PackedBatch):
        def ask(microbatch: Microbatch):
            values, _ = token_values(models.value, params, tokens, microbatch)
            return microbatch.unpacked(values, lengths, tokens.shape[1])

        packed = Reader(models.value, tokens).passed(params, packed)
        return packing.by_sequence(packed, ask, *tokens.shape)

    return of_policy, of_critic


def questions(
    config: RLConfig, models: Models, frozen: Frozen, state: LearnerState, programs: Programs
) -> dict[str, Callable[..., Any]]:
    """Returns by name what lowers the programs that `predictor` will call.

    Each takes tokens [B, T], lengths [B] and the packed batch of a step, or their shapes; of
    `state` only shapes and shardings are read. What carries routes or images is not among them.
    """
    of_policy, of_critic = programs
    found: dict[str, Callable[..., Any]] = {}

    def on(role: str, program, *before, **choices) -> Callable[..., Any]:
        def lower(*about):
            with jax.set_mesh(models.meshes[role]):
                return program.lower(*before, *about, **choices)

        return lower

    if not is_on_policy(config) and config.router.replay == "off":
        asked = frozen.base, state.policy.params
        found["log-probs"] = on("policy", of_policy, *asked, entropy="value", records=False)
    if frozen.reference and "reference" not in config.mesh.on_host:
        found["reference"] = on("reference", of_policy, {}, frozen.reference, entropy="none")
    if state.critic.params:
        found["values"] = on("critic", of_critic, state.critic.params)
    return found


def predictor(
    config: RLConfig,
    models: Models,
    frozen: Frozen,
    programs: Programs | None = None,
    ready: Callable[[], None] = lambda: None,
) -> Callable[[LearnerState, Rollouts, Clock], tuple[Predictions, Rollouts]]:
    """Returns what asks every model in one pass; times `old_log_prob`, `ref` and `values`.

    `programs` are `scoring_programs`, if they are made already; `ready` waits until they are
    compiled.

    It returns the rollouts too, with the routes that the update is to follow: of the engine, or
    with `router.replay="scoring"` of this pass. With `is_on_policy` the policy is not asked; the
    engine's log-probs stand in its place and nothing reads them. Models on different devices run at
    the same time: all are asked before any answer is moved to the policy's devices.
    """
    of_policy, of_critic = programs or scoring_programs(config, models)
    mesh, meshes, on_policy = models.mesh, models.meshes, is_on_policy(config)
    one_mesh = len({meshes[role] for role in ("policy", "reference", "critic")}) == 1
    replay = config.router.replay

    @functools.partial(jax.jit, out_shardings=mesh_lib.replicated(mesh))
    def of_response(mask, answers: Predictions) -> Predictions:
        return jax.tree.map(lambda a: jnp.where(mask, a, 0.0), answers)

    def predict(state: LearnerState, rollouts: Rollouts, clock: Clock):
        routing_lib.check_routes(config.router, rollouts)
        ready()
        packed = models.packer.pack_rollouts(rollouts)
        if models.gallery is not None:
            packed = wide.carried(packed, mesh, **models.gallery.of_rollouts(rollouts))
            if models.gallery.learns:
                packed = models.gallery.showing(packed, rollouts)
        about = rollouts.tokens, rollouts.lengths, packed
        zeros = jnp.zeros(rollouts.tokens.shape, jnp.float32)
        old, entropies, squares = jnp.asarray(rollouts.rollout_log_probs), zeros, zeros
        if not on_policy:
            with jax.set_mesh(mesh), clock("old_log_prob") as watch:
                routed = packed
                if replay == "rollout" and rollouts.routes is not None:
                    routed = wide.carried(packed, mesh, routes=rollouts.routes)
                asked = frozen.base, state.policy.params, *about[:2], routed
                records = replay == "scoring"
                answer: Any = watch(of_policy(*asked, entropy="value", records=records))
            if records:
                answer, visited = answer
                of_tokens = rollouts.lengths, rollouts.tokens.shape[1]
                routes = wide.by_sequence(packed, visited, *of_tokens)
                rollouts = dataclasses.replace(rollouts, routes=routes)
            found, entropies, squares = answer
            old = found if config.algorithm.old_log_probs == "recompute" else old
        reference = old
        if frozen.reference:
            with jax.set_mesh(meshes["reference"]), clock("ref") as watch:
                params = frozen.reference
                if "reference" in config.mesh.on_host:
                    params = pools.working(params)
                reference, _, _ = watch(of_policy({}, params, *about, entropy="none"))
        values = [zeros, zeros]
        for i, critic in enumerate((state.critic, state.cost_critic)):
            if critic.params:
                with jax.set_mesh(meshes["critic"]), clock("values") as watch:
                    values[i] = watch(of_critic(critic.params, *about))
        answers = Predictions(
            old_log_probs=old,
            ref_log_probs=reference,
            entropies=entropies,
            sum_squared_probs=squares,
            values=values[0],
            cost_values=values[1],
        )
        if not one_mesh:
            answers = pools.move(answers, mesh_lib.replicated(mesh))
        with jax.set_mesh(mesh):
            answers = pools.given(answers, mesh)
            return of_response(rollouts.response_mask, answers), rollouts

    return predict


def model_scorers(models: Models, frozen: Frozen) -> dict[str, Callable[[Rollouts], np.ndarray]]:
    """Returns by name the functions that score whole sequences, [B], with reward or cost models."""
    mesh = models.meshes["reward"]

    def scorer(of: Scalar):
        @functools.partial(jax.jit, out_shardings=mesh_lib.replicated(mesh))
        def of_sequences(tokens, lengths, packed: PackedBatch):
            def ask(microbatch: Microbatch):
                scores, _ = sequence_scores(of.network, of.params, tokens, lengths, microbatch)
                return scores[:, None]

            packed = Reader(of.network, tokens).passed(of.params, packed)
            return packing.by_sequence(packed, ask, len(tokens), 1)[:, 0]

        def score(rollouts: Rollouts) -> np.ndarray:
            packed = models.packer.pack_rollouts(rollouts)
            with jax.set_mesh(mesh):
                return telling.fetched(of_sequences(rollouts.tokens, rollouts.lengths, packed))

        return score

    return {name: scorer(model) for name, model in frozen.scorers.items()}
