"""Addresses of models and data: local folders, names on the Hugging Face hub, buckets.

This module reads and writes addresses; it opens nothing except to see whether a local path exists.
"""

import difflib
import os
import re
import urllib.parse
from typing import Literal, NamedTuple, TypeAlias

import fsspec

from jaxrl_llm.errors import UserError

RepoType = Literal["model", "dataset"]

DEFAULT_REVISION = "main"
_COMMIT = re.compile("[0-9a-f]{40}")
# As the hub has them: letters, digits, "-", "_", "."; no ".." and no "--".
_NAME_PART = r"(?!.*(?:\.\.|--))[A-Za-z0-9_](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
_REPO = re.compile(f"{_NAME_PART}/{_NAME_PART}")
_REFS = re.compile(r"refs/(?:pr/[0-9]+|convert/[^/@]+)(?=/|$)")  # revisions with slashes
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+._-]+):")  # one letter: a drive of Windows
# A hub page as the browser shows it, without https://.
_PAGE = re.compile(
    r"(?:www\.)?(?:huggingface\.co|hf\.co)/(?P<datasets>datasets/)?(?P<repo>[^/]+/[^/?#]+)"
    r"(?:/(?:tree|blob|resolve)/(?P<revision>[^/?#]+)(?P<path>/[^?#]*)?)?"
)
_REPO_PREFIXES: dict[str, RepoType] = {"models": "model", "datasets": "dataset"}
_OTHER_PREFIXES = ("spaces", "buckets", "kernels")
_SHOWN_SCHEMES = "hf://, gs://, s3:// or file://"


class AddressError(UserError, ValueError):
    """A text that is no address, with the correction."""


class LocalAddress(NamedTuple):
    """A file or folder on this machine, which may not exist."""

    path: str

    @property
    def text(self) -> str:
        return self.path


class HubAddress(NamedTuple):
    """A repository of the Hugging Face hub, or a file, folder or pattern in it."""

    repo: str  # "org/name"
    repo_type: RepoType = "model"
    revision: str = DEFAULT_REVISION  # branch, tag or commit that the user asked for
    path: str = ""  # within the repository; "": all of it
    commit: str = ""  # the commit that was read; "": not resolved yet

    @property
    def text(self) -> str:
        """The address in full, which `parse_address` reads back."""
        kind = "datasets/" if self.repo_type == "dataset" else ""
        revision = self.revision
        if not _REFS.fullmatch(revision):
            revision = urllib.parse.quote(revision, safe="")
        path = f"/{self.path}" if self.path else ""
        commit = f"#{self.commit}" if self.commit not in ("", self.revision) else ""
        return f"hf://{kind}{self.repo}@{revision}{path}{commit}"

    @property
    def name(self) -> str:
        """The address for messages, as short as it can be: "org/name", "org/name@v2"."""
        revision = "" if self.revision == DEFAULT_REVISION else f"@{self.revision}"
        path = f"/{self.path}" if self.path else ""
        return f"{self.repo}{revision}{path}"

    @property
    def exact_revision(self) -> str:
        """The commit if it is known, else the revision."""
        return self.commit or self.revision


class BucketAddress(NamedTuple):
    """A file or folder that fsspec reads: of a bucket, a web server, an archive, memory."""

    protocol: str  # "gs", "s3", "memory", ...
    path: str  # behind "://", without a "/" at its end

    @property
    def text(self) -> str:
        return f"{self.protocol}://{self.path}"


Location: TypeAlias = LocalAddress | HubAddress | BucketAddress


def parse_address(text: str, names: RepoType | None = None) -> Location:
    """The address that a text of a config or a command means.

    `names` tells that a repository of this type is expected: then `org/name` and `org/name@v1` are
    names on the hub, unless there is a local file or folder `org/name`, which is preferred. All
    other texts without "://" are local paths.

    >>> parse_address("hf://Qwen/Qwen3-0.6B@v1/onnx").path
    'onnx'
    >>> parse_address("Qwen/Qwen3-0.6B", names="model").text
    'hf://Qwen/Qwen3-0.6B@main'
    >>> parse_address("gs://bucket/models/a/")
    BucketAddress(protocol='gs', path='bucket/models/a')

    Raises:
      AddressError: If the scheme is not known, or the text behind it names no repository or folder.
    """
    if not text.strip():
        raise AddressError("an address is empty; give a folder, a name org/name or an address")
    scheme, separator, rest = text.partition("://")
    if separator and re.fullmatch("[A-Za-z][A-Za-z0-9+._-]*", scheme):
        return _parse_scheme(text, scheme, rest)
    if os.path.exists(text):
        return LocalAddress(text)
    match = _SCHEME.match(text)
    if match and (match[1] == "hf" or match[1] in fsspec.available_protocols()):
        rest = text[match.end() :].lstrip("/")
        raise AddressError(f"{text!r}: two slashes are missing; write {match[1]}://{rest}")
    if page := _PAGE.match(text):
        raise _page_error(text, page)
    repo, at, revision = text.partition("@")
    if names is None or not _REPO.fullmatch(repo) or os.path.isabs(text):
        return LocalAddress(text)
    if at and (not revision or "@" in revision):
        raise AddressError(f"{text!r}: behind @ there must be one revision, as in {repo}@main")
    revision = urllib.parse.unquote(revision) or DEFAULT_REVISION
    return _with_commit(HubAddress(repo, names, revision))


