"""Saves and restores the state of a run: arrays and JSON, one sealed folder per step.

All processes of a run make the same calls, on a folder that all of them share.
"""

import contextlib
import functools
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from absl import logging
from etils import epath
from orbax.checkpoint import checkpoint_managers as policies

from jaxrl_llm.checkpoint import seal
from jaxrl_llm.checkpoint.memory_copies import MemoryCopies
from jaxrl_llm.config import CheckpointConfig
from jaxrl_llm.errors import UserError
from jaxrl_llm.sharding import kv_store_broadcast, multihost
from jaxrl_llm.storage import files

PathLike = str | os.PathLike[str]
Tree = Any  # a pytree of arrays, or of jax.ShapeDtypeStructs with shardings
Json = dict[str, Any]

_FILE_BYTES = 1 << 28  # approximate size of array files, which are hashed in parallel


class CheckpointError(UserError, RuntimeError):
    """A checkpoint cannot be written or read; the message has path, cause and remedy."""


class Saver:
    """Keeps the newest steps of a run, and the best one, in one folder; saves asynchronously.

    A step becomes visible when it is complete; a failed or killed save leaves earlier steps intact.
    At most one save is in flight. Every step records the number of the best step so far.
    """

    def __init__(
        self,
        directory: PathLike,
        config: CheckpointConfig,
        read_only: bool = False,
        check_owner: Callable[[], None] = lambda: None,
        memory: MemoryCopies | None = None,
    ):
        """Creates `directory` and removes leftovers of a killed save, unless `read_only`.

        `check_owner` raises if another process has taken over the folder; nothing is saved then.
        `memory` holds newer steps, of a run that has crashed.
        """
        self._directory = _absolute(directory)
        self._memory = memory
        self._is_remote = files.in_bucket(self._directory)
        self._check_owner = check_owner
        self._config = config
        self._read_only = read_only
        self._best: Json = {}  # step and value; empty before the first
        self._best_saved: Json = {}  # `_best` at the last successful save
        self._saving = 0  # step of the save in flight; 0: none
        self._preservation = policies.AnyPreservationPolicy([])
        self._manager = self._open()

    def _open(self) -> ocp.CheckpointManager | None:
        """The manager that writes steps; None if read-only."""
        if self._read_only:
            return None
        # With named processes Orbax has barriers that do not use the devices, which may be busy.
        processes = set(range(jax.process_count())) if jax.process_count() > 1 else None
        options = ocp.CheckpointManagerOptions(
            preservation_policy=self._preservation,
            cleanup_tmp_directories=True,
            create=False,  # not supported with named processes
            enable_async_checkpointing=True,
            multiprocessing_options=ocp.options.MultiprocessingOptions(active_processes=processes),
            temporary_path_class=seal.path_class(self._directory, self._check_owner),
        )
        # Compression saves only 7 % of weights, but takes three times as long and twice the memory.
        items = {
            "arrays": ocp.PyTreeCheckpointHandler(use_compression=False),
            "meta": ocp.JsonCheckpointHandler(),
        }
        try:
            if multihost.is_first() and not self._is_remote:
                self._directory.mkdir(parents=True, exist_ok=True)
                _remove_empty(self._directory)
            multihost.broadcast_from_host0("made")  # a barrier for the others
            return ocp.CheckpointManager(self._directory, options=options, item_handlers=items)
        except OSError as error:
            raise _write_error(self._directory, error) from error

    def should_save(self, step: int, last: int, numbers: Mapping[str, float] = {}) -> bool:
        """Whether to save `step` of `last`: by interval, at the end, or if it is the best so far.

        `numbers` are the metrics that may contain `config.best_metric`.
        """
        config = self._config
        value = float(numbers.get(config.best_metric, math.nan))
        sign = 1.0 if config.best_mode == "max" else -1.0
        better = not self._best or sign * value > sign * self._best["value"]
        if better := better and math.isfinite(value):
            self._best = {"step": step, "value": value}
        return better or step == last or (config.every > 0 and step % config.every == 0)

    def best_step(self) -> int:
        """The step with the best `config.best_metric`; 0 if the newest step records none."""
        seals = {step: self._folder(step) / seal.SEAL_FILE for step in self._steps()}
        sealed = [step for step, path in seals.items() if files.is_file(path)]
        return _meta(self._folder(max(sealed)))["best"].get("step", 0) if sealed else 0

    def latest_step(self) -> int:
        """The newest step that is not empty (it may be damaged), or 0."""
        return max(self._steps(), default=0)

    @property
    def has_steps(self) -> bool:
        """Whether there is a step to restore, in the folder or in memory."""
        return bool(self._steps()) or self._newest_copy > 0

    @functools.cached_property
    def _newest_copy(self) -> int:
        """The newest step in memory, left by a crash, if it is newer than those in the folder."""
        return 0 if self._memory is None else self._memory.newest(self.latest_step())

    def _steps(self) -> list[int]:
        """The complete steps, without empty folders."""
        if self._manager is not None and not self._is_remote:
            steps = list(self._manager.all_steps())
        else:
            steps = seal.steps(self._directory)
        return [step for step in steps if not is_empty(self._folder(step))]

    def _folder(self, step: int) -> epath.Path:
        return self._directory / str(step)

    @property
    def _writer(self) -> ocp.CheckpointManager:
        if self._manager is None:
            raise ValueError(f"{self._directory}: opened read-only; nothing can be saved")
        return self._manager

    @property
    def is_saving(self) -> bool:
        return bool(self._saving) and self._writer.is_saving_in_progress()

    def save(self, step: int, state: Tree, extra: Json) -> None:
        """Starts saving a step; returns when `state` is copied to the host and may be donated.

        The tree structure of `state` is not saved. Raises CheckpointError if this save cannot begin
        or the previous one failed, or logs it with `config.checkpoint.on_failure = "continue"`.
        """
        if step < 1:
            raise ValueError(f"checkpoint step {step}: counts completed steps, at least 1")
        save_args = _save_args(state, extra, self._best)
        self.wait()
        self._check_owner()
        try:
            if failure := multihost.allgather(self._probe() if multihost.is_first() else "")[0]:
                raise OSError(failure)
            newest = policies.LatestN(self._config.keep)
            self._preservation.policies = [
                newest,
                policies.CustomSteps([self._best.get("step", 0)]),
            ]
            self._writer.save(step, args=save_args)
        except Exception as error:
            self._handle_failure(step, error)
        else:
            self._saving = step

    def copy_to_memory(self, step: int, state: Tree, extra: Json) -> None:
        """Copies a step to the hosts' memory; returns when `state` may be donated."""
        if self._memory is None:
            raise ValueError("this saver was made without copies in memory")
        leaves = _leaves_by_path(state)
        self._memory.save(step, leaves, _step_meta(leaves, extra, self._best))

    def _probe(self) -> str:
        """Why the folder cannot be written, or "" if it can."""
        # A save that fails immediately leaves Orbax threads that delay process exit by minutes.
        probe = self._directory / "probe.tmp"
        try:
            files.replace_bytes(probe, bytes(1 << 16))  # more than the metadata of a step
        except OSError as error:
            return str(error)
        finally:
            with contextlib.suppress(OSError):
                files.remove(probe)
        return ""

    def ensure_saved(self, step: int, state: Tree, extra: Json) -> None:
        """Saves a step unless it is 0 or already saved, and waits for it. Raises as `save` does."""
        self.wait()
        if step > self.latest_step():
            self.save(step, state, extra)
            self.wait()
        self._remove_copies()

    def _remove_copies(self) -> None:
        """Removes the copies in memory: all steps are in the folder."""
        if self._memory is not None:
            self._memory.remove()

    def wait_before_donation(self) -> None:
        """Waits on CPU, where a save reads the live arrays, which an update could not donate."""
        if jax.default_backend() == "cpu":
            self.wait()

    def wait(self) -> None:
        """Waits until the save in flight is on disk; raises as `save` does if it failed."""
        saving, self._saving = self._saving, 0
        if not saving:
            return
        try:
            self._writer.wait_until_finished()
        except Exception as error:
            self._handle_failure(saving, error)
        else:
            self._best_saved = self._best

    def _handle_failure(self, step: int, cause: Exception) -> None:
        self._best = self._best_saved
        # The manager counts a failed step as saved; a new one reads the steps from disk.
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
        """Restores (state, extra, step) from the newest undamaged step.

        Damaged steps newer than it are renamed to `damaged.STEP`, in a bucket removed, with a
        warning, so that the run can write them again. `abstract_state` has the target shardings, or
        is a function that returns it for the saved `extra`. With `partial`, saved arrays that it
        lacks are skipped. A `step` above 0 is the newest one to try. Raises CheckpointError if all
        steps are damaged, or if the saved arrays have other names, shapes or dtypes than
        `abstract_state`.
        """
        self.wait()
        steps = [s for s in self._steps() if not step or s <= step]
        if self._memory is not None and not step:
            if self._newest_copy:
                return self._restore_copy(self._memory, self._newest_copy, abstract_state)
            self._memory.forget_after(max(steps, default=0))
        if not steps:
            raise CheckpointError(
                f"{self._directory}: no checkpoint to restore; look at latest_step() first"
            )
        for step in sorted(steps, reverse=True):
            folder = self._directory / str(step)
            if not (damage := _damage(folder)):
                state, meta = _read_step(folder, abstract_state, partial)
                self._best = self._best_saved = meta["best"]
                return state, meta["extra"], step
            logging.warning("%s: damaged, %s; trying the step before it", folder, damage)
            if self._read_only:
                continue
            if multihost.is_first() and self._is_remote:
                files.remove_tree(folder)  # it would have to be copied, byte by byte
            elif multihost.is_first():
                moved_folder = self._directory / f"damaged.{step}"
                moved_folder.rmtree(missing_ok=True)
                folder.rename(moved_folder)
            multihost.broadcast_from_host0("moved")  # a barrier for the others
            self._writer.reload()
        raise CheckpointError(
            f"{self._directory}: all steps are damaged ({', '.join(map(str, steps))}), see the"
            " warnings above; restore the folder from a backup, or start in another --workdir"
        )

    def _restore_copy(
        self, memory: MemoryCopies, step: int, abstract_state: Tree | Callable[[Json], Tree]
    ) -> tuple[Tree, Json, int]:
        copy = memory.open()
        meta = copy.meta
        abstract, expected = _expected(f"copy of step {step}", meta, abstract_state, False)
        arrays = copy.read(expected)
        memory.forget_after(step)
        self._best = self._best_saved = meta["best"]
        logging.info("step %d is read from the memory of the hosts", step)
        return _with_leaves(abstract, expected, arrays), meta["extra"], step

    def close(self) -> None:
        """Waits for the save in flight and closes the manager; raises as `wait` does.

        The run has ended, saved: its copies in memory are removed.
        """
        try:
            self.wait()
            self._remove_copies()
        finally:
            if self._memory is not None:
                self._memory.close()
            if self._manager is not None:
                self._manager.close()


