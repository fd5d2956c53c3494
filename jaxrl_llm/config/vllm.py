"""Settings of vLLM as the sampling engine."""

import dataclasses
import json
import re
from collections.abc import Mapping
from typing import Annotated, Any

from jaxrl_llm.config.validation import ConfigGroup, File, Name, Problems, Range

# Arguments of `vllm.LLM` that follow from the run.
_DERIVED_ARGS = frozenset(
    """
    model tokenizer skip_tokenizer_init dtype seed load_format max_model_len max_num_seqs
    max_logprobs logprobs_mode weight_transfer_config enable_sleep_mode async_scheduling
    tensor_parallel_size gpu_memory_utilization logits_processors hf_overrides quantization
    speculative_config
    """.split()  # noqa: SIM905
)
MIN_VLLM_TEMPERATURE = 0.01  # vLLM raises lower ones, apart from 0, to it


class VllmConfig(ConfigGroup):
    """vLLM as the sampling engine, with rollout.engine="vllm" (docs/vllm.md)."""

    # The Python interpreter of the environment in which vLLM is installed; a process of it is
    # started on this host.
    python: File = ""
    # In place of it, "host:port" of a worker that already runs, on this or another host.
    address: Name = ""
    tensor_parallel_size: Annotated[int, Range("[1, 1024]")] = 1  # devices of vLLM
    # Share of each device's memory that vLLM takes; what the learner needs must be left.
    gpu_memory_utilization: Annotated[float, Range("(0, 1]")] = 0.4
    # More arguments of `vllm.LLM`, as JSON: {"enforce_eager": "true", "block_size": "32"}.
    llm_args: Mapping[str, Name] = dataclasses.field(default_factory=dict, hash=False)
    # What vLLM frees while the run trains: nothing, the KV cache with the weights moved to the
    # host's memory (1), or both (2). Needs a build of vLLM with sleep mode.
    sleep_level: Annotated[int, Range("[0, 2]", "0: nothing")] = 0
    # Whether vLLM goes on decoding while the run trains or waits for tools. Otherwise it decodes
    # within a step only, so that its batches, and with them its rounding, repeat.
    continuous: bool = True
    # Longest wait for an answer: vLLM loads and compiles its model in the first.
    timeout_s: Annotated[float, Range("[1, 1000000]")] = 1800.0

    def parsed_llm_args(self) -> dict[str, Any]:
        """`llm_args` with their values read as JSON."""
        return {name: json.loads(value) for name, value in self.llm_args.items()}

    @property
    def host_and_port(self) -> tuple[str, int]:
        """The parts of `address`."""
        host, _, port = self.address.rpartition(":")
        return host.strip("[]"), int(port)

    def run_rules(self, temperature: float, eval_temperature: float, schedule: str) -> Problems:
        """Yields settings of a run over vLLM that it cannot honour."""
        values = {"rollout": temperature, "evaluation": eval_temperature}
        for group, value in values.items():
            if 0 < value < MIN_VLLM_TEMPERATURE:
                rule = f"rollout.engine='vllm' samples at {MIN_VLLM_TEMPERATURE} or above"
                yield f"{group}.temperature", f"{value}: {rule}; raise it, or set it to 0"
        if schedule != "free" and self.continuous:
            message = "vLLM decodes on between steps, so that no schedule repeats its samples"
            yield "rollout.vllm.continuous", f"{message}; set it to False"

    def rules(self) -> Problems:
        if self.python and self.address:
            yield "address", "rollout.vllm.python starts a process of its own; leave one out"
        if self.address and not re.fullmatch(r".+:\d{1,5}", self.address):
            yield "address", f"must be 'host:port', got {self.address!r}"
        for name, value in self.llm_args.items():
            if name in _DERIVED_ARGS:
                yield f"llm_args.{name}", "follows from the run's other settings; leave it out"
            try:
                json.loads(value)
            except ValueError:
                example = json.dumps(value)
                yield f"llm_args.{name}", f"must be JSON, got {value!r}; a text is {example}"


DEFAULT_VLLM = VllmConfig()
