"""The Hugging Face hub: names resolved to commits, files listed, downloaded or read by ranges.

All requests go through `huggingface_hub`, which reads `HF_TOKEN`, `HF_HOME`, `HF_HUB_OFFLINE` and
`HF_ENDPOINT`. Every failure becomes a `HubError` that says what to do.
"""

import contextlib
import difflib
import fnmatch
import glob
import logging
import os
import pathlib
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import huggingface_hub
from huggingface_hub import constants, errors
from huggingface_hub.utils import build_hf_headers, get_session, hf_raise_for_status

from jaxrl_llm.errors import UserError
from jaxrl_llm.storage.address import HubAddress

T = TypeVar("T")

logger = logging.getLogger(__name__)

# Seconds before each further attempt of a request that the hub refused for the moment, and of one
# that did not reach it.
RETRY_DELAYS_S = (1.0, 2.0, 4.0, 8.0, 16.0)
CONNECTION_DELAYS_S = (1.0, 2.0)
MAX_RETRY_AFTER_S = 120.0  # a longer wait that the hub asks for is an error
_BUSY = frozenset({408, 425, 429, 500, 502, 503, 504})
# huggingface_hub's HTTP library has changed its name between releases.
_HTTP_LIBRARIES = ("httpx2", "httpcore2", "httpx", "httpcore", "requests", "urllib3")
_OFFLINE_REMEDY = "unset HF_HUB_OFFLINE, or download it first where there is a network"


class HubError(UserError):
    """A name or file of the hub that cannot be read, with the remedy."""


class HubFile(NamedTuple):
    """A file of a repository."""

    path: str  # within the repository
    num_bytes: int


def resolve_commit(address: HubAddress) -> HubAddress:
    """The address with the commit that its revision names at this moment.

    Without a network, or with `HF_HUB_OFFLINE`, the commit that the cache holds for the revision.

    Raises:
      HubError: If the repository or revision is missing, or may not be read.
    """
    if address.commit:
        return address
    with _explain_errors(address):
        try:
            info = retried(
                lambda: _api().repo_info(
                    address.repo, revision=address.revision, repo_type=address.repo_type
                ),
                address,
            )
        except Exception as error:
            commit = _cached_commit(address) if _is_unreachable(error) else ""
            if not commit:
                raise
            if not is_offline():
                logger.warning(
                    "%s: the hub cannot be reached (%s); takes commit %s from the cache",
                    address.name, error, commit,
                )  # fmt: skip
            return address._replace(commit=commit)
    commit = str(info.sha)
    _remember_commit(address, commit)
    return address._replace(commit=commit)


def list_files(address: HubAddress) -> tuple[HubFile, ...]:
    """All files at or below `address.path` in order of their names; pattern characters are literal.

    Without a network, those that the cache holds.

    Raises:
      HubError: If the repository, revision or path is missing, or may not be read.
    """
    with _explain_errors(address):
        try:
            # Listed from the root: the path may be a file, of which the hub lists nothing.
            entries = retried(lambda: list(_tree(address)), address)
            files = [HubFile(entry.path, entry.size) for entry in entries]
        except Exception as error:
            folder = cached_folder(resolve_commit(address)) if _is_unreachable(error) else None
            if folder is None:
                raise
            paths = (path for path in folder.rglob("*") if path.is_file())
            files = [HubFile(str(p.relative_to(folder)), p.stat().st_size) for p in paths]
    prefix = f"{address.path}/"
    below = [
        file
        for file in files
        if not address.path or file.path == address.path or file.path.startswith(prefix)
    ]
    if not below:
        raise _missing_path(address, [file.path for file in files])
    return tuple(sorted(below))


def matching_files(address: HubAddress) -> tuple[HubFile, ...]:
    """The files that the pattern `address.path` names; `*` and `?` do not match a slash, `**` does.

    Raises:
      HubError: If there is none, or the repository may not be read.
    """
    files = list_files(address._replace(path=""))
    pattern = address.path.split("/")
    if matches := [file for file in files if _matches(file.path.split("/"), pattern)]:
        return tuple(matches)
    raise _missing_path(address, [file.path for file in files])


def _matches(parts: Sequence[str], pattern: Sequence[str]) -> bool:
    if not pattern:
        return not parts
    if pattern[0] == "**":
        return any(_matches(parts[i:], pattern[1:]) for i in range(len(parts) + 1))
    same = bool(parts) and fnmatch.fnmatchcase(parts[0], pattern[0])
    return same and _matches(parts[1:], pattern[1:])


