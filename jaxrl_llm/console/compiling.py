"""Says what XLA compiles while it compiles: JAX tells its listeners, by thread."""

import functools
import re
import threading
from typing import Any

from jax import monitoring

from jaxrl_llm.console.screen import SCREEN, Work

_LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
_BEGUN = "/jax/compilation_cache/compile_requests_use_cache"
_COMPILED = "/jax/core/compile/backend_compile_duration"


@functools.cache
def show() -> None:
    """Shows every compilation of this process from now on, if there is a compilation cache."""
    here = threading.local()

    def on_event(event: str, **_: Any) -> None:
        if event == _BEGUN:
            SCREEN.end(getattr(here, "work", Work("")))  # that failed
            name = re.sub(r"^jit\(_*|\)$", "", getattr(here, "name", "a program"))
            here.work = Work(f"compiling {name.replace('_', ' ')}")
            SCREEN.begin(here.work)

    def on_duration(event: str, duration_secs: float, **about: Any) -> None:
        del duration_secs
        if event == _LOWERED:
            here.name = str(about.get("fun_name", "a program"))
        elif event == _COMPILED:
            SCREEN.end(getattr(here, "work", Work("")))

    monitoring.register_event_listener(on_event)
    monitoring.register_event_duration_secs_listener(on_duration)