def is_empty(folder: PathLike) -> bool:
    """Whether a folder holds no file at any depth: an interrupted copy, not a checkpoint."""
    if files.in_bucket(folder):
        return not files.is_file(epath.Path(folder) / seal.SEAL_FILE)
    return not any(files for _, _, files in os.walk(folder))


def _remove_empty(directory: epath.Path) -> None:
    """Removes step folders without files, so that these steps can be saved."""
    for folder in directory.iterdir():
        if folder.name.isdecimal() and folder.is_dir() and is_empty(folder):
            logging.warning("%s: empty, no checkpoint; it is removed", folder)
            folder.rmtree()


def _absolute(path: PathLike) -> epath.Path:
    return epath.Path(path if files.in_bucket(path) else os.path.abspath(path))


def tree_exists(path: PathLike) -> bool:
    """Whether `save_tree` has completed `path`."""
    folder = _absolute(path)
    if files.in_bucket(folder):
        return files.is_file(folder / seal.SEAL_FILE)
    return bool(folder.exists())


def save_tree(path: PathLike, tree: Tree, extra: Mapping[str, Any]) -> None:
    """Writes the result of a stage to `path`; raises CheckpointError, also if `path` exists."""
    folder = _absolute(path)
    if tree_exists(folder):
        raise CheckpointError(f"{folder}: exists; remove it or choose another path")
    save_args = _save_args(tree, dict(extra), {})
    path_class = seal.path_class(folder)
    handler = ocp.CompositeCheckpointHandler(
        composite_options=ocp.CompositeOptions(temporary_path_class=path_class)
    )
    try:
        if not files.in_bucket(folder):
            folder.parent.mkdir(parents=True, exist_ok=True)
        elif multihost.is_first():
            files.remove_tree(folder)  # left by a killed process
        multihost.broadcast_from_host0("made")  # a barrier for the others
        with ocp.Checkpointer(handler, temporary_path_class=path_class) as checkpointer:
            checkpointer.save(folder, args=save_args)
    except Exception as error:
        raise _write_error(folder, error) from error


