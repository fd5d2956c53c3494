"""The options of each command: a dataclass whose docstring and field texts are its help."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from jaxrl_llm.config import JobConfig
from jaxrl_llm.config.placement import ProcessesConfig
from jaxrl_llm.config.validation import ConfigGroup, File, Folder, ModelPath, Name, Problems, Range

Natural = Annotated[int, Range("[0, 2147483647]")]
Positive = Annotated[int, Range("[1, 2147483647]")]
Temperature = Annotated[float, Range("[0, 1000000]", "0: greedy")]
Probability = Annotated[float, Range("[0.000001, 1]")]
Port = Annotated[int, Range("[0, 65535]", "0: any free port")]
Dtype = Literal["", "float32", "bfloat16", "float16"]


def option(text: str, default: Any = dataclasses.MISSING) -> Any:
    """A dataclass field with its help text; required unless it has a default."""
    return dataclasses.field(default=default, metadata={"help": text})


class Options(ConfigGroup):
    """The options of a command; each field is a flag."""

    module: ClassVar[str]  # in this folder, with `main(options)`
    # The field that takes positional arguments: if it is required, all of them; else those after
    # its flag. "": none are accepted.
    positional: ClassVar[str] = ""
    # The field that takes the words behind "--", another command's. "": none.
    inner: ClassVar[str] = ""


class JaxOptions(Options, ProcessesConfig):
    """The options of a command that uses JAX."""


class PolicyOptions(JaxOptions):
    """The options of a command that samples from a run's policy or a model."""

    workdir: Folder = option("Folder of a run.", "")
    model: ModelPath = option("Hugging Face folder or name (org/name).", "")

    def rules(self) -> Problems:
        if bool(self.model) == bool(self.workdir):
            yield "model", "give either --model or --workdir"


class TrainOptions(JaxOptions):
    """Runs the training job of a config.

    To resume, start it again with the same --workdir.
    """

    module = "train"
    positional = "replay"
    config: JobConfig = option("Name of a starter config; a .py, .yaml or config.json file.")
    workdir: Folder = option("Folder of the job, made if missing; also gs:// or s3://.")
    dry_run: bool = option("Only check; print the plan and all settings.", False)
    replay: tuple[str, ...] = option("Learn from these dumps, rollouts/STEP.jsonl.", ())


class RunOptions(Options):
    """Runs a training job and starts it again whenever it fails.

    jaxrl_llm run -- train --config=FILE --workdir=DIR: each start goes on from the newest
    checkpoint or copy in memory. Ends with the job, with a fault of its user (exit code 1), an
    alert (3) or a signal (75), which it passes on. On a cluster: in place of the job, on each host.
    """

    module = "run"
    inner = "job"

    job: tuple[str, ...] = option("behind --: train and its flags.")
    processes: Positive = option("Processes on this host; more than 1: no others elsewhere.", 1)
    failures: Natural = option("In a row without a finished step, before it gives up.", 5)
    pause_s: Annotated[float, Range("[0, 3600]")] = option("After a failure; doubles.", 1.0)
    hang_s: Annotated[float, Range("[0, inf]", "inf: no limit")] = option(
        "Without progress, after which processes are killed.", 1800.0
    )

    def rules(self) -> Problems:
        if self.job[:1] != ("train",):
            yield "job", f"{' '.join(self.job[:1])!r} is not train, the command that can go on"


class EvaluateOptions(PolicyOptions):
    """Evaluates a policy on held-out prompts: mean@k, pass@k, maj@k.

    The policy is a run's (--workdir), or a model on the prompts of a config (--model and --config).
    With --tasks, lm-evaluation-harness evaluates it on its tasks instead (extra [eval]). Prints one
    JSON object.
    """

    module = "evaluate"
    positional = "tasks"

    model: ModelPath = option("Hugging Face folder or name (org/name), instead of a run.", "")
    config: JobConfig | None = option("For --model: config with data and rewards.", None)
    samples_per_prompt: int = option("k of mean@k, pass@k and maj@k.", 1)
    temperature: float = option("0: greedy; must be above 0 for k > 1.", 0.0)
    num_prompts: int = option("Number of prompts, of each task; 0: all.", 0)
    seed: Natural = option("Seed of the samples.", 0)
    tasks: tuple[str, ...] = option("Tasks of lm-eval: names, or YAML files.", ())
    task_folder: Folder = option("With --tasks: folder with tasks of yours.", "")
    num_fewshot: Annotated[int, Range("[-1, 1000]")] = option("Of each task; -1: its own.", -1)
    chat: bool = option("With --tasks: prompts by the chat template.", False)

    def rules(self) -> Problems:
        yield from super().rules()
        if self.tasks:
            if self.config is not None:
                yield "config", "--tasks have prompts and scores of their own; leave it out"
            if self.samples_per_prompt != 1:
                yield "samples_per_prompt", "a task says itself how often it samples; leave it out"
            return
        if bool(self.model) != (self.config is not None):
            yield "config", "--model needs a config file with data and rewards; a run has its own"
        for name, default in (("task_folder", ""), ("num_fewshot", -1), ("chat", False)):
            if getattr(self, name) != default:
                yield name, "has no effect without --tasks"


