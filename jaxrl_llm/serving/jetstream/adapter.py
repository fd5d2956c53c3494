"""The rollout engine as JetStream wants it: `engine_api.Engine` of google-jetstream 0.2.

JetStream's orchestrator owns queues, slots and threads; this gives it prefill, insert and
generate. Its requests have no sampling parameters, so those are the server's. `serving.server`
is the better way where there is a choice: JetStream neither frees the slot of a client that
left nor lets a request set its temperature or seed.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Int

from jaxrl_llm.models.transformer import Network, Params
from jaxrl_llm.rollout import prefill, programs
from jaxrl_llm.rollout.prefill import Prefix, Prompts
from jaxrl_llm.rollout.programs import Admission, DecodeState
from jaxrl_llm.rollout.requests import NUM_STOP_TOKENS, SamplingParams
from jaxrl_llm.rollout.sampling import SamplerState
from jaxrl_llm.serving.jetstream.library import (
    config_lib,
    engine_api,
    server_lib,
    tokenizer_api,
    tokenizer_pb2,
)
from jaxrl_llm.serving.transcript import TokenNames
from jaxrl_llm.serving.wanted import Served
from jaxrl_llm.sharding import mesh as mesh_lib

# JetStream puts its tokenizer's BOS before token ids of a client. It is told this number, which
# is no token: an id that is really there can then be told from one that was put there.
_NO_TOKEN = -1
_SMALLEST_PREFILL = 16  # JetStream's buckets begin here and double
_LARGEST_PREFILL = 32768


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slots:
    """The decode state, and what JetStream has not been given of it."""

    state: DecodeState
    is_due: Bool[Array, " S"]  # the slot holds a sampled token that was not given
    num_given: Int[Array, " S"]  # tokens of the slot's sample


class WeightsHolder:
    """What JetStream carries as params: its threads keep them, so weights are looked up here."""

    def __init__(self, params: Params):
        self.params = params


class JetStreamEngine(engine_api.Engine):
    """Prefill, insert and generate over `max_concurrent_decodes` slots."""

    def __init__(
        self,
        network: Network,
        mesh: Mesh,
        served: Served,
        load: Callable[[], Params],
        *,
        num_slots: int,
        sampling: SamplingParams,
        seed: int = 0,
    ):
        """
        Args:
          network: The policy.
          mesh: Slots are split over data and fsdp, heads over tensor, where they divide.
          served: Tokenizer, end-of-sequence tokens and the longest prompt plus reply.
          load: Returns rollout parameters.
          num_slots: Sequences decoded at one time.
          sampling: How every reply is drawn; its `max_tokens` is not used.
          seed: Of the random numbers; each insertion has its own.
        """
        self._network, self._mesh, self._served, self._load = network, mesh, served, load
        self._num_slots, self._sampling, self._seed = num_slots, sampling, seed
        self._num_inserted = itertools.count()

        def empty() -> Slots:
            state = programs.empty_state(
                network, num_slots, [served.max_tokens], NUM_STOP_TOKENS, network.compute_dtype
            )
            return Slots(state, jnp.zeros(num_slots, bool), jnp.zeros(num_slots, jnp.int32))

        replicated = mesh_lib.replicated(mesh)
        with jax.set_mesh(mesh):
            shardings = jax.tree.map(
                lambda a: mesh_lib.sharding_of(
                    a.shape,
                    ("batch", "kv_heads", None, None)
                    if a.ndim == 4
                    else ("batch", *[None] * (a.ndim - 1)),
                    mesh,
                ),
                jax.eval_shape(empty),
            )
        filtered = sampling.is_filtered
        self._empty = jax.jit(empty, out_shardings=shardings)
        self._prefill = jax.jit(functools.partial(_read, network))
        self._insert = jax.jit(
            functools.partial(_insert, filtered=filtered),
            donate_argnums=0,
            out_shardings=shardings,
        )
        self._generate = jax.jit(
            functools.partial(_generate, network, window=served.max_tokens, filtered=filtered),
            donate_argnums=1,
            out_shardings=(shardings, replicated),
        )

    def problem(self, request: Any) -> str:
        """Returns why a DecodeRequest cannot be served; "" if it can."""
        content = request.WhichOneof("content")
        if content is None:
            return "neither text_content nor token_content is set"
        if request.session_cache:
            return "session_cache is not supported; leave it out"
        if content == "token_content":
            tokens = list(request.token_content.token_ids)
            size = self._served.vocab_size
            if not all(0 <= token < size for token in tokens):
                return f"a token id is outside the vocabulary of {size}"
        else:
            tokens = self._served.tokenizer(request.text_content.text)["input_ids"]
        limit = self._served.max_tokens
        if not 1 <= len(tokens) <= min(limit - 1, self.max_prefill_length - 1):
            return f"a prompt of {len(tokens)} tokens; at least 1, with the reply at most {limit}"
        if not 1 <= request.max_tokens <= limit - len(tokens):
            return (
                f"max_tokens={request.max_tokens} after a prompt of {len(tokens)} must lie"
                f" between 1 and {limit - len(tokens)}"
            )
        return ""

    def prefill(
        self, *, params: Any, existing_prefix: Any = None, padded_tokens: Any, true_length: int
    ) -> Prefix:
        """Reads one prompt; a first token that JetStream put there is taken off."""
        if existing_prefix is not None:
            raise NotImplementedError("prefill goes from an empty prefix only")
        tokens = np.asarray(padded_tokens, np.int32)
        length = min(int(true_length), len(tokens))
        if tokens[0] == _NO_TOKEN:
            tokens, length = np.append(tokens[1:], np.int32(0)), length - 1
        with jax.set_mesh(self._mesh):
            # No further than the cache, which need not be as long as JetStream's bucket.
            tokens = tokens[None, : self._served.max_tokens]
            return self._prefill(params.params, tokens, np.array([length], np.int32))

    def insert(self, prefix: Prefix, decode_state: Slots, slot: int) -> Slots:
        """Puts a prompt into a slot and samples its first token, which `generate` will give."""
        stops = np.full((1, NUM_STOP_TOKENS), -1, np.int32)
        stops[0, : len(self._sampling.stop_tokens)] = self._sampling.stop_tokens
        entropy = [self._seed, next(self._num_inserted)]
        one = functools.partial(np.full, 1)
        sampler: dict[str, Any] = {
            "keys": np.random.SeedSequence(entropy).generate_state(2).reshape(1, 2),
            "temperature": one(self._sampling.temperature, np.float32),
            "top_k": one(self._sampling.top_k, np.int32),
            "top_p": one(self._sampling.top_p, np.float32),
            "min_p": one(self._sampling.min_p, np.float32),
        }
        admission: dict[str, Any] = {
            "prompts": one(0, np.int32),
            "slots": one(slot, np.int32),
            # JetStream ends a reply at the request's limit; the engine at the cache's end only.
            "limits": one(self._served.max_tokens, np.int32),
            "stops": stops,
        }
        with jax.set_mesh(self._mesh):
            return self._insert(
                decode_state, prefix, Admission(**admission, sampler=SamplerState(**sampler))
            )

    def generate(self, params: Any, decode_state: Slots) -> tuple[Slots, Any]:
        """Gives each slot's token that is due, and samples the one after it."""
        with jax.set_mesh(self._mesh):
            decode_state, data = self._generate(params.params, decode_state)
        result = engine_api.ResultTokens(
            data=data,
            tokens_idx=(0, 1),
            valid_idx=(1, 2),
            length_idx=(2, 3),
            samples_per_slot=self.samples_per_slot,
        )
        return decode_state, result

    def load_params(self, *args: Any, **kwargs: Any) -> WeightsHolder:
        return WeightsHolder(self._load())

    def init_decode_state(self, *args: Any, **kwargs: Any) -> Slots:
        with jax.set_mesh(self._mesh):
            return self._empty()

    def get_prefix_destination_sharding(self) -> Any:
        return mesh_lib.replicated(self._mesh)

    def get_tokenizer(self) -> Any:
        return tokenizer_pb2.TokenizerParameters(path="", extra_ids=0)

    def build_tokenizer(self, metadata: Any) -> "JetStreamTokenizer":
        return JetStreamTokenizer(self._served)

    @property
    def max_concurrent_decodes(self) -> int:
        return self._num_slots

    @property
    def samples_per_slot(self) -> int:
        return 1

    @property
    def max_prefill_length(self) -> int:
        """The first of JetStream's buckets that holds any prompt and its own token."""
        return next(
            size
            for size in (_SMALLEST_PREFILL << i for i in range(16))
            if size > self._served.max_tokens or size == _LARGEST_PREFILL
        )

    @property
    def mesh(self) -> Mesh:
        return self._mesh

    @property
    def colocated_cpus(self) -> None:
        return None


