"""A Hugging Face Hub of one's own, on 127.0.0.1: what huggingface_hub asks for, and failures on demand.

    with Hub(tmp_path, token="hf_fake") as hub:                        # in a test; `hub.env()` for a subprocess
        api = HfApi(endpoint=hub.url, token="hf_fake")
        hub.fail("/_lfs/", status=503, headers={"Retry-After": "1"}, times=2)
        api.upload_folder(...)
        assert [r.status for r in hub.requests if r.path.startswith("/_lfs/")] == [503, 503, 200]

Served: auth-check, create a repo, validate-yaml, preupload, LFS basic transfer, commits that add files, pull requests,
branches, tags, repo info, refs, the whole tree, resolve (HEAD, GET, Range); a quota, and a second token that may only
read. Not modelled: Xet (clients need HF_HUB_DISABLE_XET=1), deletions, discussions, gating, redirects to a CDN.
Standard library only. Repos outlive the server: they are files under ROOT.
"""

import base64
import contextlib
import hashlib
import json
import os
import re
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

LFS_SUFFIXES = (".safetensors", ".bin", ".pt", ".tar", ".parquet", ".npy", ".zip", ".gz", ".pkl", ".model", ".onnx")
LFS_SIZE = 10 * 2**20  # larger files are LFS whatever their name
CHUNK = 2**16


# --- What is stored -----------------------------------------------------------------------------------------


class HubError(Exception):
    """An answer other than 2xx. `code` is the Hub's X-Error-Code, by which the client picks its exception."""

    def __init__(self, status: int, message: str, code: str | None = None, headers: dict | None = None):
        super().__init__(message)
        self.status = status
        self.headers = {"X-Error-Message": message, **({"X-Error-Code": code} if code else {}), **(headers or {})}