class GenerateOptions(PolicyOptions):
    """Answers prompts with a run's policy or a model.

    Prompts come from --prompt (may be repeated) or from the lines of standard input. Prints one
    JSON object per sample.
    """

    module = "generate"

    model: ModelPath = option("Hugging Face folder or name (org/name), instead of a run.", "")
    prompt: tuple[str, ...] = option("A prompt; may be repeated.", ())
    samples: Positive = option("Samples per prompt.", 1)
    temperature: Temperature = option("0: greedy.", 0.0)
    top_p: Probability = option("Nucleus sampling: probability to keep.", 1.0)
    max_tokens: Natural = option("Per answer; 0: as many as fit, up to 4096 with the prompt.", 0)
    seed: Natural = option("Seed of the samples.", 0)


class ServeOptions(PolicyOptions):
    """Serves a model or a run with OpenAI's HTTP API."""

    module = "serve"
    positional = "adapters"

    name: Name = option("Model name for clients; empty: the folder's name.", "")
    host: Name = option("Address to listen on (no access control).", "127.0.0.1")
    port: Port = option("Port to listen on; 0: any free port.", 8000)
    num_slots: Natural = option("Samples decoded at the same time; 0: chosen.", 0)
    max_tokens: Natural = option("Prompt and reply; 0: up to 4096.", 0)
    max_waiting: Natural = option("Samples that may wait for a slot.", 256)
    chunk_steps: Annotated[int, Range("[1, 128]")] = option("Decode steps per chunk.", 8)
    draft_tokens: Annotated[int, Range("[0, 16]")] = option("Drafts per decode step; 0: none.", 0)
    prefix_caching: bool = option("Prompts share the KV cache of equal beginnings.", True)
    dtype: Literal["", "float32", "bfloat16"] = option("For --model; empty: chosen.", "")
    tensor: Positive = option("Devices that share each layer of --model.", 1)
    warm_up_prompts: Natural = option("Prompts in one prefill; 0: no warm-up.", 1)
    grace_s: Annotated[float, Range("[0, inf]")] = option("Time for requests after SIGTERM.", 30.0)
    request_s: Annotated[float, Range("[0.1, inf]")] = option("Maximum time of a request.", 600.0)
    body_bytes: Natural = option("Maximum body of a request; 0: 1 MiB, with images 32.", 0)
    special_tokens: Literal["text", "tokens"] = option("Spelled in messages.", "text")
    adapters: tuple[str, ...] = option("LoRA adapters: name=folder, or an address.", ())
    max_adapters: Natural = option("Adapters at once, loadable later; 0: --adapters.", 0)
    max_adapter_rank: Natural = option("Highest rank of an adapter; 0: of --adapters.", 0)
    train: Folder = option("Serve Tinker's API too: folder for clients' states.", "")
    max_training_clients: Positive = option("With --train: states in memory at once.", 8)
    api_keys: File = option("With --train: file of accepted keys; empty: any.", "")

    @property
    def adapters_by_name(self) -> dict[str, str]:
        """The addresses of `adapters` by name."""
        return {name: address for name, _, address in (a.partition("=") for a in self.adapters)}

    def rules(self) -> Problems:
        yield from super().rules()
        for each in self.adapters:
            name, _, address = each.partition("=")
            if not (name and address):
                yield "adapters", f"{each[:100]!r} is not name=folder"
        if len(self.adapters_by_name) < len(self.adapters):
            yield "adapters", "a name stands twice; give each adapter its own"
        if self.max_adapter_rank and not (self.adapters or self.max_adapters or self.train):
            yield "max_adapter_rank", "has no effect without --adapters, --max_adapters or --train"
        if self.train and self.workdir:
            yield "train", "trains adapters of a model; give --model instead of --workdir"
        if not self.train:
            for name, default in (("max_training_clients", 8), ("api_keys", "")):
                if getattr(self, name) != default:
                    yield name, "has no effect without --train"


