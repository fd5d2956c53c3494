"""The JSON bodies of Tinker's API that this server reads. Unknown fields are refused."""

import reprlib
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

_Id = Annotated[str, Field(min_length=1, max_length=160)]
_Number = Annotated[float, Field(allow_inf_nan=False)]
_Seq = Annotated[int, Field(ge=0, le=2**62)]
_Lifetime = Annotated[int, Field(ge=3600, le=10 * 366 * 86400)]


class _Body(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid", strict=False, protected_namespaces=())
    type: str = ""


class ClientConfigBody(_Body):
    """`POST client/config` and `client/dynamic_config`."""

    sdk_version: str


class SessionBody(_Body):
    """`POST create_session`."""

    tags: list[str] = []
    user_metadata: dict[str, Any] | None = None
    sdk_version: str = ""
    project_id: str | None = None
    display_name: str | None = None


class HeartbeatBody(_Body):
    """`POST session_heartbeat`."""

    session_id: _Id


class LoraBody(pydantic.BaseModel):
    """Shapes of the adapters of a new model."""

    model_config = pydantic.ConfigDict(extra="forbid")
    rank: int
    seed: int | None = Field(None, ge=0, lt=2**32)
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerBody(pydantic.BaseModel):
    """The family of the optimizer of a new model."""

    model_config = pydantic.ConfigDict(extra="allow")
    type: str = "adamw"


class CreateModelBody(_Body):
    """`POST create_model`."""

    session_id: _Id
    model_seq_id: _Seq
    base_model: str
    user_metadata: dict[str, Any] | None = None
    lora_config: LoraBody | None = None
    optimizer_config: OptimizerBody = OptimizerBody()


class ModelBody(_Body):
    """`POST get_info`."""

    model_id: _Id


class AdamBody(pydantic.BaseModel):
    """The numbers of an update; `AdamWParams` has their ranges."""

    model_config = pydantic.ConfigDict(extra="forbid")
    learning_rate: _Number = 1e-4
    beta1: _Number = 0.9
    beta2: _Number = 0.95
    eps: _Number = 1e-12
    weight_decay: _Number = 0.0
    grad_clip_norm: _Number = 0.0


class OptimStepBody(_Body):
    """`POST optim_step`."""

    model_id: _Id
    seq_id: _Seq
    adam_params: AdamBody | None = None
    optimizer_params: dict[str, Any] | None = None


class SaveBody(_Body):
    """`POST save_weights`."""

    model_id: _Id
    seq_id: _Seq
    path: str | None = None
    ttl_seconds: _Lifetime | None = None
    overwrite: bool = False
    user_metadata: dict[str, str] | None = None


class SaveForSamplerBody(_Body):
    """`POST save_weights_for_sampler`."""

    model_id: _Id
    seq_id: _Seq
    path: str | None = None
    sampling_session_seq_id: _Seq | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"
    ttl_seconds: _Lifetime | None = None
    user_metadata: dict[str, str] | None = None


class SaveExternalBody(_Body):
    """`POST save_weights_external`."""

    model_id: _Id
    seq_id: _Seq
    path: str
    ttl_seconds: _Lifetime | None = None
    age_encryption_recipients: list[str] | None = None


class LoadWeightsBody(_Body):
    """`POST load_weights`: into a model, or as a new one of a session."""

    path: str
    optimizer: bool
    model_id: _Id | None = None
    seq_id: _Seq | None = None
    session_id: _Id | None = None
    model_seq_id: _Seq | None = None
    base_model: str | None = None
    user_metadata: dict[str, Any] | None = None
    optimizer_config: OptimizerBody | None = None
    weights_access_token: str | None = None


class SamplingSessionBody(_Body):
    """`POST create_sampling_session`."""

    session_id: _Id
    sampling_session_seq_id: _Seq
    base_model: str | None = None
    model_path: str | None = None


class ChunkBody(pydantic.BaseModel):
    """A part of a prompt."""

    model_config = pydantic.ConfigDict(extra="allow")
    type: str = "encoded_text"
    tokens: list[int] = []


class PromptBody(pydantic.BaseModel):
    """A prompt."""

    model_config = pydantic.ConfigDict(extra="forbid")
    chunks: list[ChunkBody]


class SamplingParamsBody(pydantic.BaseModel):
    """How to sample."""

    model_config = pydantic.ConfigDict(extra="forbid")
    max_tokens: int | None = Field(None, ge=1)
    seed: int | None = None
    stop: str | list[str] | list[int] | None = None
    temperature: _Number = 1.0
    top_k: int = Field(-1, ge=-1)
    top_p: _Number = 1.0

    def stops(self, eos_tokens: Sequence[int]) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """Stop tokens and stop strings; without `stop` the tokens that end a text."""
        if self.stop is None:
            return tuple(eos_tokens), ()
        stops = [self.stop] if isinstance(self.stop, str) else self.stop
        tokens = tuple(stop for stop in stops if isinstance(stop, int))
        return tokens, tuple(stop for stop in stops if isinstance(stop, str))


class SampleBody(_Body):
    """`POST asample`."""

    num_samples: int = Field(1, ge=1, le=4096)
    prompt: PromptBody
    sampling_params: SamplingParamsBody
    base_model: str | None = None
    model_path: str | None = None
    sampling_session_id: _Id | None = None
    seq_id: _Seq | None = None
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: int = Field(0, ge=0)
    topk_sample_logprobs: int = Field(0, ge=0)
    target_prompt_logprobs: Any = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: int | None = Field(None, ge=1)
    record_stability_info: bool | None = None

    def tokens(self) -> list[int]:
        """The tokens of the prompt."""
        return [token for chunk in self.prompt.chunks for token in chunk.tokens]

    def unsupported(self) -> str:
        """The first thing that is asked for and not supported here; "": nothing."""
        asked = {
            "an image or audio in the prompt": any(
                chunk.type != "encoded_text" for chunk in self.prompt.chunks
            ),
            "target_prompt_logprobs": self.target_prompt_logprobs is not None,
            "prompt_alt_tokens_k": self.prompt_alt_tokens_k > 0,
            "record_stability_info": bool(self.record_stability_info),
        }
        return next((name for name, is_asked in asked.items() if is_asked), "")


class FutureBody(_Body):
    """`POST retrieve_future` and `cancel_future`."""

    request_id: _Id
    allow_metadata_only: bool = False


class WeightsInfoBody(_Body):
    """`POST weights_info`."""

    tinker_path: str


def validation_problem(error: pydantic.ValidationError) -> str:
    """The first problem of a body: where, what came, and the rule."""
    first = error.errors()[0]
    where = ".".join(map(str, first["loc"])) or "body"
    if first["type"] == "extra_forbidden":
        return f"{where}: this server does not know this field; leave it out"
    return f"{where}: {first['msg']}; got {reprlib.repr(first['input'])}"
