"""A stand-in for the Hugging Face hub: the part of its HTTP interface that a download of a model needs."""

import contextlib
import dataclasses
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

LARGE = 2048  # bytes; larger files are listed with their SHA-256, as the hub has files in LFS
COMMIT = hashlib.sha1(b"first").hexdigest()


@dataclasses.dataclass
class Hosted:
    """A repository of the stand-in.

    Attributes:
      files: name -> content.
      commit: which ``main`` is.
      status: of every answer about it, with this code of the hub's in ``X-Error-Code``; None if it is there for all.
      gated: whether the list is for all, but the files are not.
    """

    files: dict[str, bytes]
    commit: str = COMMIT
    status: tuple[int, str] | None = None
    gated: bool = False


class Hub:
    """The state of the stand-in, and what it has seen.

    Attributes:
      repositories: ``org/name`` -> the repository.
      sent: (name of a file, first byte, number of bytes) of each answer with content.
      requests: method and path of every request.
      cut: name of a file -> how many bytes of it are sent before the connection breaks, once.
      hold: name of a file -> how many bytes of it are sent before the stand-in falls silent, until ``released``.
      elsewhere: whether large files are somewhere else, where a redirect leads, as on the hub.
      tokens: the header Authorization of every request for content, with the host that was asked.
      down: whether every connection is closed without an answer.
      down_after_cut: whether that is so from the next cut on.
      lies: name of a file -> what is sent in place of its content.
    """

    def __init__(self):
        self.repositories: dict[str, Hosted] = {}
        self.sent: list[tuple[str, int, int]] = []
        self.requests: list[str] = []
        self.cut: dict[str, int] = {}
        self.lies: dict[str, bytes] = {}
        self.hold: dict[str, int] = {}
        self.released = threading.Event()
        self.elsewhere = False
        self.tokens: list[tuple[str, str | None]] = []
        self.down = False
        self.down_after_cut = False
        self.url = ""

    def host(self, name: str, folder: Path, **settings) -> Hosted:
        """Put the files of a folder into a repository."""
        files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        self.repositories[name] = Hosted(files, **settings)
        return self.repositories[name]

    def bytes_of(self, name: str) -> int:
        """How many bytes of a file were sent in all."""
        return sum(size for file, _, size in self.sent if file == name)


@contextlib.contextmanager
def hub_server() -> Iterator[Hub]:
    """A running stand-in; its address is ``Hub.url``."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # a client that has gone
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        hub.released.set()
        server.shutdown()
        server.server_close()
        thread.join()


def digest_of(content: bytes) -> str:
    """What the hub lists for a file: SHA-256 of a large one, git's SHA-1 of a small one."""
    if len(content) > LARGE:
        return hashlib.sha256(content).hexdigest()
    return hashlib.sha1(f"blob {len(content)}\0".encode() + content).hexdigest()


def same(folder: str, source: Path) -> bool:
    """Whether every file of a downloaded folder is the source's."""
    return all(path.read_bytes() == (source / path.name).read_bytes() for path in Path(folder).iterdir())


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path = self.path.partition("?")[0]
        self.hub.requests.append(f"{self.command} {path}")
        if self.hub.down:
            self.close_connection = True
            return
        api = re.fullmatch(r"/api/models/([\w.-]+/[\w.-]+)/(revision/(?P<revision>.+)|auth-check)", path)
        file = re.fullmatch(r"(?:/elsewhere)?/([\w.-]+/[\w.-]+)/resolve/(\w+)/(.+)", path)
        name = api[1] if api else file[1] if file else ""
        hosted = self.hub.repositories.get(name)
        if hosted is None:
            self._error(404, "RepoNotFound")
        elif hosted.status is not None:
            self._error(*hosted.status)
        elif hosted.gated and (file or (api and not api["revision"])):
            self._error(403, "GatedRepo")
        elif api:
            self._info(name, hosted, api["revision"])
        elif file:
            self._file(hosted, file[2], file[3])

    def _error(self, status: int, code: str):
        self._answer(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code})

    def _info(self, name: str, hosted: Hosted, revision: str | None):
        if revision not in (None, "main", hosted.commit):
            return self._error(404, "RevisionNotFound")
        siblings = []
        for path, content in hosted.files.items():
            entry = {"rfilename": path, "size": len(content), "blobId": hashlib.sha1(content).hexdigest()}
            if len(content) > LARGE:
                entry["lfs"] = {"sha256": digest_of(content), "size": len(content), "pointerSize": 134}
            else:
                entry["blobId"] = digest_of(content)
            siblings.append(entry)
        gated = "manual" if hosted.gated else False
        info = {"id": name, "modelId": name, "sha": hosted.commit, "gated": gated, "siblings": siblings}
        self._answer(200, json.dumps(info).encode(), {"Content-Type": "application/json"})

    def _file(self, hosted: Hosted, commit: str, name: str):
        content = hosted.files.get(name)
        if content is None or commit != hosted.commit:
            return self._error(404, "EntryNotFound")
        digest = digest_of(content)
        headers = {"X-Repo-Commit": commit, "ETag": f'"{digest}"', "X-Linked-ETag": f'"{digest}"'}
        headers |= {"X-Linked-Size": str(len(content)), "Accept-Ranges": "bytes"}
        if self.command == "GET":
            self.hub.tokens.append((self.headers["Host"].partition(":")[0], self.headers["Authorization"]))
        if self.hub.elsewhere and len(content) > LARGE and not self.path.startswith("/elsewhere"):
            place = self.hub.url.replace("127.0.0.1", "localhost")
            return self._answer(302, b"", {**headers, "Location": f"{place}/elsewhere{self.path}"})
        content = self.hub.lies.get(name, content)
        given = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        first = int(given[1]) if given else 0
        if first:
            headers["Content-Range"] = f"bytes {first}-{len(content) - 1}/{len(content)}"
        self._answer(206 if first else 200, content[first:], headers, (name, first))

    def _answer(self, status: int, body: bytes, headers: dict[str, str], of: tuple[str, int] | None = None):
        self.send_response(status)
        for key, value in headers.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if of is not None and of[0] in self.hub.cut:
            body = body[: self.hub.cut.pop(of[0])]
            self.hub.down = self.hub.down_after_cut
            self.close_connection = True
        if of is not None and of[0] in self.hub.hold:
            size = self.hub.hold.pop(of[0])
            self.wfile.write(body[:size])
            self.hub.sent.append((*of, size))
            self.hub.released.wait()
            self.close_connection = True
            return
        self.wfile.write(body)
        if of is not None:
            self.hub.sent.append((*of, len(body)))
