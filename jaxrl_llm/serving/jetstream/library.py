"""google-jetstream 0.2, repaired: without TensorFlow, quiet, and hard to kill.

Importing this module imports JetStream and changes it:

- `jetstream.engine` imports `seqio` (and so TensorFlow) and `tiktoken` for tokenizers that are not
  used here. Where they are missing, empty modules take their place.
- `orchestrator.delete_pytree` calls `jax.tree_map`, which jax no longer has. Now it does nothing.
- Importing the orchestrator makes the root logger print everything. That is undone.
- An error in one of its threads ends the process by SIGKILL. `CheckedOrchestrator` refuses requests
  that would raise one, such as those without content.
"""

import abc
import importlib.util
import logging
import sys
import types
from collections.abc import AsyncIterator
from typing import Any

from jaxrl_llm.errors import UserError


def _stand_in(name: str, **contents: Any) -> None:
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(contents)


class _Unavailable:
    def __init__(self, *args: Any, **kwargs: Any):
        raise UserError("this tokenizer of JetStream needs seqio and tiktoken, not installed here")


_packages = ("jetstream", "grpc", "prometheus_client", "shortuuid")
if _missing := [name for name in _packages if importlib.util.find_spec(name) is None]:
    raise UserError(
        f"{', '.join(_missing)} not installed: pip install --no-deps google-jetstream &&"
        " pip install grpcio prometheus-client protobuf shortuuid"
    )
if importlib.util.find_spec("seqio") is None:
    _stand_in("seqio")
    _stand_in("seqio.vocabularies", Vocabulary=abc.ABC, SentencePieceVocabulary=_Unavailable)
if importlib.util.find_spec("tiktoken") is None:
    _stand_in("tiktoken", Encoding=_Unavailable)
    _stand_in("tiktoken.load", load_tiktoken_bpe=_Unavailable)

_root = logging.getLogger()
_level, _handlers = _root.level, list(_root.handlers)

import grpc  # noqa: E402
from jetstream.core import config_lib, orchestrator, server_lib  # noqa: E402, F401
from jetstream.engine import engine_api, tokenizer_api, tokenizer_pb2  # noqa: E402, F401

_root.setLevel(_level)
for _handler in [handler for handler in _root.handlers if handler not in _handlers]:
    _root.removeHandler(_handler)

orchestrator.delete_pytree = lambda prefix: None


class CheckedOrchestrator(orchestrator.LLMOrchestrator):
    """JetStream's service, behind a check of each request."""

    async def Decode(
        self, request: Any, context: grpc.aio.ServicerContext | None = None
    ) -> AsyncIterator[Any]:
        """Answers one request; INVALID_ARGUMENT for what the engine cannot serve."""
        (engine,) = self._driver._generate_engines
        if problem := engine.problem(request):
            await orchestrator._abort_or_raise(context, grpc.StatusCode.INVALID_ARGUMENT, problem)
        async for response in super().Decode(request, context):
            yield response


orchestrator.LLMOrchestrator = CheckedOrchestrator