class ServeJetstreamOptions(PolicyOptions):
    """Serves a model with JetStream's gRPC server, for clients of its protocol."""

    module = "serve_jetstream"

    host: Name = option("Address to listen on (no access control).", "127.0.0.1")
    port: Annotated[int, Range("[1, 65535]")] = option("Port to listen on.", 9000)
    num_slots: Positive = option("Samples decoded at the same time.", 16)
    max_tokens: Natural = option("Prompt and reply; 0: up to 4096.", 0)
    temperature: Temperature = option("Temperature of every reply; 0: greedy.", 0.0)
    top_p: Probability = option("Nucleus sampling: probability to keep.", 1.0)
    seed: Natural = option("Seed of the samples.", 0)


class PlanOptions(JaxOptions):
    """Plans the memory and time of a run before it starts.

    For a TPU --topology, a number of --devices of a kind, or else the devices of this machine.
    Without --config: the largest model that they can train, by job and by what is trained of it.
    """

    module = "plan"

    config: JobConfig | None = option("File that describes the run.", None)
    topology: Name = option("TPU topology, e.g. v5p:2x2x4; 2*v5p:2x2x4: two slices.", "")
    device: Name = option("Kind of device, e.g. h100.", "")
    devices: Positive = option("Number of devices of kind --device.", 1)
    compile: bool = option("Compile every program and print its bytes.", False)
    json: bool = option("Print one JSON object.", False)
    placement: bool = option("Rank all 15 placements of PPO's four models.", False)
    price: Annotated[float, Range("[0, inf]")] = option("Dollars per device and hour.", 0.0)
    chart: File = option("PNG file to write a bar chart to (extra [plot]).", "")
    fit: File = option("JSON file to write: the config, changed until it fits.", "")
    job: Literal["sft", "dpo", "grpo"] = option("With --fit, without --config: whose.", "grpo")

    def rules(self) -> Problems:
        if self.topology and self.device:
            yield "device", "give it or --topology, not both"
        if self.fit and not self.fit.endswith(".json"):
            yield "fit", f"{self.fit!r} is written as JSON; call it {self.fit}.json"
        if self.config is not None:
            return
        for name in ("compile", "json", "placement", "price", "chart"):
            if getattr(self, name):
                yield name, "is of one run; name its --config"


class ExportOptions(JaxOptions):
    """Exports a run as a Hugging Face folder or a GGUF file.

    With --to, uploads them with a model card made from the run. A repository is private at first.
    """

    module = "export"

    workdir: Folder = option("Folder of the run.")
    out: Folder = option("Folder to write (new, empty or an earlier export), or FILE.gguf.", "")
    to: Folder = option("Upload: org/name on the hub, or an address of a bucket.", "")
    public: bool = option("With --to: a repository that everyone may read.", False)
    dry_run: bool = option("With --to: print card and files instead of uploading them.", False)
    format: Literal["hf", "gguf"] = option("gguf: for llama.cpp and Ollama (extra [gguf]).", "hf")
    gguf_type: Literal["f16", "bf16", "q8_0"] = option("Of a GGUF file's matrices.", "f16")
    dtype: Dtype = option("Of the tensors of a folder; empty: as the run.", "")
    adapters: bool = option("Write only the adapters, as a folder for `peft`.", False)
    best: bool = option("The step with the best checkpoint.best_metric, not the newest.", False)

    def rules(self) -> Problems:
        if not self.out and not self.to:
            yield "out", "required: a folder to write; or give --to=org/name to upload"
        for name in ("public", "dry_run"):
            if getattr(self, name) and not self.to:
                yield name, "is of an upload; give --to too, or leave it out"
        if self.format == "gguf" and self.adapters:
            yield "adapters", "a GGUF file holds the whole model; leave it out to merge them"
        if self.format == "gguf" and self.dtype:
            yield "dtype", "is of a folder; give --gguf_type"
        if self.to and self.out.endswith(".gguf"):
            yield "out", f"{self.out!r} is a file, and --to uploads a folder; name a folder"
        elif self.format != "gguf" and self.out.endswith(".gguf"):
            yield "out", f"{self.out!r} is a file's name; give --format=gguf, or a folder"


class ImportOptions(JaxOptions):
    """Converts a GGUF file to a Hugging Face folder, with its tokenizer."""

    module = "import_gguf"

    file: File = option("GGUF file of a known family, or its address.")
    out: Folder = option("Folder to write: new, empty or an earlier export.")
    dtype: Literal["float32", "bfloat16", "float16"] = option("Of the tensors.", "float32")
    tokenizer: ModelPath = option("Folder or name of the tokenizer; empty: that of the file.", "")