def load_tree(path: PathLike, abstract_tree: Tree | Callable[[Json], Tree]) -> tuple[Tree, Json]:
    """Reads (tree, extra) written by `save_tree` in the shardings of `abstract_tree`.

    Raises CheckpointError if it is missing, damaged or has other arrays.
    """
    folder = _absolute(path)
    if not files.exists(folder):
        raise CheckpointError(f"{folder}: no such folder")
    if damage := _damage(folder):
        raise CheckpointError(f"{folder}: damaged, {damage}; remove it and run the stage again")
    tree, meta = _read_step(folder, abstract_tree)
    return tree, meta["extra"]


def _leaves_by_path(tree: Tree) -> dict[str, Any]:
    """Leaves by dotted path; the same for a dict, a dataclass or a named tuple."""
    leaves = jax.tree.leaves_with_path(tree)
    leaf_of_path = {
        jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves
    }
    if len(leaf_of_path) != len(leaves):
        raise ValueError("two arrays of this tree have the same dotted path; rename one")
    return leaf_of_path


def _array_specs(leaves: Mapping[str, Any]) -> dict[str, str]:
    return {
        name: f"{np.dtype(leaf.dtype).name}[{','.join(map(str, leaf.shape))}]"
        for name, leaf in leaves.items()
    }


