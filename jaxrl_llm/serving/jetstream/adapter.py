"""The rollout engine as `engine_api.Engine` of google-jetstream 0.2.

JetStream's orchestrator owns queues, slots and threads and calls prefill, insert and generate.
Prefer `launch/serve.py`: JetStream does not free the slot of a client that left, and its requests
have no temperature or seed, so the server sets them for all.
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxrl_llm.models.transformer import Params
from jaxrl_llm.rollout import scheduler
from jaxrl_llm.rollout.engine import Engine
from jaxrl_llm.rollout.prefill import Prefix
from jaxrl_llm.rollout.programs import DecodeState
from jaxrl_llm.rollout.requests import Request, RequestError, SamplingParams
from jaxrl_llm.serving.jetstream import library
from jaxrl_llm.serving.transcript import TokenNames
from jaxrl_llm.serving.wanted import Served
from jaxrl_llm.sharding import mesh as mesh_lib

# JetStream puts its tokenizer's BOS before a client's token ids. This BOS is no token, so that
# `prefill` can tell it from an id that the client sent.
_NO_TOKEN = -1
_SMALLEST_PREFILL = 16  # JetStream's buckets begin here and double
_LARGEST_PREFILL = 32768


@dataclasses.dataclass(frozen=True)
class Slots:
    """The decode state, and the tokens that JetStream does not have yet."""

    state: DecodeState
    due: Int[Array, " S"]  # sampled and not given; -1: none
    num_given: Int[Array, " S"]  # tokens of the slot's sample


class JetStreamEngine(library.engine_api.Engine):
    """Prefill, insert and generate over the slots of an engine that decodes step by step."""

    colocated_cpus, samples_per_slot = None, 1
    # Set when it is made.
    max_concurrent_decodes = max_prefill_length = 0
    mesh: Any = None

    def __init__(
        self,
        engine: Engine,
        served: Served,
        load: Callable[[], Params],
        sampling: SamplingParams,
        seed: int = 0,
    ):
        """
        Args:
          engine: Its `chunk_steps` are 1.
          load: Returns rollout parameters.
          sampling: How every reply is drawn; JetStream ends it at the request's own limit.
        """
        self._engine, self._served, self._load = engine, served, load
        self._sampling, self._seed = sampling, seed
        self._num_inserted = itertools.count()
        self.mesh, self.max_concurrent_decodes = engine.mesh, engine.num_slots
        # The first of JetStream's buckets that holds any prompt and its own token.
        self.max_prefill_length = min(_bucket(served.max_tokens + 1), _LARGEST_PREFILL)

    def problem(self, request: Any) -> str:
        """Returns why a DecodeRequest cannot be served; "" if it can."""
        content = request.WhichOneof("content")
        if content is None:
            return "neither text_content nor token_content is set"
        if request.session_cache:
            return "session_cache is not supported; leave it out"
        if content == "token_content":
            tokens = list(request.token_content.token_ids)
        else:
            tokens = self._served.tokenizer(request.text_content.text)["input_ids"]
        if len(tokens) >= self.max_prefill_length:
            return f"a prompt of {len(tokens)} tokens; at most {self.max_prefill_length - 1}"
        keys = np.zeros((1, 2), np.uint32)
        asked = Request(tuple(tokens), keys, (SamplingParams(request.max_tokens),))
        try:
            self._engine.limits.check(asked, "request")
        except RequestError as error:
            return str(error)
        return ""

    def prefill(
        self, *, params: Params, existing_prefix: Any = None, padded_tokens: Any, true_length: int
    ) -> tuple[Prefix, int]:
        """Reads one prompt; a first token that JetStream put there is taken off."""
        if existing_prefix is not None:
            raise NotImplementedError("prefill goes from an empty prefix only")
        tokens = np.asarray(padded_tokens, np.int32)[: int(true_length)]
        tokens = tokens[int(tokens[0] == _NO_TOKEN) :][: self._served.max_tokens]
        with jax.set_mesh(self.mesh):
            prompts = scheduler.prompt_rows([tokens.tolist()], self._served.max_tokens)
            return self._engine.jitted.prefill(params, prompts), len(tokens)

    def insert(self, prefix: tuple[Prefix, int], decode_state: Slots, slot: int) -> Slots:
        """Puts a prompt into a slot and samples its first token, which `generate` will give."""
        read, length = prefix
        entropy = [self._seed, next(self._num_inserted)]
        key = np.random.SeedSequence(entropy).generate_state(2)
        # The engine ends a reply at the cache's end only.
        room = self._served.max_tokens - int(length)
        params = dataclasses.replace(self._sampling, max_tokens=room)
        entering = scheduler.admission([(key, params)], [slot], [0], 1, self.max_concurrent_decodes)
        with jax.set_mesh(self.mesh):
            state, outputs = self._engine.jitted.insert(
                decode_state.state, read, entering, filtered=params.is_filtered, num_top=0
            )
            due = decode_state.due.at[slot].set(outputs.tokens[0, 0])
            return Slots(state, due, decode_state.num_given.at[slot].set(0))

    def generate(self, params: Params, decode_state: Slots) -> tuple[Slots, Any]:
        """Gives each slot's token that is due, and samples the one after it."""
        num_slots, due = self.max_concurrent_decodes, decode_state.due
        with jax.set_mesh(self.mesh):
            data = _given(due, decode_state.num_given)
            state, outputs = self._engine.jitted.generate(
                params,
                decode_state.state,
                np.int32(num_slots),
                num_slots=num_slots,
                window=self._served.max_tokens,
                filtered=self._sampling.is_filtered,
                num_top=0,
            )
            slots = Slots(state, outputs.tokens[0], data[:, 2])
        columns = {"tokens_idx": (0, 1), "valid_idx": (1, 2), "length_idx": (2, 3)}
        return slots, library.engine_api.ResultTokens(
            data=data, **columns, samples_per_slot=self.samples_per_slot
        )

    def load_params(self, *args: Any, **kwargs: Any) -> Params:
        return self._load()

    def init_decode_state(self, *args: Any, **kwargs: Any) -> Slots:
        num_slots = self.max_concurrent_decodes
        with jax.set_mesh(self.mesh):
            none = jnp.full(num_slots, -1, jnp.int32)
            return Slots(self._engine.jitted.empty(), none, jnp.zeros(num_slots, jnp.int32))

    def get_prefix_destination_sharding(self) -> Any:
        return mesh_lib.replicated(self.mesh)

    def get_tokenizer(self) -> Any:
        return library.tokenizer_pb2.TokenizerParameters(path="", extra_ids=0)

    def build_tokenizer(self, metadata: Any) -> "JetStreamTokenizer":
        return JetStreamTokenizer(self._served)


