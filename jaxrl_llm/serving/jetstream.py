"""The rollout engine as `engine_api.Engine` of google-jetstream 0.2, with patches to JetStream.

JetStream's orchestrator owns queues, slots and threads and calls prefill, insert and generate.
Prefer `launch/serve.py`: JetStream does not free the slot of a disconnected client, and its
requests have no temperature or seed, so the server sets them for all.

Importing this module imports and patches JetStream:

- `jetstream.engine` imports `seqio` (and so TensorFlow) and `tiktoken` for tokenizers that are not
  used here. Where they are missing, empty modules are installed in their place.
- `orchestrator.delete_pytree` calls `jax.tree_map`, which jax has removed. It becomes a no-op.
- Importing the orchestrator sets the root logger to print everything. That is undone.
- An error in one of its threads ends the process by SIGKILL. `CheckedOrchestrator` rejects requests
  that would raise one, such as those without content.
"""

import abc
import dataclasses
import importlib.util
import itertools
import logging
import sys
import types
from collections.abc import AsyncIterator, Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jaxrl_llm.data.token_names import TokenNames
from jaxrl_llm.errors import UserError
from jaxrl_llm.models.transformer import Params
from jaxrl_llm.rollout.engine import host_inputs
from jaxrl_llm.rollout.engine.device_programs import DecodeState
from jaxrl_llm.rollout.engine.engine import Engine
from jaxrl_llm.rollout.engine.prefill import Prefix
from jaxrl_llm.rollout.engine.requests import Request, RequestError, SamplingParams
from jaxrl_llm.serving.protocol import ServedModel
from jaxrl_llm.sharding import mesh as mesh_lib


def _install_empty_module(name: str, **contents: Any) -> None:
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(contents)


class _Unavailable:
    def __init__(self, *args: Any, **kwargs: Any):
        raise UserError("this tokenizer of JetStream needs seqio and tiktoken, not installed here")


_packages = ("jetstream", "grpc", "prometheus_client", "shortuuid")
if _missing := [name for name in _packages if importlib.util.find_spec(name) is None]:
    raise UserError(
        f"{', '.join(_missing)} not installed: pip install --no-deps google-jetstream &&"
        " pip install grpcio prometheus-client protobuf pydantic shortuuid"
    )
if importlib.util.find_spec("seqio") is None:
    _install_empty_module("seqio")
    _install_empty_module(
        "seqio.vocabularies", Vocabulary=abc.ABC, SentencePieceVocabulary=_Unavailable
    )
if importlib.util.find_spec("tiktoken") is None:
    _install_empty_module("tiktoken", Encoding=_Unavailable)
    _install_empty_module("tiktoken.load", load_tiktoken_bpe=_Unavailable)

_root = logging.getLogger()
_level, _handlers = _root.level, list(_root.handlers)

import grpc  # noqa: E402
from jetstream.core import config_lib, orchestrator, server_lib  # noqa: E402
from jetstream.engine import engine_api, tokenizer_api, tokenizer_pb2  # noqa: E402

_root.setLevel(_level)
_root.handlers = _handlers

orchestrator.delete_pytree = lambda prefix: None


class CheckedOrchestrator(orchestrator.LLMOrchestrator):
    """JetStream's service with validation of each request."""

    async def Decode(
        self, request: Any, context: grpc.aio.ServicerContext | None = None
    ) -> AsyncIterator[Any]:
        """Answers one request; INVALID_ARGUMENT for one that the engine cannot serve."""
        (engine,) = self._driver._generate_engines
        if problem := engine.request_problem(request):
            await orchestrator._abort_or_raise(context, grpc.StatusCode.INVALID_ARGUMENT, problem)
        async for response in super().Decode(request, context):
            yield response


orchestrator.LLMOrchestrator = CheckedOrchestrator

# JetStream prepends its tokenizer's BOS to a client's token ids. This BOS is not in the vocabulary,
# so that `prefill` can tell it from an id that the client sent.
_NO_TOKEN = -1