def _step_meta(leaves: Mapping[str, Any], extra: Json, best: Json) -> Json:
    json.dumps(extra, allow_nan=False)  # a TypeError here has the caller in its stack
    return {"arrays": _array_specs(leaves), "extra": extra, "best": best}


def _save_args(tree: Tree, extra: Json, best: Json) -> ocp.args.Composite:
    arrays_by_path = {name: _saveable_array(array) for name, array in _leaves_by_path(tree).items()}
    meta = _step_meta(arrays_by_path, extra, best)
    arrays = ocp.args.PyTreeSave(arrays_by_path, ocdbt_target_data_file_size=_FILE_BYTES)
    return ocp.args.Composite(arrays=arrays, meta=ocp.args.JsonSave(meta))


def _saveable_array(array: jax.Array) -> Any:
    """The array in a form that Orbax accepts and may hold on to."""
    if jax.process_count() == 1 or len(kv_store_broadcast.hosts_of(array.sharding)) > 1:
        # A view: Orbax keeps a reference, and a referenced array could not be donated.
        return jax.device_put(array, array.sharding, may_alias=True)
    # The array lives in a pool of process 0 alone. Orbax rejects arrays of a single process, but
    # writes process 0's copy of a host array.
    is_addressable = bool(array.addressable_shards)
    return np.array(array) if is_addressable else np.zeros(array.shape, array.dtype)


def _non_addressable_array(spec: jax.ShapeDtypeStruct) -> jax.Array:
    """An array none of whose shards are on this process."""
    return jax.make_array_from_single_device_arrays(spec.shape, spec.sharding, [], dtype=spec.dtype)


def _meta(folder: epath.Path) -> Json:
    """The JSON part of a complete step: `arrays`, `extra` and `best`."""
    return {"best": {}, **ocp.JsonCheckpointHandler().restore(folder / "meta")}


def _read_step(
    folder: epath.Path, abstract: Tree | Callable[[Json], Tree], partial: bool = False
) -> tuple[Tree, Json]:
    """The arrays and the JSON part of a complete step."""
    meta = _meta(folder)
    abstract, expected = _expected(folder, meta, abstract, partial)
    # Arrays in pools of other processes are not read here.
    addressable = {k: v for k, v in expected.items() if v.sharding.addressable_devices}
    arrays = {k: _non_addressable_array(v) for k, v in expected.items() if k not in addressable}
    if addressable:
        restore_args = ocp.checkpoint_utils.construct_restore_args(addressable)
        partial = partial or bool(arrays)
        args = ocp.args.PyTreeRestore(addressable, restore_args, partial_restore=partial)
        with contextlib.closing(ocp.PyTreeCheckpointHandler()) as handler:
            arrays |= handler.restore(folder / "arrays", args=args)
    return _with_leaves(abstract, expected, arrays), meta


def _with_leaves(abstract: Tree, names: Iterable[str], arrays: Mapping[str, jax.Array]) -> Tree:
    """A tree like `abstract` of the arrays with these names, in its order."""
    leaves = [arrays[name] for name in names]
    return jax.tree.unflatten(jax.tree.structure(abstract), leaves)


def _expected(
    where: PathLike, meta: Json, abstract: Tree | Callable[[Json], Tree], partial: bool
) -> tuple[Tree, dict[str, jax.ShapeDtypeStruct]]:
    """The tree to restore, and its leaves by path, if they are those that were saved."""
    abstract = abstract(meta["extra"]) if callable(abstract) else abstract
    expected = _leaves_by_path(abstract)
    saved_specs = {k: v for k, v in meta["arrays"].items() if k in expected or not partial}
    expected_specs = _array_specs(expected)
    mismatches = [
        f"{name} is {saved_specs.get(name, 'absent')},"
        f" expected {expected_specs.get(name, 'absent')}"
        for name in sorted({name for name, _ in saved_specs.items() ^ expected_specs.items()})
    ]
    if mismatches:
        rest = [f"and {len(mismatches) - 5} more"] if len(mismatches) > 5 else []
        raise CheckpointError(
            f"{where}: holds other arrays than this config makes:"
            f" {'; '.join(mismatches[:5] + rest)}; resume with the config that wrote it"
        )
    return abstract, expected


def _write_error(path: epath.Path, cause: Exception) -> CheckpointError:
    return CheckpointError(
        f"{path}: could not be saved ({type(cause).__name__}: {cause}); check free space, quota"
        " and write permission of the folder; earlier checkpoints are untouched"
    )


def _damage(folder: epath.Path) -> str:
    """`seal.damage` of process 0, on every process."""
    return multihost.allgather(seal.damage(folder) if multihost.is_first() else "")[0]
