"""A stand-in for the Hugging Face hub: the endpoints that `huggingface_hub` calls, on this machine.

It answers as the hub does: errors by `X-Error-Code`, large files by a redirect to storage on
another host name, which refuses tokens. It counts requests and bytes by client (the user of the
token), and fails on demand. It does not speak the Xet protocol: clients need HF_HUB_DISABLE_XET=1.

    with HubServer() as hub:
        commit = hub.add("org/name", {"config.json": b"{}", "model.safetensors": path})
        use_hub(monkeypatch, hub, tmp_path)            # this process
        subprocess.run(..., env=hub_environment(hub, tmp_path))  # another one
"""

import base64
import collections
import contextlib
import dataclasses
import hashlib
import http.server
import json
import pathlib
import random
import re
import socket
import sys
import threading
import time
import urllib.parse
from collections.abc import Iterator, Mapping

Content = bytes | pathlib.Path

LFS_SUFFIXES = (".safetensors", ".bin", ".parquet", ".gguf", ".zst", ".gz", ".png", ".pth", ".onnx")
LFS_BYTES = 10 * 2**20  # other files are stored in LFS from this size on
_CHUNK = 1 << 20
_TYPES = {"models": "model", "datasets": "dataset"}


@dataclasses.dataclass
class Traffic:
    """What one client has caused."""

    requests: int = 0
    file_bytes: int = 0  # of file contents sent
    received_bytes: int = 0  # of file contents uploaded


@dataclasses.dataclass
class Repo:
    """A repository with its history."""

    commits: dict[str, dict[str, Content]]
    branches: dict[str, str]
    tags: dict[str, str]
    private: bool = False
    gated: bool = False
    readers: frozenset[str] = frozenset()  # users who may read a private or gated one
    messages: list[str] = dataclasses.field(default_factory=list)  # of the commits


class HubServer:
    """The stand-in; a context manager that serves while it is entered."""

    def __init__(self, tokens: Mapping[str, str] | None = None, seed: int = 0):
        self.tokens = dict(tokens or {"hf_alice": "alice", "hf_bob": "bob"})  # token -> user
        self.orgs: dict[str, list[str]] = {}  # user -> organizations that it may write to
        self.repos: dict[tuple[str, str], Repo] = {}  # by ("model" or "dataset", "org/name")
        self.objects: dict[str, Content] = {}  # LFS contents by sha256
        self.traffic: dict[str, Traffic] = collections.defaultdict(Traffic)  # by user; "": none
        self.log: list[tuple[str, str, str, int]] = []  # user, method, path, status
        self.page_size = 1000  # entries of a page of a listing
        self.busy_share = 0.0  # of requests that are answered with 429 or 503
        self.busy_headers: dict[str, str] = {}
        self.breaks: list[tuple[str, int]] = []  # (end of a path, bytes until the next break of it)
        self.moved: dict[str, str] = {}  # old name -> new name
        self._random = random.Random(seed)
        self.lock = threading.Lock()
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = _Server(("127.0.0.1", 0), handler)

    @property
    def port(self) -> int:
        return self._server.server_address[1]

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def storage(self) -> str:
        """The host of large files: another origin, as on the hub."""
        return f"http://localhost:{self.port}"

    def __enter__(self) -> "HubServer":
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_) -> None:
        self._server.shutdown()
        self._server.server_close()

    def add(
        self,
        name: str,
        files: Mapping[str, Content] | pathlib.Path,
        repo_type: str = "model",
        branch: str = "main",
        message: str = "add",
        **settings,
    ) -> str:
        """Commits files, or a folder, over those of a branch; returns the commit."""
        if isinstance(files, pathlib.Path):
            paths = (path for path in files.rglob("*") if path.is_file())
            files = {path.relative_to(files).as_posix(): path for path in paths}
        with self.lock:
            repo = self.repos.setdefault((repo_type, name), Repo({}, {}, {}))
            for key, value in settings.items():
                setattr(repo, key, value)
            tree = {**repo.commits.get(repo.branches.get(branch, ""), {}), **files}
            return self.commit(repo, branch, tree, message)

    def commit(self, repo: Repo, branch: str, tree: dict[str, Content], message: str) -> str:
        listing = json.dumps([len(repo.commits), branch, sorted(tree), message])
        commit = hashlib.sha1(listing.encode()).hexdigest()
        repo.commits[commit] = tree
        repo.branches[branch] = commit
        repo.messages.append(message)
        return commit

    def files(
        self, name: str, repo_type: str = "model", revision: str = "main"
    ) -> dict[str, bytes]:
        """The contents of a repository."""
        repo = self.repos[repo_type, name]
        tree = repo.commits[self.revision(repo, revision) or ""]
        return {path: read_content(content) for path, content in tree.items()}

    @staticmethod
    def revision(repo: Repo, revision: str) -> str | None:
        """The commit of a revision; short ids are accepted from 7 characters on."""
        for names in (repo.branches, repo.tags):
            if revision in names:
                return names[revision]
        if re.fullmatch("[0-9a-f]{7,40}", revision):
            return next((each for each in repo.commits if each.startswith(revision)), None)
        return None

    def is_busy(self) -> int:
        """The status of a request that is to fail now; 0 for none."""
        with self.lock:
            if self._random.random() >= self.busy_share:
                return 0
            return self._random.choice((429, 503))

    def take_break(self, path: str) -> int | None:
        """The number of bytes after which this answer breaks off; None: it does not."""
        with self.lock:
            for i, (suffix, num_bytes) in enumerate(self.breaks):
                if path.endswith(suffix):
                    del self.breaks[i]
                    return num_bytes
        return None