def _read(
    network: Network, params: Params, tokens: Int[Array, "1 T"], lengths: Int[Array, " 1"]
) -> Prefix:
    positions = jnp.arange(tokens.shape[1])[None]
    inside = (positions < lengths).astype(jnp.int32)
    return prefill.prefill(
        network, params, Prompts(tokens, positions, inside, jnp.zeros_like(lengths), lengths)
    )


def _insert(slots: Slots, prefix: Prefix, admission: Admission, *, filtered: bool) -> Slots:
    # At most what the cache holds after the prompt.
    room = slots.state.cache.max_tokens - prefix.lengths[:1]
    admission = dataclasses.replace(admission, limits=jnp.minimum(admission.limits, room))
    state, _ = programs.insert(slots.state, prefix, admission, filtered=filtered, num_top=0)
    at = admission.slots
    return Slots(state, slots.is_due.at[at].set(True), slots.num_given.at[at].set(0))


def _generate(
    network: Network, params: Params, slots: Slots, *, window: int, filtered: bool
) -> tuple[Slots, Int[Array, "S 3"]]:
    """Returns the slots one step on, and (token, whether it is one, how many) of each slot."""
    num_given = slots.num_given + slots.is_due
    data = jnp.stack([slots.state.tokens, slots.is_due.astype(jnp.int32), num_given], axis=1)
    num_slots = slots.is_due.shape[0]
    state, outputs = programs.generate(
        network,
        params,
        slots.state,
        jnp.int32(num_slots),
        num_steps=1,
        num_slots=num_slots,
        window=window,
        gather=False,
        filtered=filtered,
        num_top=0,
    )
    return Slots(state, outputs.tokens[0] >= 0, num_given), data


