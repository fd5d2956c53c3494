"""Layout changes of a run: from its config, `jaxrl_llm control`, or idle times."""

import os
from collections.abc import Mapping
from typing import Any

from absl import logging

from jaxrl_llm.config import ConfigError, RLConfig, layout_requests
from jaxrl_llm.learner import job_models
from jaxrl_llm.planning import resolve_sizes
from jaxrl_llm.sharding import mesh as mesh_lib
from jaxrl_llm.sharding import multihost
from jaxrl_llm.storage import files
from jaxrl_llm.trainer.idle_balancing import IdleTimeBalancer


class RelayoutSchedule:
    """The layout of each step: set by the last command or config entry up to it."""

    def __init__(self, config: RLConfig, workdir: str | os.PathLike[str]):
        self._config, self._workdir = config, files.run_path(workdir)
        self._layout_by_step = layouts_by_step(config)
        # Also commands answered by earlier processes: a resumed run repeats their changes.
        answers = layout_requests.read_answers(workdir) if multihost.is_first() else []
        accepted = {
            line["step"]: line.get("layout", "") for line in answers if not line.get("refused")
        }
        shared = multihost.broadcast_from_host0(sorted(accepted.items()))
        self._layout_by_step |= {int(step): text for step, text in shared}
        self._current_layout = ""
        self._balance = IdleTimeBalancer(config)

    def observe(self, numbers: Mapping[str, Any]) -> None:
        """Records the metrics of a step, which may lead to another split of the devices."""
        self._balance.observe(numbers)

    def new_config(self, step: int) -> RLConfig | None:
        """The config of a layout that starts with this step, None if nothing changes.

        A command that cannot be executed is refused in its answer file and in the log.
        """
        command = multihost.broadcast_from_host0(
            layout_requests.pending_request(self._workdir) if multihost.is_first() else ""
        )
        if command is not None:
            reason = ""
            try:
                config_with_layout(self._config, command)
            except ConfigError as error:
                reason = str(error)
                logging.warning("control: %r is refused: %s", command, reason)
            else:
                self._layout_by_step[step] = command
            if multihost.is_first():
                layout_requests.answer_request(self._workdir, step, command, reason)
        elif layout := self._faster_layout():
            logging.info("layout by idle times: %s", layout)
            self._layout_by_step[step] = layout
            if multihost.is_first():
                layout_requests.answer_request(self._workdir, step, layout, "")
        first_step = max((first for first in self._layout_by_step if first <= step), default=0)
        text = self._layout_by_step.get(first_step, "")
        if text == self._current_layout:
            return None
        self._current_layout = text
        return config_with_layout(self._config, text)

    def _faster_layout(self) -> str:
        """The fastest layout by idle times that the devices can hold; "": no change."""
        if not self._balance.is_due:
            return ""
        for text in self._balance.candidate_layouts(
            config_with_layout(self._config, self._current_layout)
        ):
            try:
                config_with_layout(self._config, text)
            except ConfigError:
                continue
            return text
        return ""


def layouts_by_step(config: RLConfig) -> dict[int, str]:
    """The layouts of `config.trainer.layouts`, by first step."""
    parts = (text.partition(" ") for text in config.trainer.layouts)
    return {int(step): text.strip() for step, _, text in parts}


def config_with_layout(config: RLConfig, text: str) -> RLConfig:
    """The config with another layout, checked against the devices of this run.

    Raises:
      ConfigError: If they cannot hold it, or `text` is no layout.
    """
    new_config = layout_requests.apply_layout(config, text)
    if config.placement.hosts == "own" and new_config.placement != config.placement:
        message = "pools on hosts of their own stay as they are (placement.hosts='own')"
        raise ConfigError(f"layout {text!r}: {message}")
    models = job_models.make_models(new_config, resolve_sizes.resolved_meshes(new_config))
    if models.image_feature_cache is not None and new_config.placement.choice != "colocate":
        raise ConfigError(
            f"placement.choice: {new_config.placement.choice!r}, but the model reads images,"
            " which roles on devices of their own do not; change mesh.* alone"
        )
    resolve_sizes.check_memory(new_config, mesh_lib.run_devices())
    return new_config