@dataclasses.dataclass(frozen=True)
class JetStreamDecodeState:
    """The decode state, with the sampled tokens that JetStream has not received yet."""

    state: DecodeState
    pending_tokens: Int[Array, " S"]  # sampled, to be returned by the next `generate`; -1: none
    num_returned: Int[Array, " S"]  # tokens returned of the slot's sample


class JetStreamEngine(engine_api.Engine):
    """JetStream's prefill, insert and generate over the slots of a rollout engine."""

    colocated_cpus, samples_per_slot = None, 1
    max_concurrent_decodes = max_prefill_length = 0  # set by __init__, as is the mesh
    mesh: Any = None

    def __init__(
        self,
        engine: Engine,
        served: ServedModel,
        load: Callable[[], Params],
        sampling: SamplingParams,
        seed: int = 0,
    ):
        """`engine` has `chunk_steps=1`, and pages for all slots to hold the longest reply.

        JetStream ends a reply at its request's own limit.
        """
        self._engine, self._served, self._load = engine, served, load
        self._sampling, self._seed = sampling, seed
        self._num_inserted = itertools.count()
        self.mesh = engine.mesh
        # A static page table: each slot owns pages for the longest reply.
        pages = engine.programs.pages
        self._table = np.arange(pages.num_pages, dtype=np.int32).reshape(pages.num_slots, -1)
        self.max_concurrent_decodes = pages.num_slots
        # The smallest of JetStream's buckets that holds any prompt and the BOS.
        self.max_prefill_length = min(_bucket(served.max_tokens + 1), 32768)

    def request_problem(self, request: Any) -> str:
        """Why a DecodeRequest cannot be served, or "" if it can."""
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
        params = (SamplingParams(request.max_tokens),)
        try:
            parsed = Request(tuple(tokens), np.zeros((1, 2), np.uint32), params)
            self._engine.limits.check(parsed, "request")
            return ""
        except RequestError as error:
            return str(error)

    def prefill(
        self, *, params: Params, existing_prefix: Any = None, padded_tokens: Any, true_length: int
    ) -> tuple[Prefix, int]:
        """Prefills one prompt, without the BOS that JetStream may have prepended."""
        if existing_prefix is not None:
            raise NotImplementedError("prefill must start from an empty prefix")
        tokens = np.asarray(padded_tokens, np.int32)[: int(true_length)]
        tokens = tokens[int(tokens[0] == _NO_TOKEN) :][: self._served.max_tokens]
        with jax.set_mesh(self.mesh):
            prompts = host_inputs.prompt_rows([tokens.tolist()], self._served.max_tokens)
            return self._engine.programs.prefill(params, prompts), len(tokens)

    def insert(
        self, prefix: tuple[Prefix, int], decode_state: JetStreamDecodeState, slot: int
    ) -> JetStreamDecodeState:
        """Inserts a prompt into a slot and samples its first token, returned by `generate`."""
        prefilled, length = prefix
        key = np.random.SeedSequence([self._seed, next(self._num_inserted)]).generate_state(2)
        # JetStream enforces the request's own limit; the engine only that of the cache.
        max_tokens = self._served.max_tokens - int(length)
        params = dataclasses.replace(self._sampling, max_tokens=max_tokens)
        jitted = self._engine.programs
        admission = host_inputs.insert_args([(0, slot, key, params)], 1, self._engine.num_slots)
        starts = range(0, int(length), jitted.pages.page_tokens)
        page_writes = [(int(self._table[slot, i]), 0, start) for i, start in enumerate(starts)]
        writes = host_inputs.page_writes(
            page_writes, jitted.num_writes(prefilled, 1), jitted.pages.num_pages
        )
        with jax.set_mesh(self.mesh):
            state, outputs = jitted.insert(
                decode_state.state,
                prefilled,
                admission,
                writes,
                filtered=params.is_filtered,
                num_top=0,
            )
            due = decode_state.pending_tokens.at[slot].set(outputs.tokens[0, 0])
            return JetStreamDecodeState(state, due, decode_state.num_returned.at[slot].set(0))

    def generate(
        self, params: Params, decode_state: JetStreamDecodeState
    ) -> tuple[JetStreamDecodeState, Any]:
        """Returns the pending token of each slot and samples the next."""
        num_slots, due = self._engine.num_slots, decode_state.pending_tokens
        with jax.set_mesh(self.mesh):
            data = _result_columns(due, decode_state.num_returned)
            state, outputs = self._engine.programs.generate(
                params,
                decode_state.state,
                self._table,
                np.int32(num_slots),
                num_slots=num_slots,
                window=self._served.max_tokens,
                filtered=self._sampling.is_filtered,
                num_top=0,
            )
            slots = JetStreamDecodeState(state, outputs.tokens[0], data[:, 2])
        columns = (0, 1), (1, 2), (2, 3)  # token, whether it is valid, length of the reply so far
        return slots, engine_api.ResultTokens(data, *columns, self.samples_per_slot)

    def load_params(self, *args: Any, **kwargs: Any) -> Params:
        return self._load()

    def init_decode_state(self, *args: Any, **kwargs: Any) -> JetStreamDecodeState:
        num_slots = self._engine.num_slots
        with jax.set_mesh(self.mesh):
            none = jnp.full(num_slots, -1, jnp.int32)
            return JetStreamDecodeState(
                self._engine.programs.empty(), none, jnp.zeros(num_slots, jnp.int32)
            )

    def get_prefix_destination_sharding(self) -> Any:
        return mesh_lib.replicated(self.mesh)

    def get_tokenizer(self) -> Any:
        return tokenizer_pb2.TokenizerParameters(path="", extra_ids=0)

    def build_tokenizer(self, metadata: Any) -> "JetStreamTokenizer":
        return JetStreamTokenizer(self._served)