class Store:
    """Repos as JSON files, contents as blobs named by their SHA-256; a tree is {path: entry}."""

    def __init__(self, root: Path):
        self.root = root
        (root / "blobs").mkdir(parents=True, exist_ok=True)

    def blob(self, sha256: str) -> Path:
        return self.root / "blobs" / sha256

    def _file(self, kind: str, repo_id: str) -> Path:
        return self.root / kind / f"{repo_id}.json"

    def exists(self, kind: str, repo_id: str) -> bool:
        return self._file(kind, repo_id).exists()

    def load(self, kind: str, repo_id: str) -> dict:
        if not self.exists(kind, repo_id):
            raise HubError(404, "Repository not found", "RepoNotFound")
        return json.loads(self._file(kind, repo_id).read_text())

    def save(self, kind: str, repo_id: str, repo: dict) -> None:
        path = self._file(kind, repo_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".tmp").write_text(json.dumps(repo))
        path.with_suffix(".tmp").replace(path)

    def create(self, kind: str, repo_id: str, private: bool = False) -> dict:
        repo: dict = {"refs": {}, "tags": {}, "commits": {}, "private": private}
        attributes = self.put(b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n")
        self.commit(repo, "main", {".gitattributes": attributes}, "initial commit")
        self.save(kind, repo_id, repo)
        return repo

    def commit(self, repo: dict, branch: str, tree: dict, title: str) -> str:
        parent = repo["refs"].get(branch)
        commit = hashlib.sha1(json.dumps([parent, tree, title, time.time()]).encode()).hexdigest()
        repo["commits"][commit] = {"tree": tree, "title": title, "parent": parent}
        repo["refs"][branch] = commit
        return commit

    def tree(self, repo: dict, revision: str) -> tuple[str, dict]:
        branch = revision.removeprefix("refs/heads/")
        commit = repo["refs"].get(branch) or repo["tags"].get(revision, revision)
        if commit not in repo["commits"]:
            raise HubError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return commit, repo["commits"][commit]["tree"]

    def put(self, data: bytes) -> dict:
        """An ordinary file, stored in git."""
        sha256 = hashlib.sha256(data).hexdigest()
        self.blob(sha256).write_bytes(data)
        git = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
        return {"sha256": sha256, "size": len(data), "lfs": False, "git": git}

    def lfs(self, sha256: str) -> dict:
        """An LFS file, of which git holds a pointer."""
        git = hashlib.sha1(sha256.encode()).hexdigest()
        return {"sha256": sha256, "size": self.blob(sha256).stat().st_size, "lfs": True, "git": git}


def _info(path: str, entry: dict) -> dict:
    info = {"type": "file", "path": path, "size": entry["size"], "oid": entry["git"]}
    if entry["lfs"]:
        info["lfs"] = {"oid": entry["sha256"], "size": entry["size"], "pointerSize": 134}
    return info


def _is_lfs(path: str, size: int) -> bool:
    return size > LFS_SIZE or path.endswith(LFS_SUFFIXES)


# --- What can fail ------------------------------------------------------------------------------------------


@dataclass
class Failure:
    """What happens to requests whose path and query match `pattern` (a regular expression, searched for).

    Arguments:
        pattern, method: which requests.
        status, headers, message: answer with that status instead of serving the request.
        cut_upload_after: close the connection after that many bytes of the request's body.
        lose_answer: do what is asked, then close the connection without an answer.
        delay: seconds to wait before anything else.
        upload_rate: bytes a second of the request's body.
        times: that many requests fail, then all is well; None for always.
    """

    pattern: str
    method: str | None = None
    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    message: str = "this failure was asked for"
    cut_upload_after: int | None = None
    lose_answer: bool = False
    delay: float = 0.0
    upload_rate: float | None = None
    times: int | None = None
    hits: int = 0

    def meets(self, method: str, path: str) -> bool:
        left = self.times is None or self.hits < self.times
        return left and self.method in (None, method) and re.search(self.pattern, path) is not None


@dataclass(frozen=True)
class Request:
    """A request that was served. `status` is 0 where the connection was cut before an answer."""

    method: str
    path: str
    status: int
    headers: dict[str, str]


class _Cut(Exception):
    """Close the connection now."""


# --- The server ---------------------------------------------------------------------------------------------


class Hub:
    """The server; a context manager. See the head of this file.

    Arguments:
        root: the folder of its repos.
        token: if given, what writes and private repos need.

    Attributes:
        reader: a token that may read private repos but not write.
        quota: bytes of LFS files that all repos together may hold, None for no limit.
    """

    reader: str | None = None
    quota: int | None = None

    def __init__(self, root: str | os.PathLike, token: str | None = None):
        self.store, self.token, self.lock = Store(Path(root)), token, threading.RLock()
        self.requests: list[Request] = []
        self.failures: list[Failure] = []
        self._server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> "Hub":
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def env(self, cache: str | os.PathLike | None = None) -> dict[str, str]:
        """Environment variables that make a new process a client of this Hub."""
        env = {"HF_ENDPOINT": self.url, "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
        if self.token:
            env["HF_TOKEN"] = self.token
        if cache is not None:
            env["HF_HOME"] = str(cache)
        return env

    def fail(self, pattern: str, **what: object) -> Failure:
        """Make requests fail from now on; the arguments are `Failure`'s. The oldest one that fits counts."""
        failure = Failure(pattern, **what)  # type: ignore[arg-type]
        with self.lock:
            self.failures.append(failure)
        return failure

    def reset(self) -> None:
        """No failures, no quota, no requests seen; the repos stay."""
        with self.lock:
            self.quota = None
            self.failures.clear()
            self.requests.clear()

    def add(self, repo_id: str, files: dict[str, bytes | Path], kind: str = "models") -> str:
        """Commit files without a client, creating the repo; the commit's id. A path is linked, not copied."""
        with self.lock:
            exists = self.store.exists(kind, repo_id)
            repo = self.store.load(kind, repo_id) if exists else self.store.create(kind, repo_id)
            tree = dict(self.store.tree(repo, "main")[1])
            for name, content in files.items():
                tree[name] = self._entry(name, content)
            commit = self.store.commit(repo, "main", tree, "added")
            self.store.save(kind, repo_id, repo)
            return commit

    def _entry(self, name: str, content: bytes | Path) -> dict:
        if isinstance(content, bytes):
            entry = self.store.put(content)
            return self.store.lfs(entry["sha256"]) if _is_lfs(name, len(content)) else entry
        with content.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        if not self.store.blob(sha256).exists():
            os.link(content, self.store.blob(sha256))
        return self.store.lfs(sha256)

    def files(self, repo_id: str, revision: str = "main", kind: str = "models") -> dict[str, bytes]:
        """What a repo holds."""
        _, tree = self.store.tree(self.store.load(kind, repo_id), revision)
        return {path: self.store.blob(entry["sha256"]).read_bytes() for path, entry in tree.items()}

    def titles(self, repo_id: str, revision: str = "main", kind: str = "models") -> list[str]:
        """The messages of its commits, oldest first."""
        repo = self.store.load(kind, repo_id)
        commit, titles = self.store.tree(repo, revision)[0], []
        while commit:
            titles.append(repo["commits"][commit]["title"])
            commit = repo["commits"][commit]["parent"]
        return titles[::-1]

    def tags(self, repo_id: str, kind: str = "models") -> dict[str, str]:
        return self.store.load(kind, repo_id)["tags"]

    def _failure(self, method: str, path: str) -> Failure | None:
        with self.lock:
            for failure in self.failures:
                if failure.meets(method, path):
                    failure.hits += 1
                    return failure
        return None


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # clients of these tests go away in mid-request on purpose


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"
    failure: Failure | None
    status: int

    def log_message(self, *_: object) -> None:
        pass

    # One request: the failure asked for, the body, the route, the record.

    def _serve(self) -> None:
        self.status, self.failure = 0, self.hub._failure(self.command, self.path)
        url = urlsplit(self.path)
        self.query = parse_qs(url.query)
        try:
            if self.failure:
                time.sleep(self.failure.delay)
            if self.failure and self.failure.status:
                for _ in self._body():
                    pass
                raise HubError(self.failure.status, self.failure.message, headers=self.failure.headers)
            for method, pattern, name in ROUTES:
                match = re.fullmatch(pattern, url.path)
                if self.command in method.split() and match:
                    getattr(self, name)(*(part and unquote(part) for part in match.groups()))
                    break
            else:
                raise HubError(404, f"not served here: {self.command} {url.path}")
        except HubError as error:
            self._json({"error": str(error)}, error.status, error.headers)
        except _Cut:
            self.close_connection = True
            with contextlib.suppress(OSError):
                self.connection.shutdown(socket.SHUT_RDWR)
        finally:
            with self.hub.lock:
                self.hub.requests.append(Request(self.command, self.path, self.status, dict(self.headers)))

    do_GET = do_HEAD = do_POST = do_PUT = _serve

    def _body(self) -> Iterator[bytes]:
        """The request's body, by Content-Length or chunked."""
        seen, limit = 0, self.failure.cut_upload_after if self.failure else None
        for block in self._blocks():
            seen += len(block)
            if self.failure and self.failure.upload_rate:
                time.sleep(len(block) / self.failure.upload_rate)
            if limit is not None and seen >= limit:
                raise _Cut
            yield block

    def _blocks(self) -> Iterator[bytes]:
        if "chunked" in self.headers.get("Transfer-Encoding", "").lower():
            while size := int(self.rfile.readline().split(b";")[0], 16):
                yield self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return
        left = int(self.headers.get("Content-Length") or 0)
        while left > 0:
            block = self.rfile.read(min(left, CHUNK))
            if not block:
                raise _Cut
            left -= len(block)
            yield block

    def _read(self) -> bytes:
        return b"".join(self._body())

    def _json_body(self) -> dict:
        return json.loads(self._read() or b"{}")

    def _json(self, value: object, status: int = 200, headers: dict | None = None) -> None:
        data = json.dumps(value).encode()
        self._answer(status, {"Content-Type": "application/json", **(headers or {})}, len(data), iter([data]))

    def _answer(self, status: int, headers: dict, size: int, blocks: Iterator[bytes]) -> None:
        if self.failure and self.failure.lose_answer:
            raise _Cut
        self.status = status
        self.send_response(status)
        for name, value in {**headers, "Content-Length": size}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command == "HEAD":
            return
        for block in blocks:
            self.wfile.write(block)

    # What the Hub does. A route's arguments are the groups of its pattern.

    def _authorise(self, write: bool = True) -> None:
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if given and given == self.hub.reader:
            if write:
                raise HubError(403, "You have read access but not the required permissions for this operation")
        elif self.hub.token and given != self.hub.token:
            raise HubError(401, "Invalid credentials")

    def _repo(self, kind: str, repo_id: str) -> dict:
        repo = self.hub.store.load(kind, repo_id)
        if repo["private"]:
            self._authorise(write=False)
        return repo

    def auth_check(self, kind: str, repo_id: str, write: str | None) -> None:
        self._repo(kind, repo_id)
        self._authorise(write=bool(write))
        self._json({})

    def validate_yaml(self) -> None:
        self._read()
        self._json({"errors": [], "warnings": []})

    def create(self) -> None:
        body = self._json_body()
        self._authorise()
        kind, repo_id = body.get("type", "model") + "s", f"{body.get('organization') or 'me'}/{body['name']}"
        url = f"{self.hub.url}/{'' if kind == 'models' else kind + '/'}{repo_id}"
        with self.hub.lock:
            if self.hub.store.exists(kind, repo_id):
                return self._json({"error": "You already created this repo", "url": url}, 409)
            self.hub.store.create(kind, repo_id, private=body.get("visibility") == "private")
        self._json({"url": url, "name": repo_id, "id": repo_id})

    def preupload(self, kind: str, repo_id: str, revision: str) -> None:
        wanted = self._json_body()["files"]
        self._authorise()
        _, tree = self.hub.store.tree(self._repo(kind, repo_id), revision)
        files = []
        for file in wanted:
            entry = tree.get(file["path"])
            mode = "lfs" if _is_lfs(file["path"], file["size"]) else "regular"
            oid = entry and (entry["sha256"] if entry["lfs"] else entry["git"])
            files.append({"path": file["path"], "shouldIgnore": False, "uploadMode": mode, "oid": oid})
        self._json({"files": files})

    def lfs_batch(self, kind: str | None, repo_id: str) -> None:
        wanted = self._json_body()["objects"]
        self._authorise()
        self._repo(kind or "models", repo_id)
        held = sum(blob.stat().st_size for blob in (self.hub.store.root / "blobs").iterdir())
        if self.hub.quota is not None and held + sum(wish["size"] for wish in wanted) > self.hub.quota:
            raise HubError(403, "Private repository storage limit reached, please upgrade your plan")
        objects = []
        for wish in wanted:
            answer = {"oid": wish["oid"], "size": wish["size"]}
            if not self.hub.store.blob(wish["oid"]).exists():  # without "actions": it is there already
                upload, verify = f"{self.hub.url}/_lfs/{wish['oid']}", f"{self.hub.url}/_lfs_verify"
                answer["actions"] = {"upload": {"href": upload, "header": {}}, "verify": {"href": verify}}
            objects.append(answer)
        self._json({"transfer": "basic", "objects": objects})

    def lfs_upload(self, sha256: str) -> None:
        target = self.hub.store.blob(sha256)
        part = target.with_name(f"{sha256}.{threading.get_ident()}")
        digest = hashlib.sha256()
        try:
            with part.open("wb") as file:
                for block in self._body():
                    digest.update(block)
                    file.write(block)
            if digest.hexdigest() != sha256:
                raise HubError(400, "sha256 mismatch")
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
        self._json({}, headers={"ETag": f'"{sha256}"'})

    def lfs_verify(self) -> None:
        wish = self._json_body()
        blob = self.hub.store.blob(wish["oid"])
        self._json({}, 200 if blob.exists() and blob.stat().st_size == wish["size"] else 404)

    def commit(self, kind: str, repo_id: str, branch: str) -> None:
        lines = [json.loads(line) for line in self._read().splitlines()]
        self._authorise()
        store = self.hub.store
        with self.hub.lock:
            repo = self._repo(kind, repo_id)
            head, tree = store.tree(repo, branch)
            tree, title = dict(tree), ""
            answer: dict = {}
            if self.query.get("create_pr", ["0"])[0] == "1":
                number = 1 + sum(name.startswith("refs/pr/") for name in repo["refs"])
                branch = f"refs/pr/{number}"
                repo["refs"][branch] = head
                answer = {"pullRequestUrl": f"{self.hub.url}/{repo_id}/discussions/{number}"}
            for line in lines:
                what, value = line["key"], line["value"]
                if what == "header":
                    title = value.get("summary", "")
                    if value.get("parentCommit") not in (None, head):
                        raise HubError(412, "parentCommit is not the head of the branch")
                elif what == "file":
                    tree[value["path"]] = store.put(base64.b64decode(value["content"]))
                elif what == "lfsFile":
                    if not store.blob(value["oid"]).exists():
                        raise HubError(400, f"LFS object {value['oid']} was not uploaded")
                    tree[value["path"]] = store.lfs(value["oid"])
            commit = store.commit(repo, branch, tree, title)
            store.save(kind, repo_id, repo)
        url = f"{self.hub.url}/{repo_id}/commit/{commit}"
        self._json({"success": True, "commitOid": commit, "commitUrl": url, "hookOutput": "", **answer})

    def branch(self, kind: str, repo_id: str, name: str) -> None:
        self._set_ref(kind, repo_id, "refs", name, self._json_body().get("startingPoint") or "main")

    def tag(self, kind: str, repo_id: str, revision: str) -> None:
        self._set_ref(kind, repo_id, "tags", self._json_body()["tag"], revision)

    def _set_ref(self, kind: str, repo_id: str, family: str, name: str, revision: str) -> None:
        self._authorise()
        with self.hub.lock:
            repo = self._repo(kind, repo_id)
            if name in repo[family]:
                raise HubError(409, f"Reference already exists: {name}")
            repo[family][name] = self.hub.store.tree(repo, revision)[0]
            self.hub.store.save(kind, repo_id, repo)
        self._json({})

    def refs(self, kind: str, repo_id: str) -> None:
        repo = self._repo(kind, repo_id)

        def listed(refs: dict, place: str) -> list[dict]:
            return [{"name": name, "ref": f"{place}/{name}", "targetCommit": commit} for name, commit in refs.items()]

        branches = {name: commit for name, commit in repo["refs"].items() if not name.startswith("refs/pr/")}
        tags = listed(repo["tags"], "refs/tags")
        self._json({"branches": listed(branches, "refs/heads"), "tags": tags, "converts": []})

    def list_tree(self, kind: str, repo_id: str, revision: str) -> None:
        _, tree = self.hub.store.tree(self._repo(kind, repo_id), revision)
        self._json([_info(path, entry) for path, entry in sorted(tree.items())])

    def info(self, kind: str, repo_id: str, revision: str | None) -> None:
        repo = self._repo(kind, repo_id)
        commit, tree = self.hub.store.tree(repo, revision or "main")
        info = {"_id": "0", "id": repo_id, "modelId": repo_id, "author": repo_id.split("/")[0], "sha": commit}
        info |= {"private": repo["private"], "gated": False, "disabled": False, "downloads": 0, "likes": 0, "tags": []}
        info |= {"createdAt": "2026-01-01T00:00:00.000Z", "lastModified": "2026-01-01T00:00:00.000Z"}
        self._json({**info, "siblings": [{"rfilename": path} for path in sorted(tree)]})

    def resolve(self, kind: str | None, repo_id: str, revision: str, path: str) -> None:
        commit, tree = self.hub.store.tree(self._repo(kind or "models", repo_id), revision)
        if path not in tree:
            raise HubError(404, "Entry not found", "EntryNotFound", {"X-Repo-Commit": commit})
        entry = tree[path]
        size, start, end = entry["size"], 0, entry["size"]
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        etag = f'"{entry["sha256"] if entry["lfs"] else entry["git"]}"'
        headers = {"Content-Type": "application/octet-stream", "Accept-Ranges": "bytes", "ETag": etag}
        headers |= {"X-Repo-Commit": commit, "X-Linked-Etag": etag, "X-Linked-Size": size}
        if asked:
            start, end = int(asked[1]), min(int(asked[2]) + 1, size) if asked[2] else size
            if start >= size:
                raise HubError(416, "Requested range not satisfiable", headers={"Content-Range": f"bytes */{size}"})
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
        self._answer(206 if asked else 200, headers, end - start, self._slice(entry["sha256"], start, end))

    def _slice(self, sha256: str, start: int, end: int) -> Iterator[bytes]:
        with self.hub.store.blob(sha256).open("rb") as file:
            file.seek(start)
            while start < end:
                block = file.read(min(end - start, 2**20))
                start += len(block)
                yield block


_REPO = r"/api/(models|datasets|spaces)/([^/]+(?:/[^/]+)?)"  # the oldest repos, such as roberta-base, are nobody's
_PAGE = r"/(?:(datasets|spaces)/)?([^/]+(?:/[^/]+)?)"
ROUTES = [
    ("POST", r"/api/validate-yaml", "validate_yaml"),
    ("POST", r"/api/repos/create", "create"),
    ("POST", _REPO + r"/preupload/([^/]+)", "preupload"),
    ("POST", _PAGE + r"\.git/info/lfs/objects/batch", "lfs_batch"),
    ("PUT", r"/_lfs/([0-9a-f]{64})", "lfs_upload"),
    ("POST", r"/_lfs_verify", "lfs_verify"),
    ("POST", _REPO + r"/commit/([^/]+)", "commit"),
    ("POST", _REPO + r"/branch/([^/]+)", "branch"),
    ("POST", _REPO + r"/tag/([^/]+)", "tag"),
    ("GET", _REPO + r"/auth-check(/write)?", "auth_check"),
    ("GET", _REPO + r"/refs", "refs"),
    ("GET", _REPO + r"/tree/([^/]+)", "list_tree"),
    ("GET", _REPO + r"(?:/revision/([^/]+))?", "info"),
    ("GET HEAD", _PAGE + r"/(?:resolve|raw)/([^/]+)/(.+)", "resolve"),
]