class JetStreamTokenizer(tokenizer_api.Tokenizer):
    """The model's own tokenizer behind JetStream's interface."""

    def __init__(self, served: Served):
        self._tokenizer = served.tokenizer
        self._eos_tokens = served.eos_tokens
        self._names = TokenNames(served.tokenizer)
        self._special = frozenset(served.tokenizer.all_special_ids)

    def encode(self, s: str, **kwargs: Any) -> tuple[np.ndarray | Array, int]:
        """Returns the tokens of a text, right-padded to a bucket, and how many they are."""
        tokens = self._tokenizer(s)["input_ids"]
        width = _SMALLEST_PREFILL
        while width < len(tokens):
            width *= 2
        padded = np.zeros(width, np.int32)
        padded[: len(tokens)] = tokens
        return (jnp.array(padded) if kwargs.get("jax_padding") else padded), len(tokens)

    def decode(self, token_ids: list[int], **kwargs: Any) -> str:
        """Returns a token's text; of a single byte, the name that JetStream joins to others.

        A token of two or three bytes that are no character has no such name and is shown as
        broken: clients that must have every character send and decode token ids.
        """
        if token_ids[0] in self._special:
            return ""
        raw = b"".join(self._names.bytes(token) for token in token_ids)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return f"<0x{raw[0]:02X}>" if len(raw) == 1 else raw.decode(errors="replace")

    @property
    def pad_id(self) -> int:
        return 0

    @property
    def eos_id(self) -> int:
        return self._eos_tokens[0]

    @property
    def bos_id(self) -> int:
        return _NO_TOKEN

    @property
    def stop_tokens(self) -> set[int]:
        """End-of-sequence tokens; not the padding, which may be sampled."""
        return set(self._eos_tokens)


def run(engine: JetStreamEngine, host: str, port: int) -> Any:
    """Starts JetStream's own server over the engine; returns it, to be waited for or stopped."""
    devices = list(engine.mesh.devices.flat)
    config = config_lib.ServerConfig(
        interleaved_slices=(f"{devices[0].platform}={len(devices)}",),
        interleaved_engine_create_fns=(lambda _: engine,),
    )
    server_lib._HOST = host
    return server_lib.run(port=port, config=config, devices=devices, jax_padding=False)
