"""Saves and restores all that a resumed run needs: arrays and JSON, one sealed folder a step.

All processes of a run make the same calls, on a folder that all of them see.
"""

import contextlib
import json
import math
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from etils import epath
from orbax.checkpoint import checkpoint_managers as policies

from jaxrl_llm.checkpoint import seal
from jaxrl_llm.config import CheckpointConfig
from jaxrl_llm.errors import UserError
from jaxrl_llm.sharding import hosts, telling

PathLike = str | os.PathLike[str]
Tree = Any  # a pytree of arrays, or of jax.ShapeDtypeStructs with shardings
Json = dict[str, Any]

_FILE_BYTES = 1 << 28  # of arrays, about: files are hashed side by side


class CheckpointError(UserError, RuntimeError):
    """A checkpoint that cannot be written or read: which path, why, what to do."""


class Saver:
    """Keeps the newest steps of a run, and the best one, in one folder; writes in the background.

    A step is visible when it is complete; a failed or killed save leaves earlier steps as they
    were. At most one save is in flight. Every step holds the number of the best step so far.
    """

    def __init__(self, directory: PathLike, config: CheckpointConfig, read_only: bool = False):
        """Makes `directory` and removes what a killed save left there, unless `read_only`."""
        self._directory = epath.Path(os.path.abspath(directory))
        self._config = config
        self._read_only = read_only
        self._best: Json = {}  # step and value; empty before there is one
        self._best_saved: Json = {}  # the same, of the last save that did not fail
        self._saving = 0  # step of the save in flight, 0: none
        self._kept = policies.AnyPreservationPolicy([])
        self._manager = self._open()

    def _open(self) -> ocp.CheckpointManager | None:
        """The manager that writes steps; None for a reader, which only looks at complete ones."""
        if self._read_only:
            return None
        # Where processes are named, they wait for each other without devices, which may be at work.
        everyone = set(range(jax.process_count())) if jax.process_count() > 1 else None
        options = ocp.CheckpointManagerOptions(
            preservation_policy=self._kept,
            cleanup_tmp_directories=True,
            create=False,  # which it refuses to processes that are named
            enable_async_checkpointing=True,
            multiprocessing_options=ocp.options.MultiprocessingOptions(active_processes=everyone),
            temporary_path_class=seal.SealedPath,
        )
        # Weights hardly compress (7 %); it takes three times as long and twice their memory.
        items = {
            "arrays": ocp.PyTreeCheckpointHandler(use_compression=False),
            "meta": ocp.JsonCheckpointHandler(),
        }
        try:
            if hosts.is_first():
                self._directory.mkdir(parents=True, exist_ok=True)
                _remove_empty(self._directory)
            hosts.told_by_first("made")  # the others wait for that
            return ocp.CheckpointManager(self._directory, options=options, item_handlers=items)
        except OSError as error:
            raise _write_error(self._directory, error) from error

    def due(self, step: int, last: int, numbers: Mapping[str, float] = {}) -> bool:
        """Returns whether to save `step` of `last`: also if `config.best_metric` is best so far."""
        config = self._config
        value = float(numbers.get(config.best_metric, math.nan))
        sign = 1.0 if config.best_mode == "max" else -1.0
        better = not self._best or sign * value > sign * self._best["value"]
        if better := better and math.isfinite(value):
            self._best = {"step": step, "value": value}
        return better or step == last or (config.every > 0 and step % config.every == 0)

    def best_step(self) -> int:
        """Returns the step with the best `config.best_metric`, 0 if the newest names none."""
        sealed = [step for step in self._steps() if (self._folder(step) / seal.SEAL).is_file()]
        return _meta(self._folder(max(sealed)))["best"].get("step", 0) if sealed else 0

    def latest_step(self) -> int:
        """The newest step, or 0; it may be damaged, but holds something."""
        return max(self._steps(), default=0)

    def _steps(self) -> list[int]:
        """The complete steps, but for folders with nothing in them."""
        if self._manager is not None:
            steps = list(self._manager.all_steps())
        else:
            is_made = self._directory.exists()
            steps = ocp.utils.checkpoint_steps(self._directory) if is_made else []
        return [step for step in steps if not is_empty(self._folder(step))]

    def _folder(self, step: int) -> epath.Path:
        return self._directory / str(step)

    @property
    def _writer(self) -> ocp.CheckpointManager:
        if self._manager is None:
            raise ValueError(f"{self._directory}: opened read-only; nothing can be saved")
        return self._manager

    @property
    def saving(self) -> bool:
        return bool(self._saving) and self._writer.is_saving_in_progress()

    def save(self, step: int, state: Tree, extra: Json) -> None:
        """Saves a step; returns when `state` is copied to the host, so that it may be donated.

        The structure of `state` is not saved. Raises CheckpointError if this save cannot begin or
        the one before it failed; with `config.checkpoint.on_failure = "continue"` it logs that.
        """
        if step < 1:
            raise ValueError(f"checkpoint step {step}: counts completed steps, at least 1")
        content = _content(state, extra, self._best)
        self.wait()
        try:
            if failure := hosts.share(self._probe() if hosts.is_first() else "")[0]:
                raise OSError(failure)
            newest = policies.LatestN(self._config.keep)
            self._kept.policies = [newest, policies.CustomSteps([self._best.get("step", 0)])]
            self._writer.save(step, args=content)
        except Exception as error:
            self._failed(step, error)
        else:
            self._saving = step

    def _probe(self) -> str:
        """Returns why nothing can be written, "" if it can."""
        # A save that fails at once leaves threads of Orbax that delay the process's end by minutes.
        probe = self._directory / "probe.tmp"
        try:
            probe.write_bytes(bytes(1 << 16))  # more than the metadata of a step
        except OSError as error:
            return str(error)
        finally:
            with contextlib.suppress(OSError):
                probe.unlink(missing_ok=True)
        return ""

    def ensure(self, step: int, state: Tree, extra: Json) -> None:
        """Saves a step unless it is saved or is 0; returns when it is on disk. As `save`."""
        self.wait()
        if step > self.latest_step():
            self.save(step, state, extra)
            self.wait()

    def release(self) -> None:
        """Waits where a save reads the arrays themselves, which an update would have to copy."""
        if jax.default_backend() == "cpu":
            self.wait()

    def wait(self) -> None:
        """Returns when the save in flight is on disk; raises as `save` if it failed."""
        saving, self._saving = self._saving, 0
        if not saving:
            return
        try:
            self._writer.wait_until_finished()
        except Exception as error:
            self._failed(saving, error)
        else:
            self._best_saved = self._best

    def _failed(self, step: int, cause: Exception) -> None:
        self._best = self._best_saved
        # The manager counts a failed step as saved; one opened again sees what is on disk.
        with contextlib.suppress(Exception):  # raises `cause` again, which is reported below
            self._writer.close()
        self._manager = self._open()
        error = _write_error(self._directory / str(step), cause)
        if self._config.on_failure == "stop":
            raise error from cause
        logging.warning("%s; going on without this checkpoint", error)

    def restore(
        self,
        abstract_state: Tree | Callable[[Json], Tree],
        partial: bool = False,
        step: int = 0,
    ) -> tuple[Tree, Json, int]:
        """Returns (state, extra, step) of the newest undamaged step.

        Damaged steps newer than it are moved aside (`damaged.STEP`) with a warning, so that the run
        can write them again. `abstract_state` has the shardings that the arrays shall have, or is a
        function that returns it for the saved `extra`. With `partial`, arrays that it lacks are not
        read. A `step` above 0 is the newest to look at. Raises CheckpointError if no step is
        undamaged, or the saved arrays have other names, shapes or dtypes than `abstract_state`.
        """
        self.wait()
        steps = [s for s in self._steps() if not step or s <= step]
        if not steps:
            raise CheckpointError(
                f"{self._directory}: no checkpoint to restore; look at latest_step() first"
            )
        for step in sorted(steps, reverse=True):
            folder = self._directory / str(step)
            if not (damage := _damage(folder)):
                state, meta = _restored(folder, abstract_state, partial)
                self._best = self._best_saved = meta["best"]
                return state, meta["extra"], step
            logging.warning("%s: damaged, %s; trying the step before it", folder, damage)
            if self._read_only:
                continue
            if hosts.is_first():
                aside = self._directory / f"damaged.{step}"
                aside.rmtree(missing_ok=True)
                folder.rename(aside)
            hosts.told_by_first("moved")  # the others wait for that
            self._writer.reload()
        raise CheckpointError(
            f"{self._directory}: all steps are damaged ({', '.join(map(str, steps))}), see the"
            " warnings above; restore the folder from a backup, or start in another --workdir"
        )

    def close(self) -> None:
        """Waits for the save in flight and lets the folder go; raises as `wait` does."""
        try:
            self.wait()
        finally:
            if self._manager is not None:
                self._manager.close()


