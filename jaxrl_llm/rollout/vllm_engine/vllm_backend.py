"""vLLM as the backend of a worker. Runs in vLLM's own interpreter only.

Weights arrive through vLLM's weight transfer interface, by an engine that reads them from memory
shared with the run (`HostMemoryTransferEngine`).
"""

import dataclasses
import json
import math
import mmap
import os
import pathlib
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the loop decides when a step is taken
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the model is a config; nothing is downloaded

import torch
import vllm
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind

from jaxrl_llm.rollout.vllm_engine.wire import WorkerError
from jaxrl_llm.rollout.vllm_engine.worker_loop import SampledTokens

_TRANSFER = "jaxrl_llm"  # the name of the transfer engine in vLLM's registry
_MIN_CPU_CACHE_BYTES = 1 << 26


class VllmBackend:
    """Samples with `vllm.LLM`, one engine step at a time."""

    def __init__(self, message: Mapping[str, Any]):
        self._weights = {"path": message["memory"], "tensors": message["tensors"]}
        self._sleep_level = message["sleep_level"]
        if self._sleep_level and not current_platform.is_sleep_mode_available():
            raise WorkerError(
                f"vLLM {vllm.__version__} has no sleep mode on {current_platform.device_name}; set"
                " rollout.vllm.sleep_level=0"
            )
        llm_args = dict(message["llm_args"])
        if current_platform.is_cpu():
            # There the share of the memory would be allocated at once, however small the model is.
            llm_args.setdefault("kv_cache_memory_bytes", _cpu_cache_bytes(message))
        with tempfile.TemporaryDirectory(prefix="jaxrl_llm_vllm_") as folder:
            pathlib.Path(folder, "config.json").write_text(json.dumps(message["model_config"]))
            self._llm = vllm.LLM(
                model=folder,
                skip_tokenizer_init=True,
                load_format="dummy",
                seed=0,
                # Of the logits that tokens are drawn from: divided by the temperature, suppressed
                # tokens left out.
                logprobs_mode="processed_logprobs",
                # Otherwise tokens of a step would be drawn before, and arrive after, new weights.
                async_scheduling=False,
                enable_sleep_mode=bool(self._sleep_level),
                weight_transfer_config={"backend": _TRANSFER},
                worker_extension_cls=f"{__name__}.RolloutWorker",
                **llm_args,
            )
        self._engine: Any = self._llm.llm_engine
        # Its noise is a function of seed and position. That of the other runner is drawn one after
        # the other from a generator, which would begin anew with a resubmitted request.
        self._noise_by_position = self._engine.vllm_config.use_v2_model_runner
        self._reports_unfiltered = False
        self._num_top_log_probs: dict[int, int] = {}  # by sample, if any
        self._llm.collective_rpc("init_weight_transfer_engine", args=({},))
        self._llm.collective_rpc("suppress_tokens", args=(message["suppressed_tokens"],))

    def describe(self) -> dict[str, Any]:
        return {"version": vllm.__version__, "device": current_platform.get_device_name()}

    def add(self, sample: int, settings: Mapping[str, Any], version: int) -> None:
        is_filtered = settings["top_k"] or settings["top_p"] < 1 or settings["min_p"]
        if is_filtered and not self._reports_unfiltered:
            self._llm.collective_rpc("report_unfiltered_log_probs")
            self._reports_unfiltered = True
        tokens, seed = settings["tokens"], settings["seed"]
        if not self._noise_by_position:
            seed = _splitmix64(seed + len(tokens))
        params = vllm.SamplingParams(
            max_tokens=settings["max_tokens"],
            temperature=settings["temperature"],
            top_k=settings["top_k"],
            top_p=settings["top_p"],
            min_p=settings["min_p"],
            seed=seed >> 2,
            stop_token_ids=settings["stop_tokens"],
            ignore_eos=True,  # the run's stop tokens are the only ones
            logprobs=settings["num_top_log_probs"],
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        # The salt keeps prefixes of older weights from being found.
        prompt = {"prompt_token_ids": tokens, "cache_salt": str(version)}
        self._engine.add_request(str(sample), prompt, params)
        if settings["num_top_log_probs"]:
            self._num_top_log_probs[sample] = settings["num_top_log_probs"]

    def abort(self, samples: Sequence[int]) -> None:
        self._engine.abort_request([str(sample) for sample in samples])

    def has_unfinished(self) -> bool:
        return self._engine.has_unfinished_requests()

    def step(self) -> list[SampledTokens]:
        sampled = []
        for request in self._engine.step():
            (output,) = request.outputs
            tokens = list(output.token_ids)
            entries = output.logprobs or []
            sample = int(request.request_id)
            count = self._num_top_log_probs.get(sample, 0)
            sampled.append(
                SampledTokens(
                    sample,
                    tokens,
                    [entry[token].logprob for entry, token in zip(entries, tokens, strict=True)],
                    [_likeliest(entry, count) for entry in entries] if count else [],
                    _finish_reason(output),
                )
            )
            if request.finished:
                self._num_top_log_probs.pop(sample, None)
        return sampled

    def update_weights(self) -> None:
        self._llm.collective_rpc("start_weight_update")
        self._llm.collective_rpc("update_weights", args=(self._weights,))
        self._llm.collective_rpc("finish_weight_update")

    def compare_weights(self) -> dict[str, Any]:
        if self._engine.vllm_config.parallel_config.world_size > 1:
            raise WorkerError("compare_weights: vLLM must run on one device")
        (result,) = self._llm.collective_rpc("compare_weights", args=(self._weights,))
        return result

    def sleep(self) -> None:
        self._llm.sleep(level=self._sleep_level)

    def wake_up(self) -> None:
        self._llm.wake_up()


def _finish_reason(output: Any) -> str:
    """How a sample ended, "" if it has not; WorkerError if vLLM gave it up."""
    reason = output.finish_reason or ""
    if reason not in ("", "stop", "length"):
        raise WorkerError(f"vLLM ended a sample with {reason!r}")
    return reason


def _likeliest(entry: Mapping[int, Any], count: int) -> list[tuple[int, float]]:
    """The (token, log-prob) pairs of the likeliest tokens, the likeliest first."""
    pairs = [(token, value.logprob) for token, value in entry.items() if value.rank <= count]
    return sorted(pairs, key=lambda pair: -pair[1])[:count]


def _splitmix64(number: int) -> int:
    """64 bits that look random."""
    mask = 2**64 - 1
    number = number * 0x9E3779B97F4A7C15 & mask
    number = (number ^ number >> 30) * 0xBF58476D1CE4E5B9 & mask
    number = (number ^ number >> 27) * 0x94D049BB133111EB & mask
    return number ^ number >> 31


def _cpu_cache_bytes(message: Mapping[str, Any]) -> int:
    """Bytes of a KV cache that holds all sequences at once, in blocks of 128 tokens."""
    config, llm_args = message["model_config"], message["llm_args"]
    heads = config.get("num_key_value_heads") or config["num_attention_heads"]
    head_size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    token_bytes = 2 * config["num_hidden_layers"] * heads * head_size
    token_bytes *= getattr(torch, llm_args["dtype"]).itemsize
    tokens = -(-llm_args["max_model_len"] // 128) * 128 + 128
    return max(_MIN_CPU_CACHE_BYTES, llm_args["max_num_seqs"] * tokens * token_bytes)


@dataclasses.dataclass
class _NoInitInfo(WeightTransferInitInfo):
    """Nothing is agreed on before the first update."""


@dataclasses.dataclass
class _UpdateInfo(WeightTransferUpdateInfo):
    """Where the weights are."""

    path: str  # of the shared memory
    tensors: list[dict[str, Any]]  # name, dtype, shape and offset of each

    def mapped_tensors(self) -> list[tuple[str, torch.Tensor]]:
        """The tensors, read-only in the shared memory."""
        with open(self.path, "rb") as file:
            memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        mapped = []
        for tensor in self.tensors:
            shape, dtype = tensor["shape"], getattr(torch, tensor["dtype"])
            flat = torch.frombuffer(
                memory, dtype=dtype, count=math.prod(shape), offset=tensor["offset"]
            )
            mapped.append((tensor["name"], flat.reshape(shape)))
        return mapped


class HostMemoryTransferEngine(WeightTransferEngine[_NoInitInfo, _UpdateInfo]):
    """Loads the tensors of a Hugging Face checkpoint from memory that the run has written."""

    init_info_cls, update_info_cls = _NoInitInfo, _UpdateInfo

    def init_transfer_engine(self, init_info: _NoInitInfo) -> None:
        del init_info

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: _UpdateInfo) -> None:
        # To the device first: host tensors that stay in use would change with the next update.
        self.model.load_weights(
            (name, tensor.to(self.device, copy=True))
            for name, tensor in update_info.mapped_tensors()
        )

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        # On CPU, projections are packed copies. Of a head that shares the weights of the
        # embedding, vLLM (0.32) leaves the copy as it was: logits would be of the old weights.
        head: Any = getattr(self.model, "lm_head", None)
        is_loaded = self.model_config.hf_text_config.tie_word_embeddings is False
        if current_platform.is_cpu() and hasattr(head, "quant_method") and not is_loaded:
            head.quant_method.process_weights_after_loading(head)

    def shutdown(self) -> None:
        """Holds nothing between updates."""


WeightTransferEngineFactory.register_engine(_TRANSFER, HostMemoryTransferEngine)


class RolloutWorker:
    """Methods that vLLM's workers get besides their own (`worker_extension_cls`)."""

    model_runner: Any

    def suppress_tokens(self, ranges: Sequence[Sequence[int]]) -> None:
        """Gives tokens the probability 0; `ranges` are half-open."""
        if not ranges:
            return
        model = self.model_runner.model
        compute_logits = model.compute_logits

        def suppressing(*args: Any, **kwargs: Any) -> Any:
            logits = compute_logits(*args, **kwargs)
            if logits is not None:  # not on every rank
                for start, end in ranges:
                    logits[..., start:end] = float("-inf")
            return logits

        model.compute_logits = suppressing

    def report_unfiltered_log_probs(self) -> None:
        """Makes log-probs those before top_k, top_p and min_p, which then only affect sampling."""
        sampler = self.model_runner.sampler
        # The logits at the temperature, of the batch that is being sampled.
        state = getattr(sampler, "sampling_states", sampler)
        apply_temperature, sample = state.apply_temperature, sampler.sample
        unfiltered: list[torch.Tensor] = []
        returns_logits = state is not sampler  # of model runner V2

        def keeping_logits(logits: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            result = apply_temperature(logits, *args, **kwargs)
            unfiltered[:] = [logits.clone() if result is None else result.clone()]
            return result

        def sample_unfiltered(*args: Any, **kwargs: Any) -> Any:
            unfiltered.clear()
            tokens, reported = sample(*args, **kwargs)
            if unfiltered and reported is not None:
                (logits,) = unfiltered
                reported = logits if returns_logits else sampler.compute_logprobs(logits)
            return tokens, reported

        state.apply_temperature, sampler.sample = keeping_logits, sample_unfiltered

    def compare_weights(self, weights: Mapping[str, Any]) -> dict[str, Any]:
        """Compares the weights that the model computes with to the run's."""
        from jaxrl_llm.rollout.vllm_engine import weight_readback

        tensors = dict(_UpdateInfo(**weights).mapped_tensors())
        return weight_readback.compare(self.model_runner.model, tensors)