def download(address: HubAddress, paths: Iterable[str]) -> pathlib.Path:
    """Downloads files into the cache of `huggingface_hub`; what is there already is not read again.

    A download that broke goes on where it stopped, in this process or the next.

    Args:
      paths: Of files, from the root of the repository.

    Returns:
      The local folder of the repository at this commit; the files lie below by their paths.

    Raises:
      HubError: If a file is missing, may not be read, or stays unreachable.
    """
    address, names = resolve_commit(address), tuple(paths)
    cached = _cache_folder(address) / "snapshots" / address.commit
    if all((cached / name).is_file() for name in names):
        return cached
    if not is_offline():
        logger.info("downloading %d files of %s", len(names), address.name)
    with _explain_errors(address):
        folder = retried(
            lambda: huggingface_hub.snapshot_download(
                address.repo,
                repo_type=address.repo_type,
                revision=address.commit,
                allow_patterns=[glob.escape(name) for name in names],
            ),
            address,
        )
    for name in names:
        if not (pathlib.Path(folder) / name).is_file():
            raise _missing_path(address._replace(path=name), [])
    return pathlib.Path(folder)


def read_range(address: HubAddress, path: str, begin: int, end: int) -> bytes:
    """The bytes [begin, end) of a file, by one request; nothing is cached.

    Raises:
      HubError: If the file is missing, shorter, may not be read, or stays unreachable.
    """
    if end <= begin:
        return b""
    url = huggingface_hub.hf_hub_url(
        address.repo, path, repo_type=address.repo_type, revision=address.exact_revision
    )
    if is_offline():
        raise HubError(f"{address.name}/{path}: HF_HUB_OFFLINE is set; {_OFFLINE_REMEDY}")

    def read() -> bytes:
        # Redirects lead to storage, which gets no token: the HTTP library drops it there.
        headers = {**build_hf_headers(), "Range": f"bytes={begin}-{end - 1}"}
        headers["Accept-Encoding"] = "identity"
        response = get_session().get(
            url,
            headers=headers,
            timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
            follow_redirects=True,
        )
        hf_raise_for_status(response)
        data = response.content if response.status_code == 206 else response.content[begin:end]
        if len(data) != end - begin:
            raise HubError(
                f"{address.name}/{path}: {len(data)} bytes came for the range {begin} to {end};"
                " the file is shorter than the header of it says, or a proxy cuts answers"
            )
        return data

    with _explain_errors(address._replace(path=path)):
        return retried(read, address)


def is_offline() -> bool:
    """Whether `HF_HUB_OFFLINE` forbids requests."""
    return bool(constants.HF_HUB_OFFLINE)


def _api() -> huggingface_hub.HfApi:
    return huggingface_hub.HfApi(library_name="jaxrl_llm")


def _tree(address: HubAddress) -> Iterator[Any]:
    for entry in _api().list_repo_tree(
        address.repo,
        recursive=True,
        revision=address.exact_revision,
        repo_type=address.repo_type,
    ):
        if isinstance(entry, huggingface_hub.hf_api.RepoFile):
            yield entry


def _cache_folder(address: HubAddress) -> pathlib.Path:
    name = "--".join([f"{address.repo_type}s", *address.repo.split("/")])
    return pathlib.Path(constants.HF_HUB_CACHE).expanduser() / name


def _cached_commit(address: HubAddress) -> str:
    """The commit that the cache has for a revision, "" if none."""
    with contextlib.suppress(OSError):
        return (_cache_folder(address) / "refs" / address.revision).read_text().strip()
    return ""


def cached_folder(address: HubAddress) -> pathlib.Path | None:
    """The folder of a repository's commit in the cache, which may lack files; None without one."""
    folder = _cache_folder(address) / "snapshots" / address.commit
    return folder if address.commit and folder.is_dir() else None


def _remember_commit(address: HubAddress, commit: str) -> None:
    """Writes the commit of a branch where `huggingface_hub` looks for it when offline."""
    path = _cache_folder(address) / "refs" / address.revision
    with contextlib.suppress(OSError):  # the cache may be read-only
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        partial.write_text(commit)
        os.replace(partial, path)


def retried(request: Callable[[], T], address: HubAddress) -> T:
    """The result of a request that is repeated while the hub is busy or breaks off."""
    attempt = 0
    while True:
        try:
            return request()
        except Exception as error:
            delays = RETRY_DELAYS_S if http_status(error) in _BUSY else CONNECTION_DELAYS_S
            is_temporary = http_status(error) in _BUSY or _is_connection_error(error)
            if not is_temporary or attempt >= len(delays):
                raise
            # A part of the delay is random, so that the hosts of a run do not come back together.
            delay = max(delays[attempt] * random.uniform(0.75, 1.25), _retry_after_s(error))
            if delay > MAX_RETRY_AFTER_S:
                raise
            attempt += 1
            logger.warning(
                "%s: the hub answers %s; tries again in %.0f s (attempt %d of %d)",
                address.name, http_status(error) or type(error).__name__, delay,
                attempt + 1, len(delays) + 1,
            )  # fmt: skip
            time.sleep(delay)


def http_status(error: BaseException) -> int:
    """The HTTP status of an error or of its cause; 0 if there was no answer."""
    for cause in _chain(error):
        status = getattr(getattr(cause, "response", None), "status_code", None)
        if isinstance(status, int):
            return status
    return 0


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _retry_after_s(error: BaseException) -> float:
    for cause in _chain(error):
        headers = getattr(getattr(cause, "response", None), "headers", {})
        with contextlib.suppress(ValueError, TypeError, KeyError):
            return float(headers["Retry-After"])
    return 0.0


