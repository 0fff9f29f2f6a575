"""A small Hub on localhost, for tests at the HTTP boundary: the routes that `huggingface_hub` calls, and its rules.

Repositories are folders in memory with commits and branches; some are private or gated. What is pushed gets checked
as a careful reviewer would: every file by its format, and the card against the rules of the real Hub.
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import nbformat
import pytest
import safetensors
import yaml
from huggingface_hub import constants
from PIL import Image


TOKEN = "hf_writer"
READER = "hf_reader"

LICENSES = {"apache-2.0", "mit", "other", "openrail", "cc-by-4.0", "llama3"}
RELATIONS = {"adapter", "merge", "quantized", "finetune"}


@dataclass
class Repository:
    """Commits by hash, each the bytes of every file by path; and branches by name."""

    private: bool = False
    gated: bool = False
    card_data: dict[str, Any] = field(default_factory=dict)
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def commit(self, files: dict[str, bytes], branch: str = "main", message: str = "") -> str:
        sha = hashlib.sha1(f"{len(self.commits)}{sorted(files)}{branch}".encode()).hexdigest()
        self.commits[sha] = {**self.files(branch), **files}
        self.branches[branch] = sha
        self.messages.append(message)
        return sha

    def resolve(self, revision: str) -> str | None:
        sha = self.branches.get(revision, revision)
        return sha if sha in self.commits else None

    def files(self, revision: str = "main") -> dict[str, bytes]:
        sha = self.resolve(revision)
        return {} if sha is None else self.commits[sha]


class FakeHub:
    """The server and what it holds; `reachable()` runs it."""

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.requests: list[tuple[str, str]] = []
        self.uploads: dict[str, bytes] = {}
        self.endpoint = ""

    def add(self, repo_id: str, folder: Path | None = None, **settings: Any) -> Repository:
        repository = self.repositories.setdefault(repo_id, Repository(**settings))
        if folder is not None:
            repository.commit({str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()})
        return repository

    def paths(self, method: str | None = None) -> list[str]:
        return [path for verb, path in self.requests if method in (None, verb)]

    def writes(self) -> list[str]:
        """Requests that would change something."""
        return [p for v, p in self.requests if v in ("POST", "PUT", "DELETE") and "validate-yaml" not in p]

    def fetched(self) -> set[str]:
        """Names of the files that were downloaded."""
        return {path.split("/resolve/")[1].split("/", 1)[1] for path in self.paths("GET") if "/resolve/" in path}

    @contextmanager
    def reachable(self) -> Iterator["FakeHub"]:
        server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.endpoint = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()

    def point_here(self, monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
        """Let this process's `huggingface_hub`, which read its environment long ago, talk to this server."""
        monkeypatch.setattr(constants, "ENDPOINT", self.endpoint)
        monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", self.endpoint)
        monkeypatch.setattr("transformers.utils.hub._hf_api", None, raising=False)  # it keeps the endpoint it first had
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", self.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # uploads go by LFS, which this server speaks
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        for module in ("transformers.utils.hub", "diffusers.configuration_utils", "diffusers.models.modeling_utils"):
            for name in ("HF_HUB_CACHE", "HF_MODULES_CACHE"):
                monkeypatch.setattr(f"{module}.{name}", str(cache), raising=False)
        for variable in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            monkeypatch.delenv(variable, raising=False)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(cache / "no-token"))

    def environment(self, home: Path, token: str | None = TOKEN) -> dict[str, str]:
        """Variables under which another process talks to this server alone."""
        variables = {"HF_ENDPOINT": self.endpoint, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", "OMP_NUM_THREADS": "1"}
        variables |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_XET": "1"}
        return variables if token is None else {**variables, "HF_TOKEN": token}


# --- what is pushed gets checked --------------------------------------------------------------------------------------


def check_files(files: dict[str, bytes]) -> None:
    """Refuse, with a ValueError, files that a reviewer would not let pass."""
    for path, content in files.items():
        suffix = Path(path).suffix
        if suffix == ".json":
            json.loads(content)
        elif suffix == ".safetensors":
            if not safetensors.deserialize(content):
                raise ValueError(f"{path} holds no tensors")
        elif suffix in (".png", ".gif"):
            Image.open(BytesIO(content)).verify()
        elif suffix == ".ipynb":
            nbformat.validate(nbformat.reads(content.decode(), as_version=4))
        elif suffix not in (".md", ".jinja", ".txt", ".model", ".py"):
            raise ValueError(f"{path} is of a kind that doesn't belong in a repository")
    if "README.md" in files:
        check_card(files["README.md"].decode(), files)


def check_card(card: str, files: dict[str, bytes]) -> dict[str, Any]:
    """The card's metadata, if they are as the Hub wants them."""
    match = re.match(r"---\n(.*?)\n---\n", card, re.DOTALL)
    if match is None:
        raise ValueError("the card has no metadata")
    data = yaml.safe_load(match.group(1))
    if data.get("license") not in LICENSES:
        raise ValueError(f"{data.get('license')!r} is no licence")
    if data["license"] == "other" and not data.get("license_name"):
        raise ValueError("another licence needs its `license_name`")
    if "base_model" in data and not re.fullmatch(r"[\w.-]+/[\w.-]+", data["base_model"]):
        raise ValueError(f"{data['base_model']!r} is no repository")
    if "base_model_relation" in data and data["base_model_relation"] not in RELATIONS:
        raise ValueError(f"{data['base_model_relation']!r} is no relation")
    for widget in data.get("widget", []):
        if not widget["text"] or widget["output"]["url"] not in files:
            raise ValueError(f"the widget's picture {widget['output']['url']} is not there")
    for linked in re.findall(r"\]\(((?!https?:|#)[^)]+)\)", card[match.end() :]):
        if linked not in files:
            raise ValueError(f"the card links {linked}, which is not there")
    if re.search(r"\{\{|\{%|\bNone\b|\bnan\b", card):
        raise ValueError("the card was not filled in")
    return data


# --- routes -----------------------------------------------------------------------------------------------------------


class _Refusal(Exception):
    def __init__(self, status: int, code: str = "", message: str = "", sha: str = "") -> None:
        self.status = status
        self.headers = {"X-Error-Code": code, "X-Error-Message": message, "X-Repo-Commit": sha}


REPO = r"(?P<repo>[\w.-]+/[\w.-]+)"
ROUTES: list[tuple[str, str, str]] = [
    ("HEAD|GET", rf"/{REPO}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", "resolve"),
    ("GET", rf"/api/models/{REPO}/tree/(?P<revision>[^/]+)(?:/(?P<folder>.+))?", "tree"),
    ("GET", rf"/api/models/{REPO}(?:/revision/(?P<revision>[^/]+))?", "info"),
    ("POST", r"/api/repos/create", "create"),
    ("POST", r"/api/validate-yaml", "validate_yaml"),
    ("POST", rf"/api/models/{REPO}/branch/(?P<branch>.+)", "branch"),
    ("POST", rf"/api/models/{REPO}/preupload/(?P<revision>[^/]+)", "preupload"),
    ("POST", rf"/{REPO}\.git/info/lfs/objects/batch", "lfs_batch"),
    ("PUT", r"/lfs/(?P<oid>\w+)", "lfs_upload"),
    ("POST", rf"/api/models/{REPO}/commit/(?P<revision>[^/]+)", "commit"),
    ("GET", r"/api/whoami-v2", "whoami"),
]


def _handler(hub: FakeHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def log_message(self, *_: Any) -> None:
            pass

        def _serve(self) -> None:
            split = urlsplit(self.path)
            hub.requests.append((self.command, split.path))
            self.query = parse_qs(split.query)
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            try:
                for verbs, pattern, name in ROUTES:
                    match = re.fullmatch(pattern, split.path)
                    if match and self.command in verbs.split("|"):
                        groups = {key: unquote(value) if value else None for key, value in match.groupdict().items()}
                        method: Callable[..., None] = getattr(self, f"_{name}")
                        return method(body, **groups)
                raise _Refusal(404, "", f"no route {self.command} {split.path}")
            except _Refusal as refusal:
                self._answer(b"", refusal.status, {k: v for k, v in refusal.headers.items() if v})
            except ValueError as error:
                self._json({"error": str(error)}, 400, {"X-Error-Message": str(error).splitlines()[0]})

        do_GET = do_HEAD = do_POST = do_PUT = _serve

        def _answer(self, content: bytes, status: int = 200, headers: dict[str, str] | None = None) -> None:
            self.send_response(status)
            for name, value in (headers or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def _json(self, data: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
            self._answer(json.dumps(data).encode(), status, {"Content-Type": "application/json", **(headers or {})})

        def _token(self) -> str | None:
            token = (self.headers.get("Authorization") or "").removeprefix("Bearer ") or None
            if token not in (None, TOKEN, READER):
                raise _Refusal(401, "", "Invalid credentials in Authorization header")
            return token

        def _writer(self) -> None:
            if self._token() is None:
                raise _Refusal(401, "", "Invalid username or password.")
            if self._token() != TOKEN:
                raise _Refusal(403, "", "You don't have the rights to write here")

        def _repository(self, repo_id: str, files: bool = False) -> Repository:
            token = self._token()
            repository = hub.repositories.get(repo_id)
            if repository is None or (repository.private and token != TOKEN):
                raise _Refusal(404 if token else 401, "RepoNotFound", "Repository not found")
            if files and repository.gated and token != TOKEN:
                raise _Refusal(403 if token else 401, "GatedRepo", f"Access to model {repo_id} is restricted")
            return repository

        def _sha(self, repository: Repository, revision: str | None) -> str:
            sha = repository.resolve(revision or "main")
            if sha is None:
                raise _Refusal(404, "RevisionNotFound", "Invalid rev id")
            return sha

        def _resolve(self, body: bytes, repo: str, revision: str, path: str) -> None:
            repository = self._repository(repo, files=True)
            sha = self._sha(repository, revision)
            content = repository.commits[sha].get(path)
            if content is None:
                raise _Refusal(404, "EntryNotFound", "Entry not found", sha)
            etag = hashlib.sha256(content).hexdigest()
            self._answer(content, headers={"X-Repo-Commit": sha, "ETag": f'"{etag}"'})

        def _info(self, body: bytes, repo: str, revision: str | None) -> None:
            repository = self._repository(repo)
            sha = self._sha(repository, revision) if repository.commits else "0" * 40
            names = [{"rfilename": path} for path in repository.files(sha)]
            card = repository.files(sha).get("README.md", b"").decode()
            pushed = re.match(r"---\n(.*?)\n---\n", card, re.DOTALL)
            data = yaml.safe_load(pushed.group(1)) if pushed else repository.card_data
            info = {"id": repo, "sha": sha, "private": repository.private, "siblings": names, "tags": []}
            self._json({**info, "gated": "auto" if repository.gated else False, "cardData": data})

        def _tree(self, body: bytes, repo: str, revision: str, folder: str | None) -> None:
            repository = self._repository(repo)
            sha = self._sha(repository, revision)
            inside = {p: c for p, c in repository.commits[sha].items() if p.startswith(f"{folder}/" if folder else "")}
            if not inside:
                raise _Refusal(404, "EntryNotFound", "Entry not found", sha)
            rows = [{"type": "file", "path": p, "size": len(c), "oid": _git_id(c)} for p, c in inside.items()]
            self._json(rows)

        def _create(self, body: bytes) -> None:
            self._writer()
            wanted = json.loads(body)
            repo_id = f"{wanted.get('organization') or 'user'}/{wanted['name']}"
            exists = repo_id in hub.repositories
            hub.add(repo_id, private=wanted.get("visibility") == "private" or bool(wanted.get("private")))
            if not exists:
                hub.repositories[repo_id].commit({".gitattributes": b""}, message="initial commit")
            self._json({"url": f"{hub.endpoint}/{repo_id}", "id": repo_id}, 409 if exists else 200)

        def _validate_yaml(self, body: bytes) -> None:
            card = json.loads(body)["content"]
            pictures = dict.fromkeys(re.findall(r"[\w/.-]+\.(?:png|gif)", card), b"")
            try:
                check_card(card, {**pictures, **dict.fromkeys(re.findall(r"\]\(([^)]+)\)", card), b"")})
            except (ValueError, yaml.YAMLError) as error:
                return self._json({"errors": [{"message": str(error)}], "warnings": []}, 400)
            self._json({"errors": [], "warnings": []})

        def _branch(self, body: bytes, repo: str, branch: str) -> None:
            self._writer()
            repository = self._repository(repo)
            exists = branch in repository.branches
            repository.branches.setdefault(branch, repository.branches["main"])
            self._json({}, 409 if exists else 200)

        def _preupload(self, body: bytes, repo: str, revision: str) -> None:
            self._writer()
            self._sha(self._repository(repo), revision)
            names = [file["path"] for file in json.loads(body)["files"]]
            modes = {name: "lfs" if name.endswith((".safetensors", ".png", ".gif")) else "regular" for name in names}
            self._json({"files": [{"path": n, "uploadMode": m, "shouldIgnore": False} for n, m in modes.items()]})

        def _lfs_batch(self, body: bytes, repo: str) -> None:
            self._writer()
            objects = [
                {**item, "actions": {"upload": {"href": f"{hub.endpoint}/lfs/{item['oid']}"}}}
                for item in json.loads(body)["objects"]
            ]
            self._json({"transfer": "basic", "objects": objects})

        def _lfs_upload(self, body: bytes, oid: str) -> None:
            if hashlib.sha256(body).hexdigest() != oid:
                raise ValueError("the upload was damaged")
            hub.uploads[oid] = body
            self._json({})

        def _commit(self, body: bytes, repo: str, revision: str) -> None:
            self._writer()
            repository = self._repository(repo)
            self._sha(repository, revision)
            files: dict[str, bytes] = {}
            message = ""
            for line in body.splitlines():
                item = json.loads(line)
                value = item["value"]
                if item["key"] == "header":
                    message = value["summary"]
                elif item["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif item["key"] == "lfsFile":
                    files[value["path"]] = hub.uploads[value["oid"]]
            check_files(files)
            is_request = "create_pr" in self.query
            branch = "refs/pr/1" if is_request else revision
            if is_request:
                repository.branches[branch] = repository.branches["main"]
            sha = repository.commit(files, branch, message)
            url = f"{hub.endpoint}/{repo}"
            request = {"pullRequestUrl": f"{url}/discussions/1"} if is_request else {}
            self._json({"success": True, "commitOid": sha, "commitUrl": f"{url}/commit/{sha}", **request})

        def _whoami(self, body: bytes) -> None:
            self._writer()
            self._json({"type": "user", "name": "user", "auth": {"accessToken": {"role": "write"}}})

    return Handler


def _git_id(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
