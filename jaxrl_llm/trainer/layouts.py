"""When a run changes its layout: by its config, by `jaxrl_llm control`, or by idle times."""

import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
from absl import logging

from jaxrl_llm.config import ConfigError, RLConfig
from jaxrl_llm.config import layout as layout_lib
from jaxrl_llm.learner import models as models_lib
from jaxrl_llm.learner import planned
from jaxrl_llm.sharding import hosts
from jaxrl_llm.trainer.balance import Balance


class Layouts:
    """The layout of each step; that of the last command or entry before it counts."""

    def __init__(self, config: RLConfig, workdir: str | os.PathLike[str]):
        self._config, self._workdir = config, pathlib.Path(workdir)
        self._by_step = scheduled(config)
        # Of earlier processes too: a resumed run changes where the run before did.
        asked = layout_lib.answers(workdir) if hosts.is_first() else []
        taken = {line["step"]: line.get("layout", "") for line in asked if not line.get("refused")}
        told = hosts.told_by_first(sorted(taken.items()))
        self._by_step |= {int(step): text for step, text in told}
        self._current = ""
        self._balance = Balance(config)

    def see(self, numbers: Mapping[str, Any]) -> None:
        """Takes in the numbers of a step, by which the split of devices may change."""
        self._balance.see(numbers)

    def change(self, step: int) -> RLConfig | None:
        """Returns the config whose layout begins with this step, None if that does not change.

        A command that cannot be followed is refused in its file and in the log.
        """
        asked = hosts.told_by_first(layout_lib.asked(self._workdir) if hosts.is_first() else "")
        if asked is not None:
            refused = ""
            try:
                checked(self._config, asked)
            except ConfigError as error:
                refused = str(error)
                logging.warning("control: %r is refused: %s", asked, refused)
            else:
                self._by_step[step] = asked
            if hosts.is_first():
                layout_lib.answer(self._workdir, step, asked, refused)
        elif better := self._better():
            logging.info("layout by idle times: %s", better)
            self._by_step[step] = better
            if hosts.is_first():
                layout_lib.answer(self._workdir, step, better, "")
        begun = max((first for first in self._by_step if first <= step), default=0)
        text = self._by_step.get(begun, "")
        if text == self._current:
            return None
        self._current = text
        return checked(self._config, text)

    def _better(self) -> str:
        """Returns the best layout by idle times that the devices can hold; "": as it is."""
        if not self._balance.is_due:
            return ""
        for text in self._balance.layouts(checked(self._config, self._current)):
            try:
                checked(self._config, text)
            except ConfigError:
                continue
            return text
        return ""


def scheduled(config: RLConfig) -> dict[int, str]:
    """Returns the layouts of `config.trainer.layouts` by their first steps."""
    parts = (text.partition(" ") for text in config.trainer.layouts)
    return {int(step): text.strip() for step, _, text in parts}


def checked(config: RLConfig, text: str) -> RLConfig:
    """Returns the config with a layout that the devices of this run can hold.

    Raises:
      ConfigError: If they cannot, or `text` is no layout.
    """
    found = layout_lib.changed(config, text)
    if config.placement.hosts == "own" and found.placement != config.placement:
        message = "pools on hosts of their own stay as they are (placement.hosts='own')"
        raise ConfigError(f"layout {text!r}: {message}")
    models = models_lib.of_job(found, planned.meshes(found))
    if models.gallery is not None and found.placement.choice != "colocate":
        raise ConfigError(
            f"placement.choice: {found.placement.choice!r}, but the model reads images, which roles"
            " on devices of their own do not; change mesh.* alone"
        )
    planned.check(found, jax.devices())
    return found