class RandomModelOptions(JaxOptions):
    """Writes a folder of a random model of any family.

    For tests, and to try a run before a model is downloaded.
    A tiny model of --family, or one of the sizes in --model_config. Without --tokenizer it has the
    built-in tokenizer of characters.
    """

    module = "random_model"

    family: Name = option("Family of a tiny model: llama, qwen3_moe, olmo3, ...", "")
    model_config: File = option("A config.json, instead of --family.", "")
    out: Folder = option("Folder to write: new, empty or an earlier export.")
    dtype: Literal["float32", "bfloat16", "float16"] = option("Of the tensors.", "float32")
    tokenizer: ModelPath = option("Folder or name of its tokenizer; empty: characters.", "")
    seed: Natural = option("Seed of the weights.", 0)

    def rules(self) -> Problems:
        if bool(self.family) == bool(self.model_config):
            yield "family", "give either --family or --model_config"


class ControlOptions(Options):
    """Changes the layout of a running job of RL, between two steps.

    jaxrl_llm control --workdir DIR mesh.fsdp=1 mesh.tensor=4: sizes of mesh axes, mesh.rollout,
    placement.choice. Others stay as in the run's config; the word config goes back to it.
    """

    module = "control"
    positional = "layout"

    workdir: Folder = option("Folder of the run.")
    layout: tuple[str, ...] = option("KEY=VALUE; may be repeated.")
    wait_s: Annotated[float, Range("[0, inf]")] = option("Longest wait for the answer.", 600.0)


class ViewOptions(Options):
    """Shows runs: curves, samples, alerts, memory; live, in a browser.

    jaxrl_llm view WORKDIR... lays the curves of several runs over each other. On a machine that is
    reached by ssh, forward the port (ssh -L 7007:localhost:7007 HOST), or use --text.
    """

    module = "view"
    positional = "workdir"

    workdir: tuple[str, ...] = option("Folder of a run; may be repeated.")
    host: Name = option("Address to listen on (no access control).", "127.0.0.1")
    port: Port = option("Port to listen on; 0: any free port.", 7007)
    png: File = option("PNG file to write the curves to, instead (extra [plot]).", "")
    text: bool = option("Print curves and samples here, instead.", False)
    timeline: File = option(
        "PNG or SVG file to write to, instead, when devices did what (profiler.*).", ""
    )

    def rules(self) -> Problems:
        if self.png and not self.png.endswith(".png"):
            yield "png", f"{self.png!r} must end in .png"
        if self.timeline and not self.timeline.endswith((".png", ".svg")):
            yield "timeline", f"{self.timeline!r} must end in .png or .svg"
        if self.timeline and len(self.workdir) != 1:
            yield "timeline", f"is of one run, got {len(self.workdir)} folders; give one"
        if (
            len(outputs := [name for name in ("png", "text", "timeline") if getattr(self, name)])
            > 1
        ):
            yield outputs[1], f"give it or --{outputs[0]}, not both"


class ConfigsOptions(Options):
    """Lists the starter configs with machine and planned memory."""

    module = "configs"

    json: bool = option("Print a JSON list.", False)


class EnvsOptions(Options):
    """Lists the environments and tasks that other packages bring."""

    module = "envs"

    names: str = option("List what this kind offers, for example reasoning_gym.", "")
    json: bool = option("Print a JSON list.", False)


class NewOptions(Options):
    """Writes a copy of a starter config to edit.

    jaxrl_llm new NAME FILE: for example jaxrl_llm new grpo_tiny my_run.py.
    """

    module = "new"
    positional = "name"

    name: tuple[str, ...] = option("Name of the starter config, and the file to write.")

    def rules(self) -> Problems:
        if len(self.name) > 2:
            yield "name", f"takes a starter config and a file, got {len(self.name)} arguments"


COMMANDS: Mapping[str, type[Options]] = {
    "train": TrainOptions,
    "run": RunOptions,
    "evaluate": EvaluateOptions,
    "generate": GenerateOptions,
    "serve": ServeOptions,
    "plan": PlanOptions,
    "export": ExportOptions,
    "import": ImportOptions,
    "random_model": RandomModelOptions,
    "view": ViewOptions,
    "control": ControlOptions,
    "configs": ConfigsOptions,
    "envs": EnvsOptions,
    "new": NewOptions,
}
# Started only by scripts of `launch/`.
LAUNCH_ONLY_COMMANDS: Mapping[str, type[Options]] = {"serve_jetstream": ServeJetstreamOptions}