def _is_connection_error(error: BaseException) -> bool:
    return any(
        type(cause).__module__.partition(".")[0] in _HTTP_LIBRARIES and not http_status(cause)
        for cause in _chain(error)
    ) and not any(isinstance(cause, errors.OfflineModeIsEnabled) for cause in _chain(error))


def _is_unreachable(error: BaseException) -> bool:
    """Whether the hub did not answer at all, so that its cache may."""
    offline = any(isinstance(cause, errors.OfflineModeIsEnabled) for cause in _chain(error))
    return offline or _is_connection_error(error)


@contextlib.contextmanager
def _explain_errors(address: HubAddress) -> Iterator[None]:
    """Turns errors of `huggingface_hub` into a `HubError` that says what to do."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise HubError(f"{address.name}: {explanation(address, error)}") from error


def explanation(address: HubAddress, error: Exception) -> str:
    """The fault and its remedy in words."""
    kind = "datasets/" if address.repo_type == "dataset" else ""
    page = f"{constants.ENDPOINT}/{kind}{address.repo}"
    status = http_status(error)
    has_token = bool(huggingface_hub.get_token())
    log_in = "set HF_TOKEN, or run `hf auth login`"
    causes = list(_chain(error))
    if any(isinstance(cause, errors.GatedRepoError) for cause in causes):
        if has_token:
            return f"is gated, and your token has no access; accept its terms on {page}"
        return f"is gated; accept its terms on {page}, then {log_in}"
    if any(isinstance(cause, errors.RevisionNotFoundError) for cause in causes):
        return f"has no branch, tag or commit {address.revision!r}{_revision_hint(address)}"
    if any(isinstance(cause, errors.EntryNotFoundError) for cause in causes) and status == 404:
        return f"has no such file; its files are on {page}/tree/{address.revision}"
    if any(isinstance(cause, errors.RepositoryNotFoundError) for cause in causes):
        access = "your token has no access to it" if has_token else f"private: then {log_in}"
        return (
            f"no {address.repo_type} of this name on {constants.ENDPOINT} (or {access}), and no"
            f" such local path{_name_hint(address)}"
        )
    if status == 401:
        return f"the token is not valid (401); {log_in} with another one"
    if status == 403:
        return f"access denied (403); give your token the right to read it, or ask on {page}"
    if status == 429:
        who = "" if has_token else "; requests with HF_TOKEN have a higher limit"
        return f"the hub limits your requests (429) and did so to the end of all attempts{who}"
    if status in _BUSY:
        return f"the hub fails ({status}) at each of {len(RETRY_DELAYS_S) + 1} attempts; try later"
    if any(isinstance(cause, errors.OfflineModeIsEnabled) for cause in causes):
        return (
            f"is not (whole) in the cache {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE is set;"
            f" {_OFFLINE_REMEDY}; no such local folder either"
        )
    if any(isinstance(cause, errors.LocalEntryNotFoundError) for cause in causes):
        remedy = _OFFLINE_REMEDY if is_offline() else "check the network, a proxy and HF_ENDPOINT"
        return f"is not whole in the cache {constants.HF_HUB_CACHE}; {remedy}"
    if _is_connection_error(error):
        return (
            f"{constants.ENDPOINT} cannot be reached ({type(error).__name__}: {error}); check the"
            " network, a proxy and HF_ENDPOINT, or give a local folder"
        )
    return f"cannot be read: {type(error).__name__}: {error}"


def _revision_hint(address: HubAddress) -> str:
    """The revisions with the nearest names; "" if they cannot be listed."""
    try:
        refs = _api().list_repo_refs(address.repo, repo_type=address.repo_type)
        names = [ref.name for ref in (*refs.branches, *refs.tags)]
    except Exception:  # only a hint
        return ""
    near = difflib.get_close_matches(address.revision, names, n=3, cutoff=0.4) or names[:5]
    return f"; it has {', '.join(near)}" if near else ""


def _name_hint(address: HubAddress) -> str:
    """The most similar names of the organization, else of all; "" if they cannot be listed."""
    org, _, name = address.repo.partition("/")
    listing = _api().list_datasets if address.repo_type == "dataset" else _api().list_models
    try:
        names = [each.id for each in listing(author=org, limit=500)]
        names = names or [each.id for each in listing(search=name, limit=50)]
    except Exception:  # only a hint
        names = []
    near = difflib.get_close_matches(address.repo, names, n=3, cutoff=0.7)
    other = "hf://datasets/org/name is a dataset" if address.repo_type == "model" else ""
    hints = [f"did you mean {' or '.join(near)}?" if near else "check its spelling", other]
    return "; " + "; ".join(filter(None, hints))


def _missing_path(address: HubAddress, paths: Sequence[str]) -> HubError:
    near = difflib.get_close_matches(address.path, paths, n=3, cutoff=0.4) or sorted(paths)[:5]
    listed = f"; there are {', '.join(near)}" if near else ""
    repo = address._replace(path="").name
    return HubError(f"{repo}: has no file {address.path!r} at {address.exact_revision}{listed}")