@jax.jit
def _given(due: Int[Array, " S"], num_given: Int[Array, " S"]) -> Int[Array, "S 3"]:
    """Returns (token, whether it is one, how many with it) of each slot."""
    is_due = (due >= 0).astype(jnp.int32)
    return jnp.stack([jnp.maximum(due, 0), is_due, num_given + is_due], axis=1)


def _bucket(num_tokens: int) -> int:
    return max(_SMALLEST_PREFILL, 1 << (num_tokens - 1).bit_length())


class JetStreamTokenizer(library.tokenizer_api.Tokenizer):
    """The model's own tokenizer behind JetStream's interface."""

    pad_id, bos_id = 0, _NO_TOKEN
    eos_id, stop_tokens = 0, frozenset[int]()  # set when it is made

    def __init__(self, served: Served):
        self._tokenizer, self._names = served.tokenizer, TokenNames(served.tokenizer)
        self._special = frozenset(served.tokenizer.all_special_ids)
        self.eos_id = served.eos_tokens[0]
        self.stop_tokens = frozenset(served.eos_tokens)  # not the padding, which may be sampled

    def encode(self, s: str, **kwargs: Any) -> tuple[np.ndarray | Array, int]:
        """Returns the tokens of a text, right-padded to a bucket, and how many they are."""
        tokens = self._tokenizer(s)["input_ids"]
        padded = np.zeros(_bucket(len(tokens)), np.int32)
        padded[: len(tokens)] = tokens
        return (jnp.array(padded) if kwargs.get("jax_padding") else padded), len(tokens)

    def decode(self, token_ids: list[int], **kwargs: Any) -> str:
        """Returns a token's text; of a single byte, the name that JetStream joins to others.

        A token of two or three bytes that are no character has no such name and is shown as
        broken: clients that need every character must send and decode token ids.
        """
        if token_ids[0] in self._special:
            return ""
        raw = b"".join(self._names.bytes(token) for token in token_ids)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return f"<0x{raw[0]:02X}>" if len(raw) == 1 else raw.decode(errors="replace")


def run(engine: JetStreamEngine, host: str, port: int) -> Any:
    """Starts JetStream's own server over the engine; returns it, to be waited for or stopped."""
    devices = list(engine.mesh.devices.flat)
    config = library.config_lib.ServerConfig(
        interleaved_slices=(f"{devices[0].platform}={len(devices)}",),
        interleaved_engine_create_fns=(lambda _: engine,),
    )
    library.server_lib._HOST = host
    return library.server_lib.run(port=port, config=config, devices=devices, jax_padding=False)