def is_empty(folder: PathLike) -> bool:
    """Whether a folder holds no file, at any depth: a copy that was broken off, not a step."""
    return not any(files for _, _, files in os.walk(folder))


def _remove_empty(directory: epath.Path) -> None:
    """Removes the folders of steps that hold no file, so that the steps can be saved."""
    for folder in directory.iterdir():
        if folder.name.isdecimal() and folder.is_dir() and is_empty(folder):
            logging.warning("%s: empty, no checkpoint; it is removed", folder)
            folder.rmtree()


def save_tree(path: PathLike, tree: Tree, extra: Mapping[str, Any]) -> None:
    """Writes the product of a stage to `path`, which must not exist, or raises CheckpointError."""
    folder = epath.Path(os.path.abspath(path))
    if folder.exists():
        raise CheckpointError(f"{folder}: exists; remove it or choose another path")
    content = _content(tree, dict(extra), {})
    handler = ocp.CompositeCheckpointHandler()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with ocp.Checkpointer(handler, temporary_path_class=seal.SealedPath) as checkpointer:
            checkpointer.save(folder, args=content)
    except Exception as error:
        raise _write_error(folder, error) from error


def load_tree(path: PathLike, abstract_tree: Tree | Callable[[Json], Tree]) -> tuple[Tree, Json]:
    """Returns what `save_tree` wrote, split as `Saver.restore`, or raises CheckpointError."""
    folder = epath.Path(os.path.abspath(path))
    if not folder.exists():
        raise CheckpointError(f"{folder}: no such folder")
    if damage := _damage(folder):
        raise CheckpointError(f"{folder}: damaged, {damage}; remove it and run the stage again")
    tree, meta = _restored(folder, abstract_tree)
    return tree, meta["extra"]