def _parse_scheme(text: str, scheme: str, rest: str) -> Location:
    if scheme == "hf":
        return _parse_hub(text, rest)
    if scheme == "file":
        if rest.partition("/")[0] not in ("", "localhost"):
            raise AddressError(
                f"{text!r}: a host is not supported; write file:///path, or the path"
            )
        return LocalAddress(urllib.parse.unquote("/" + rest.partition("/")[2]))
    if scheme in ("http", "https") and (page := _PAGE.match(rest)):
        raise _page_error(text, page)
    protocols = fsspec.available_protocols()
    if scheme not in protocols:
        near = difflib.get_close_matches(scheme.lower(), ["hf", *protocols], n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}://{rest}?" if near else f"write a path, {_SHOWN_SCHEMES}"
        raise AddressError(f"{text!r}: {scheme}:// is not known; {hint}")
    path = rest if scheme in ("http", "https") else rest.rstrip("/")
    if not path:
        raise AddressError(f"{text!r}: names no bucket or folder; write {scheme}://BUCKET/FOLDER")
    return BucketAddress(scheme, path)


def _parse_hub(text: str, rest: str) -> HubAddress:
    form = "hf://org/name@revision/path, for data hf://datasets/org/name@revision/path"
    prefix, _, behind = rest.partition("/")
    if prefix in _OTHER_PREFIXES:
        raise AddressError(f"{text!r}: {prefix} cannot be read; the form is {form}")
    repo_type = _REPO_PREFIXES.get(prefix, "model")
    if prefix in _REPO_PREFIXES:
        rest = behind
    commit = ""
    if re.search("#[0-9a-f]{40}$", rest):
        rest, _, commit = rest.rpartition("#")
    before, at, behind = rest.partition("@")
    if at and before.count("/") == 1:
        repo = before
        refs = _REFS.match(behind)
        revision = refs[0] if refs else behind.partition("/")[0]
        path = behind[len(revision) :]
        if not revision:
            raise AddressError(f"{text!r}: no revision behind @; the form is {form}")
    else:  # an "@" further on belongs to the path
        org, _, behind = rest.partition("/")
        name, _, path = behind.partition("/")
        repo, revision = f"{org}/{name}".rstrip("/"), DEFAULT_REVISION
    path = path.strip("/")
    if "@" in revision:
        raise AddressError(f"{text!r}: two @ behind the name; the form is {form}")
    if not _REPO.fullmatch(repo):
        raise AddressError(
            f"{text!r}: {repo!r} is no name of the form org/name; the form is {form}"
        )
    if any(part in ("", ".", "..") for part in path.split("/")) and path:
        raise AddressError(f"{text!r}: {path!r} leads out of the repository; the form is {form}")
    return _with_commit(HubAddress(repo, repo_type, urllib.parse.unquote(revision), path, commit))


def _with_commit(address: HubAddress) -> HubAddress:
    """The address with its commit, if the revision already is one."""
    if not address.commit and _COMMIT.fullmatch(address.revision):
        return address._replace(commit=address.revision)
    return address


def _page_error(text: str, page: re.Match[str]) -> AddressError:
    repo_type: RepoType = "dataset" if page["datasets"] else "model"
    revision = urllib.parse.unquote(page["revision"] or DEFAULT_REVISION)
    address = HubAddress(page["repo"], repo_type, revision, (page["path"] or "").strip("/"))
    return AddressError(f"{text!r}: is a page of the hub; write {address.text}")


def is_remote(text: str, names: RepoType | None = None) -> bool:
    """Whether a text is an address that is not on this machine; raises as `parse_address`."""
    return not isinstance(parse_address(text, names), LocalAddress)


def same_source(text: str, other: str, names: RepoType | None = None) -> bool:
    """Whether two texts name the same thing, whatever commit was read; raises as `parse_address`.

    >>> same_source("org/name", "hf://org/name@main#" + 40 * "0", names="model")
    True
    """
    first, second = (
        address._replace(commit="") if isinstance(address, HubAddress) else address
        for address in (parse_address(text, names), parse_address(other, names))
    )
    return first == second
