"""Folders uploaded to the Hugging Face hub or into a bucket, in place of an earlier upload only.

A folder that this package uploads has a README.md with the tag `TAG` in its YAML header; what has
none is not replaced.
"""

import functools
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import huggingface_hub
from huggingface_hub import constants, errors

from jaxrl_llm.errors import UserError
from jaxrl_llm.storage import bucket, files, hub
from jaxrl_llm.storage.address import BucketAddress, HubAddress, Location

TAG = "jaxrl_llm"
CARD_FILE = "README.md"

# Files of weights: those of an earlier upload that a new one lacks are deleted.
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json")
_HUB_FILES = frozenset({".gitattributes", CARD_FILE})
# Read first by those who load a folder: uploaded last, so that no one reads half of it.
_READ_FIRST = ("config.json", "adapter_config.json")
_LOG_IN = "set HF_TOKEN to a token with the right to write, or run `hf auth login`"


class UploadError(UserError):
    """A folder that cannot be uploaded, with the remedy."""


def check_target(address: Location, public: bool) -> None:
    """Checks that a folder can be uploaded to an address, before work starts; changes nothing.

    Raises:
      UploadError: If there is no token or it has no right to write there, or there are files of
        other origin, or a repository of the other visibility.
    """
    if isinstance(address, HubAddress):
        _check_repo(address, public)
    elif isinstance(address, BucketAddress):
        store, root = _bucket(address)
        names = {path.removeprefix(f"{root}/") for path in _bucket_files(address, store, root)}
        _check_origin(f"--to={address.text}", names, lambda: store.cat_file(f"{root}/{CARD_FILE}"))


def upload_folder(
    folder: pathlib.Path, address: Location, *, public: bool = False, message: str
) -> str:
    """Uploads all files of a folder; the address where they can be seen.

    A folder of this machine was written in place. On the hub a missing repository is made, private
    unless `public`, and all files come in one commit. Files of an earlier upload stay, except its
    weights.

    Raises:
      UploadError: As `check_target`, or if the upload fails.
    """
    check_target(address, public)
    if isinstance(address, HubAddress):
        return _upload_to_hub(folder, address, public, message)
    if isinstance(address, BucketAddress):
        return _upload_to_bucket(folder, address)
    return address.text  # written in place


def _check_repo(address: HubAddress, public: bool) -> None:
    where = f"--to={address.name}"
    if address.repo_type != "model":
        raise UploadError(f"{where}: is a dataset; give the name of a model, org/name")
    if hub.is_offline():
        raise UploadError(f"{where}: HF_HUB_OFFLINE is set; unset it")
    if not huggingface_hub.get_token():
        raise UploadError(f"{where}: no token of the hub; {_LOG_IN}")
    account = _hub_result(address, lambda: _api().whoami())
    role = account.get("auth", {}).get("accessToken", {}).get("role")
    if role == "read":
        raise UploadError(f"{where}: the token may only read; {_LOG_IN}")
    owners = [account["name"], *(org["name"] for org in account.get("orgs", ()))]
    owner, name = address.repo.split("/")
    if owner not in owners:
        raise UploadError(
            f"{where}: your token writes to {', '.join(owners)}, not to {owner!r}; give"
            f" --to={owners[0]}/{name}, for a local folder --out={address.repo}"
        )
    try:
        info = hub.retried(lambda: _api().model_info(address.repo), address)
    except errors.RepositoryNotFoundError:
        return  # it will be made
    except Exception as error:
        raise UploadError(f"{where}: {_explanation(address, error)}") from error
    if bool(info.private) == public:
        state, flag = ("private", "leave out --public") if public else ("public", "give --public")
        raise UploadError(f"{where}: exists and is {state}; {flag}, or use another name")
    below = f"{address.path}/" if address.path else ""
    paths = [file.rfilename for file in info.siblings or ()]
    names = {path.removeprefix(below) for path in paths if path.startswith(below)}
    main = address._replace(path="", revision="main", commit="")
    card = below + CARD_FILE
    _check_origin(where, names, lambda: (hub.download(main, [card]) / card).read_bytes())