def _named(tree: Tree) -> dict[str, Any]:
    """Returns the leaves by dotted path; the same for a dict, a dataclass or a named tuple."""
    leaves = jax.tree.leaves_with_path(tree)
    named = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    if len(named) != len(leaves):
        raise ValueError("two arrays of this tree have the same dotted path; rename one")
    return named


def _described(named: Mapping[str, Any]) -> dict[str, str]:
    return {
        name: f"{np.dtype(leaf.dtype).name}[{','.join(map(str, leaf.shape))}]"
        for name, leaf in named.items()
    }


def _content(tree: Tree, extra: Json, best: Json) -> ocp.args.Composite:
    named = {name: _to_save(array) for name, array in _named(tree).items()}
    json.dumps(extra, allow_nan=False)  # a TypeError here points at the caller
    meta = {"arrays": _described(named), "extra": extra, "best": best}
    arrays = ocp.args.PyTreeSave(named, ocdbt_target_data_file_size=_FILE_BYTES)
    return ocp.args.Composite(arrays=arrays, meta=ocp.args.JsonSave(meta))


def _to_save(array: jax.Array) -> Any:
    """Returns an array as Orbax takes it, and may keep it."""
    if jax.process_count() == 1 or len(telling.holders(array.sharding)) > 1:
        # A view: an array that the library remembers could not be donated.
        return jax.device_put(array, array.sharding, may_alias=True)
    # Of a pool that is process 0's alone: Orbax refuses what one process holds, and writes process
    # 0's copy of what is on the host.
    here = bool(array.addressable_shards)
    return np.array(array) if here else np.zeros(array.shape, array.dtype)


def _elsewhere(wanted: jax.ShapeDtypeStruct) -> jax.Array:
    """Returns an array of which this process has nothing."""
    return jax.make_array_from_single_device_arrays(
        wanted.shape, wanted.sharding, [], dtype=wanted.dtype
    )


def _meta(folder: epath.Path) -> Json:
    """Returns the JSON part of a complete step: `arrays`, `extra` and `best`."""
    return {"best": {}, **ocp.JsonCheckpointHandler().restore(folder / "meta")}


def _restored(
    folder: epath.Path, abstract: Tree | Callable[[Json], Tree], partial: bool = False
) -> tuple[Tree, Json]:
    """Returns the arrays and the JSON part of a complete step."""
    meta = _meta(folder)
    abstract = abstract(meta["extra"]) if callable(abstract) else abstract
    wanted = _named(abstract)
    compared = {k: v for k, v in meta["arrays"].items() if k in wanted or not partial}
    described = _described(wanted)
    differing = [
        f"{name} is {compared.get(name, 'absent')}, expected {described.get(name, 'absent')}"
        for name in sorted({name for name, _ in compared.items() ^ described.items()})
    ]
    if differing:
        more = [f"and {len(differing) - 5} more"] if len(differing) > 5 else []
        raise CheckpointError(
            f"{folder}: holds other arrays than this config makes:"
            f" {'; '.join(differing[:5] + more)}; resume with the config that wrote it"
        )
    # Of a pool that other processes have, there is nothing to read.
    here = {k: v for k, v in wanted.items() if v.sharding.addressable_devices}
    named = {k: _elsewhere(v) for k, v in wanted.items() if k not in here}
    if here:
        restore_args = ocp.checkpoint_utils.construct_restore_args(here)
        partial = partial or bool(named)
        args = ocp.args.PyTreeRestore(here, restore_args, partial_restore=partial)
        with contextlib.closing(ocp.PyTreeCheckpointHandler()) as handler:
            named |= handler.restore(folder / "arrays", args=args)
    leaves = [named[name] for name in wanted]
    return jax.tree.unflatten(jax.tree.structure(abstract), leaves), meta


def _write_error(path: epath.Path, cause: Exception) -> CheckpointError:
    return CheckpointError(
        f"{path}: could not be saved ({type(cause).__name__}: {cause}); check free space, quota"
        " and write permission of the folder; earlier checkpoints are untouched"
    )


def _damage(folder: epath.Path) -> str:
    """Returns `seal.damage` on every process; only process 0 looks."""
    return hosts.share(seal.damage(folder) if hosts.is_first() else "")[0]