class _Server(http.server.ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request, client_address):  # clients may leave
        del request, client_address


def read_content(content: Content) -> bytes:
    return content.read_bytes() if isinstance(content, pathlib.Path) else content


def content_size(content: Content) -> int:
    return content.stat().st_size if isinstance(content, pathlib.Path) else len(content)


_DIGESTS: dict[tuple[str, int, int], str] = {}


def sha256(content: Content) -> str:
    if isinstance(content, bytes):
        return hashlib.sha256(content).hexdigest()
    status = content.stat()
    key = (str(content), status.st_mtime_ns, status.st_size)
    if key not in _DIGESTS:
        with content.open("rb") as file:
            _DIGESTS[key] = hashlib.file_digest(file, "sha256").hexdigest()
    return _DIGESTS[key]


def is_lfs(path: str, content: Content) -> bool:
    return path.endswith(LFS_SUFFIXES) or content_size(content) >= LFS_BYTES


def blob_id(content: Content) -> str:
    data = read_content(content)
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class _Failure(Exception):
    def __init__(self, status: int, code: str = "", message: str = ""):
        super().__init__(status, code, message)
        self.status, self.code, self.message = status, code, message


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubServer
    disable_nagle_algorithm = True

    def log_message(self, *_):
        pass

    def do_GET(self):
        self._answer()

    do_HEAD = do_POST = do_PUT = do_DELETE = do_GET

    def _answer(self):
        self.parts = urllib.parse.urlsplit(self.path)
        self.query = dict(urllib.parse.parse_qsl(self.parts.query, keep_blank_values=True))
        length = int(self.headers.get("Content-Length") or 0)
        self.body = self.rfile.read(length)
        self.user = self.query.get("client", "")
        self.status = 0
        try:
            if (busy := self.hub.is_busy()) != 0:
                raise _Failure(busy, "", "busy")
            self._authenticate()
            self._route(self.parts.path)
        except _Failure as failure:
            headers = {"X-Error-Code": failure.code, "X-Error-Message": failure.message}
            if failure.status in (429, 503):
                headers.update(self.hub.busy_headers)
            self._send(failure.status, json.dumps({"error": failure.message}).encode(), headers)
        except (ConnectionError, BrokenPipeError):
            self.close_connection = True
        finally:
            with self.hub.lock:
                self.hub.traffic[self.user].requests += 1
                self.hub.log.append((self.user, self.command, self.path, self.status))

    def _authenticate(self):
        header = self.headers.get("Authorization")
        is_storage = self.parts.path.startswith("/storage/")
        if is_storage:
            if header:  # as signed addresses of object stores do
                raise _Failure(400, "", "Only one auth mechanism allowed")
            return
        if not header:
            return
        user = self.hub.tokens.get(header.removeprefix("Bearer "))
        if user is None:
            raise _Failure(401, "", "Invalid credentials in Authorization header")
        self.user = user

    def _route(self, path: str):
        unquoted = urllib.parse.unquote(path)
        if path.startswith("/storage/"):
            return self._storage(path.removeprefix("/storage/"))
        if match := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
            return self._lfs_batch("dataset" if match[1] else "model", match[2])
        if match := re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            kind = "dataset" if match[1] else "model"
            revision, name = (urllib.parse.unquote(each) for each in match.groups()[2:])
            return self._resolve(kind, match[2], revision, name)
        if unquoted == "/api/whoami-v2":
            if not self.user:
                raise _Failure(401, "", "Invalid username or password.")
            orgs = [{"name": org} for org in self.hub.orgs.get(self.user, ())]
            return self._json({"name": self.user, "type": "user", "orgs": orgs})
        if unquoted == "/api/validate-yaml":
            return self._json({"errors": [], "warnings": []})
        if unquoted == "/api/repos/create":
            return self._create()
        if unquoted == "/api/repos/delete":
            request = json.loads(self.body)
            owner = request.get("organization") or self.user
            self.hub.repos.pop((request.get("type") or "model", f"{owner}/{request['name']}"), None)
            return self._json({})
        if match := re.fullmatch(r"/api/(models|datasets)", path):
            return self._search(_TYPES[match[1]])
        if match := re.fullmatch(
            r"/api/(models|datasets)/([^/]+/[^/]+)(?:/([a-z-]+)(/.*)?)?", path
        ):
            kind, action, rest = _TYPES[match[1]], match[3] or "", (match[4] or "").lstrip("/")
            actions = {
                "": self._info, "revision": self._info, "tree": self._tree, "refs": self._refs,
                "paths-info": self._paths_info, "preupload": self._preupload,
                "commit": self._commit, "branch": self._branch, "tag": self._branch,
            }  # fmt: skip
            if action in actions:
                if match[2] in self.hub.moved:
                    target = self.path.replace(match[2], self.hub.moved[match[2]], 1)
                    return self._send(307, b"", {"Location": target})
                revision, _, below = rest.partition("/")
                return actions[action](
                    kind, match[2], urllib.parse.unquote(revision), urllib.parse.unquote(below)
                )
        raise _Failure(404, "", f"no endpoint {self.command} {path}")

    # Reading.

    def _repo(self, kind: str, name: str) -> Repo:
        repo = self.hub.repos.get((kind, name))
        hidden = repo is not None and repo.private and self.user not in repo.readers
        if repo is None or hidden:
            raise _Failure(404 if self.user else 401, "RepoNotFound", "Repository not found")
        return repo

    def _tree_of(self, kind: str, name: str, revision: str) -> tuple[Repo, str, dict[str, Content]]:
        repo = self._repo(kind, name)
        commit = self.hub.revision(repo, revision or "main")
        if commit is None:
            raise _Failure(404, "RevisionNotFound", f"Invalid rev id: {revision}")
        return repo, commit, repo.commits[commit]

    def _info(self, kind: str, name: str, revision: str, _: str):
        repo, commit, tree = self._tree_of(kind, name, revision)
        siblings = [{"rfilename": path} for path in sorted(tree)]
        self._json({
            "_id": name, "id": name, "modelId": name, "sha": commit, "private": repo.private,
            "gated": "auto" if repo.gated else False, "disabled": False, "tags": [],
            "downloads": 0, "likes": 0, "siblings": siblings,
            "lastModified": "2026-01-01T00:00:00.000Z", "createdAt": "2026-01-01T00:00:00.000Z",
        })  # fmt: skip

    def _search(self, kind: str):
        author, words = self.query.get("author", ""), self.query.get("search", "").lower()
        found = [
            {"_id": name, "id": name, "modelId": name, "private": False, "tags": []}
            for (other_kind, name), repo in self.hub.repos.items()
            if other_kind == kind and not repo.private and name.startswith(author)
            if words in name.lower()
        ]
        self._json(found[: int(self.query.get("limit", 100))])

    def _refs(self, kind: str, name: str, *_):
        repo = self._repo(kind, name)
        branches, tags = (
            [{"name": n, "ref": f"refs/{p}/{n}", "targetCommit": c} for n, c in names.items()]
            for p, names in (("heads", repo.branches), ("tags", repo.tags))
        )
        self._json({"branches": branches, "tags": tags, "converts": []})

    @staticmethod
    def _entry(path: str, content: Content) -> dict:
        size = content_size(content)
        if not is_lfs(path, content):
            return {"type": "file", "path": path, "size": size, "oid": blob_id(content)}
        oid = sha256(content)
        lfs = {"oid": oid, "size": size, "pointerSize": 134}
        return {"type": "file", "path": path, "size": size, "oid": oid[:40], "lfs": lfs}

    def _entries(self, tree: Mapping[str, Content], below: str, recursive: bool) -> list[dict]:
        prefix = f"{below}/" if below else ""
        entries: dict[str, dict] = {}
        for path, content in sorted(tree.items()):
            if not path.startswith(prefix):
                continue
            parts = path.removeprefix(prefix).split("/")
            for depth in range(1, len(parts) if recursive else min(len(parts), 2)):
                folder = prefix + "/".join(parts[:depth])
                oid = hashlib.sha1(folder.encode()).hexdigest()
                entries[folder] = {"type": "directory", "path": folder, "oid": oid, "size": 0}
            if recursive or len(parts) == 1:
                entries[path] = self._entry(path, content)
        return list(entries.values())

    def _tree(self, kind: str, name: str, revision: str, below: str):
        _, _, tree = self._tree_of(kind, name, revision)
        recursive = self.query.get("recursive", "").lower() in ("1", "true")
        entries = self._entries(tree, below.rstrip("/"), recursive)
        if not entries and below:
            raise _Failure(404, "EntryNotFound", f"{below} does not exist")
        start = int(self.query.get("cursor", 0))
        page, headers = entries[start : start + self.hub.page_size], {}
        if start + self.hub.page_size < len(entries):
            query = {**self.query, "cursor": start + self.hub.page_size}
            link = f"{self.hub.endpoint}{self.parts.path}?{urllib.parse.urlencode(query)}"
            headers["Link"] = f'<{link}>; rel="next"'
        self._json(page, headers)

    def _paths_info(self, kind: str, name: str, revision: str, _: str):
        _, _, tree = self._tree_of(kind, name, revision)
        if "json" in self.headers.get("Content-Type", ""):
            paths = json.loads(self.body)["paths"]
        else:
            paths = urllib.parse.parse_qs(self.body.decode()).get("paths", [])
        entries = {entry["path"]: entry for entry in self._entries(tree, "", True)}
        self._json([entries[path] for path in paths if path in entries])

    def _resolve(self, kind: str, name: str, revision: str, path: str):
        repo, commit, tree = self._tree_of(kind, name, revision)
        if repo.gated and self.user not in repo.readers:
            message = f"Access to {kind} {name} is restricted."
            raise _Failure(403 if self.user else 401, "GatedRepo", message)
        headers = {"X-Repo-Commit": commit}
        if path not in tree:
            headers |= {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"}
            return self._send(404, b"", headers)
        content = tree[path]
        if not is_lfs(path, content):
            return self._content(content, path, {**headers, "ETag": f'"{blob_id(content)}"'})
        oid = sha256(content)
        with self.hub.lock:
            self.hub.objects[oid] = content
        query = urllib.parse.urlencode({"client": self.user, "name": path})
        headers |= {
            "Location": f"{self.hub.storage}/storage/{oid}?{query}",
            "X-Linked-Size": str(content_size(content)),
            "X-Linked-ETag": f'"{oid}"',
            "ETag": f'"{oid[:32]}"',
        }
        self._send(302, b"", headers)

    def _storage(self, oid: str):
        if self.command == "PUT":
            if hashlib.sha256(self.body).hexdigest() != oid:
                raise _Failure(400, "", "the content has another sha256")
            with self.hub.lock:
                self.hub.objects[oid] = self.body
                self.hub.traffic[self.user].received_bytes += len(self.body)
            return self._send(200, b"", {"ETag": f'"{oid}"'})
        if oid not in self.hub.objects:
            raise _Failure(404, "", "no such object")
        self._content(self.hub.objects[oid], self.query.get("name", oid), {"ETag": f'"{oid}"'})

    def _content(self, content: Content, path: str, headers: Mapping[str, str]):
        """Sends a file or a range of it; breaks off where the test asks for it."""
        size = content_size(content)
        begin, end, status = 0, size, 200
        if match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
            begin, end, status = int(match[1]), min(size, int(match[2] or size) + 1), 206
            if begin >= size:
                raise _Failure(416, "", "range not satisfiable")
        extra = {"Content-Range": f"bytes {begin}-{end - 1}/{size}"} if status == 206 else {}
        self._send_head(status, end - begin, {**headers, **extra, "Accept-Ranges": "bytes"})
        if self.command == "HEAD":
            return
        stop = self.hub.take_break(path)
        last = end if stop is None else min(end, begin + stop)
        with contextlib.ExitStack() as stack:
            file = None
            if isinstance(content, pathlib.Path):
                file = stack.enter_context(content.open("rb"))
                file.seek(begin)
            for start in range(begin, last, _CHUNK):
                length = min(_CHUNK, last - start)
                data = file.read(length) if file else content[start : start + length]
                with self.hub.lock:  # before the client has them and asks
                    self.hub.traffic[self.user].file_bytes += len(data)
                self.wfile.write(data)
        if last < end:
            self.wfile.flush()
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)

    # Writing.

    def _writer(self, name: str = ""):
        if not self.user:
            raise _Failure(401, "", "Invalid username or password.")
        owner = name.partition("/")[0]
        if owner not in ("", self.user, *self.hub.orgs.get(self.user, ())):
            raise _Failure(403, "", f"You don't have the rights to write to {owner}")

    def _create(self):
        request = json.loads(self.body)
        owner = request.get("organization") or self.user
        self._writer(f"{owner}/")
        name, kind = f"{owner}/{request['name']}", request.get("type") or "model"
        url = f"{self.hub.endpoint}/{'datasets/' if kind == 'dataset' else ''}{name}"
        with self.hub.lock:
            if (kind, name) in self.hub.repos:
                exists = json.dumps({"error": "You already created this repo", "url": url})
                return self._send(409, exists.encode())
            private = request.get("private")
            private = request.get("visibility") == "private" if private is None else private
            readers = frozenset([self.user])
            repo = Repo({}, {}, {}, private=bool(private), readers=readers)
            self.hub.repos[kind, name] = repo
            self.hub.commit(repo, "main", {".gitattributes": b""}, "initial commit")
        self._json({"url": url, "name": name, "id": name})

    def _preupload(self, kind: str, name: str, revision: str, _: str):
        self._writer(name)
        _, _, tree = self._tree_of(kind, name, revision)
        answers = []
        for file in json.loads(self.body)["files"]:
            path, size = file["path"], file["size"]
            large = path.endswith(LFS_SUFFIXES) or size >= LFS_BYTES
            old = self._entry(path, tree[path]) if path in tree else {}
            oid = old.get("lfs", old).get("oid")
            mode = "lfs" if large else "regular"
            answers.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self._json({"files": answers})

    def _lfs_batch(self, kind: str, name: str):
        self._writer(name)
        self._repo(kind, name)
        objects = []
        for each in json.loads(self.body)["objects"]:
            entry = {"oid": each["oid"], "size": each["size"]}
            if each["oid"] not in self.hub.objects:
                url = f"{self.hub.storage}/storage/{each['oid']}?client={self.user}"
                entry["actions"] = {"upload": {"href": url, "header": {}}}
            objects.append(entry)
        self._json({"transfer": "basic", "objects": objects})

    def _commit(self, kind: str, name: str, revision: str, _: str):
        self._writer(name)
        repo, parent, tree = self._tree_of(kind, name, revision)
        tree, message = dict(tree), ""
        for line in self.body.splitlines():
            operation = json.loads(line)
            key, value = operation["key"], operation["value"]
            if key == "header":
                message = value["summary"]
                if value.get("parentCommit", parent) != parent:
                    raise _Failure(412, "", "A commit has happened since.")
            elif key == "file":
                tree[value["path"]] = base64.b64decode(value["content"])
                with self.hub.lock:
                    self.hub.traffic[self.user].received_bytes += len(tree[value["path"]])
            elif key == "lfsFile":
                if value["oid"] not in self.hub.objects:
                    raise _Failure(400, "", f"LFS object {value['oid']} was not uploaded")
                tree[value["path"]] = self.hub.objects[value["oid"]]
            elif key == "deletedFile":
                tree.pop(value["path"], None)
            elif key == "deletedFolder":
                prefix = value["path"].rstrip("/") + "/"
                tree = {path: each for path, each in tree.items() if not path.startswith(prefix)}
            else:
                raise _Failure(400, "", f"unknown operation {key}")
        with self.hub.lock:
            commit = self.hub.commit(repo, revision, tree, message)
        url = f"{self.hub.endpoint}/{name}/commit/{commit}"
        self._json({"success": True, "commitOid": commit, "commitUrl": url, "hookOutput": ""})

    def _branch(self, kind: str, name: str, branch: str, _: str):
        self._writer()
        repo = self._repo(kind, name)
        start = json.loads(self.body or b"{}").get("startingPoint") or "main"
        with self.hub.lock:
            repo.branches.setdefault(branch, self.hub.revision(repo, start) or "")
        self._json({})

    # Answers.

    def _json(self, value, headers: Mapping[str, str] | None = None):
        self._send(
            200,
            json.dumps(value).encode(),
            {"Content-Type": "application/json"} | dict(headers or {}),
        )

    def _send(self, status: int, body: bytes, headers: Mapping[str, str] | None = None):
        self._send_head(status, len(body), headers or {})
        if self.command != "HEAD":
            self.wfile.write(body)

    def _send_head(self, status: int, length: int, headers: Mapping[str, str]):
        self.status = status
        self.send_response(status)
        for name, value in headers.items():
            if value:
                self.send_header(name, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()


def hub_environment(hub: HubServer, home: pathlib.Path, token: str = "") -> dict[str, str]:
    """Environment variables of a process that talks to the stand-in, with its cache in `home`."""
    return {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(home),
        "HF_HUB_CACHE": str(home / "hub"),
        "HF_TOKEN": token,
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "HF_HUB_DISABLE_UPDATE_CHECK": "1",
    }


def use_hub(monkeypatch, hub: HubServer, home: pathlib.Path, token: str = "") -> None:
    """Lets `huggingface_hub` in this process talk to the stand-in, until the test ends.

    The library reads its environment once, when it is imported; hence its constants are set too.
    """
    from huggingface_hub import constants, utils

    from jaxrl_llm.storage import model_folder

    environment = hub_environment(hub, home, token)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    values = {
        "ENDPOINT": hub.endpoint,
        "HUGGINGFACE_CO_URL_TEMPLATE": hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}",
        "HF_HOME": str(home),
        "HF_HUB_CACHE": environment["HF_HUB_CACHE"],
        "HUGGINGFACE_HUB_CACHE": environment["HF_HUB_CACHE"],
        "HF_TOKEN_PATH": str(home / "token"),
        "HF_STORED_TOKENS_PATH": str(home / "stored_tokens"),
        "HF_XET_CACHE": str(home / "xet"),
        "HF_HUB_OFFLINE": False,
        "HF_HUB_DISABLE_XET": True,
    }
    for name, value in values.items():
        monkeypatch.setattr(constants, name, value, raising=False)
    utils.disable_progress_bars()
    model_folder.forget_folders()