@jax.jit
def _result_columns(due: Int[Array, " S"], num_given: Int[Array, " S"]) -> Int[Array, "S 3"]:
    is_due = (due >= 0).astype(jnp.int32)
    return jnp.stack([jnp.maximum(due, 0), is_due, num_given + is_due], axis=1)


def _bucket(num_tokens: int) -> int:
    return max(16, 1 << (num_tokens - 1).bit_length())  # as JetStream's


class JetStreamTokenizer(tokenizer_api.Tokenizer):
    """The model's own tokenizer behind JetStream's interface."""

    pad_id, bos_id = 0, _NO_TOKEN
    eos_id, stop_tokens = 0, frozenset[int]()  # set by __init__

    def __init__(self, served: ServedModel):
        self._tokenizer, self._names = served.tokenizer, TokenNames(served.tokenizer)
        self._special = frozenset(served.tokenizer.all_special_ids)
        self.eos_id = served.eos_tokens[0]
        self.stop_tokens = frozenset(served.eos_tokens)  # not the padding, which may be sampled

    def encode(self, s: str, **kwargs: Any) -> tuple[np.ndarray | Array, int]:
        """The tokens of a text, right-padded to a bucket, and their number before padding."""
        tokens = self._tokenizer(s)["input_ids"]
        padded = np.zeros(_bucket(len(tokens)), np.int32)
        padded[: len(tokens)] = tokens
        return (jnp.array(padded) if kwargs.get("jax_padding") else padded), len(tokens)

    def decode(self, token_ids: list[int], **kwargs: Any) -> str:
        """The text of a token; a single byte is `<0xNN>`, which JetStream joins with the others.

        A token of two or three bytes of a character cannot be written so and decodes to U+FFFD.
        """
        if token_ids[0] in self._special:
            return ""
        raw = b"".join(self._names.bytes(token) for token in token_ids)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return f"<0x{raw[0]:02X}>" if len(raw) == 1 else raw.decode(errors="replace")


def start_server(engine: JetStreamEngine, host: str, port: int) -> Any:
    """Starts JetStream's own server over the engine; the caller stops the returned server."""
    devices = list(engine.mesh.devices.flat)
    config = config_lib.ServerConfig(
        interleaved_slices=(f"{devices[0].platform}={len(devices)}",),
        interleaved_engine_create_fns=(lambda _: engine,),
    )
    server_lib._HOST = host
    return server_lib.run(port=port, config=config, devices=devices, jax_padding=False)