def _check_origin(where: str, names: set[str], read_card: Callable[[], bytes]) -> None:
    """Raises UploadError if the files of a folder are not of an earlier upload."""
    others = sorted(names - _HUB_FILES)
    if not others:
        return
    if CARD_FILE in names and is_own_card(read_card().decode("utf-8", "replace")):
        return
    raise UploadError(
        f"{where}: has files that no export wrote ({', '.join(others[:3])}); give another name, or"
        " delete them first"
    )


def is_own_card(text: str) -> bool:
    """Whether a README.md is of an upload of this package: its header has the tag `TAG`."""
    try:
        header = huggingface_hub.ModelCard(text, ignore_metadata_errors=True).data
        return TAG in (header.get("tags") or ())
    except Exception:  # not a card: no header, or broken YAML
        return False


def _upload_to_hub(folder: pathlib.Path, address: HubAddress, public: bool, message: str) -> str:
    api = _api()
    _hub_result(address, lambda: api.create_repo(address.repo, private=not public, exist_ok=True))
    if address.revision != "main":
        branch = address.revision
        _hub_result(address, lambda: api.create_branch(address.repo, branch=branch, exist_ok=True))
    has_weights = any(folder.glob(_WEIGHTS[0]))
    _hub_result(
        address,
        lambda: api.upload_folder(
            repo_id=address.repo,
            folder_path=folder,
            path_in_repo=address.path or None,
            revision=address.revision,
            commit_message=message,
            # One type of weights replaces its earlier files; GGUF files lie beside each other.
            delete_patterns=list(_WEIGHTS) if has_weights else None,
        ),
    )
    return f"{constants.ENDPOINT}/{address.repo}"


def _upload_to_bucket(folder: pathlib.Path, address: BucketAddress) -> str:
    store, root = _bucket(address)
    before = _bucket_files(address, store, root)
    local_files = {
        path.relative_to(folder).as_posix(): path for path in folder.rglob("*") if path.is_file()
    }
    names = sorted(local_files, key=lambda name: (name in _READ_FIRST, name))
    for name in names:
        upload = functools.partial(store.put_file, str(local_files[name]), f"{root}/{name}")
        _bucket_result(address, upload)
    if any(folder.glob(_WEIGHTS[0])):
        for path in before:
            name = path.removeprefix(root).lstrip("/")
            is_weights = any(pathlib.PurePath(name).match(pattern) for pattern in _WEIGHTS)
            if is_weights and name not in local_files:
                _bucket_result(address, functools.partial(store.rm_file, path))
    return address.text


def _bucket(address: BucketAddress) -> tuple[Any, str]:
    """The file system of an address, and the path in it; raises BucketError."""
    store = bucket.file_system(address)
    return store, store._strip_protocol(address.text).rstrip("/")


def _bucket_files(address: BucketAddress, store: Any, root: str) -> set[str]:
    store.invalidate_cache()
    return set(_bucket_result(address, lambda: store.find(root)))


def _bucket_result(address: BucketAddress, request: Callable[[], Any]) -> Any:
    """The result of a request, repeated while the store fails; raises UploadError."""
    try:
        return files.request(address.text, "written", request)
    except OSError as error:
        cause = error.__cause__ or error
        raise UploadError(
            f"--to={address.text}: {type(cause).__name__}: {cause}; check the credentials, their"
            " right to write and the network, then export again"
        ) from error


def _api() -> huggingface_hub.HfApi:
    return huggingface_hub.HfApi(library_name="jaxrl_llm")


def _hub_result(address: HubAddress, request: Callable[[], Any]) -> Any:
    """The result of a request, repeated while the hub is busy; raises UploadError."""
    try:
        return hub.retried(request, address)
    except Exception as error:
        raise UploadError(f"--to={address.name}: {_explanation(address, error)}") from error


def _explanation(address: HubAddress, error: Exception) -> str:
    """The fault of an upload and its remedy in words."""
    owner = address.repo.partition("/")[0]
    texts: Mapping[int, str] = {
        401: f"the token is not valid (401); {_LOG_IN}",
        403: f"the token may not write to {owner!r} (403); {_LOG_IN}, or ask {owner!r} for it",
        404: "the name is taken by a repository that your token may not see; give another one",
        409: "the name is taken; give another one",
        412: "someone else has written to it meanwhile; export again",
    }
    status = hub.http_status(error)
    return texts.get(status) or hub.explanation(address, error)