def set_offline(monkeypatch) -> None:
    """Lets `huggingface_hub` in this process behave as with HF_HUB_OFFLINE=1."""
    from huggingface_hub import constants

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


@contextlib.contextmanager
def without_delays(monkeypatch) -> Iterator[list[float]]:
    """Retries without waiting; yields the seconds that they would have waited."""
    waits: list[float] = []
    sleep = time.sleep

    def skipped(seconds: float) -> None:
        caller = sys._getframe(1).f_globals["__name__"]
        if caller.startswith(("jaxrl_llm.storage", "huggingface_hub")):
            waits.append(seconds)
        else:
            sleep(seconds)  # other threads wait for something

    with monkeypatch.context() as patch:
        patch.setattr(time, "sleep", skipped)
        yield waits


def main() -> None:
    """Serves folders: python tests/hub_server.py org/name=FOLDER [datasets/org/name=FOLDER ...]."""
    with HubServer() as hub:
        for argument in sys.argv[1:]:
            name, _, folder = argument.partition("=")
            kind = "dataset" if name.startswith("datasets/") else "model"
            hub.add(name.removeprefix("datasets/"), pathlib.Path(folder), kind)
        names = " ".join(f"{k}={v}" for k, v in hub_environment(hub, pathlib.Path("hf")).items())
        print(f"env {names}", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()


if __name__ == "__main__":
    main()
