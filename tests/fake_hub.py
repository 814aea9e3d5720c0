"""A stand-in of the Hugging Face hub on loopback: it takes repositories and commits, and keeps the files that were sent."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from fake_server import listening


@dataclass
class Hub:
    """Where the hub is, and each repository's files as the last commit left them."""

    url: str
    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def commit(self, repository: str, lines: list[dict[str, Any]]) -> None:
        for line in lines:
            if line["key"] == "header":
                self.messages.append(line["value"]["summary"])
            elif line["key"] == "file":
                self.files[repository][line["value"]["path"]] = base64.b64decode(line["value"]["content"])


@contextmanager
def serve_hub() -> Iterator[Hub]:
    with listening(_Handler) as server:
        server.hub = Hub(f"http://127.0.0.1:{server.server_port}")
        yield server.hub


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: Any) -> None:
        pass

    def do_POST(self) -> None:
        hub = self.server.hub
        body = self._read()
        parts = self.path.split("?")[0].strip("/").split("/")
        if parts == ["api", "repos", "create"]:
            name = f"someone/{json.loads(body)['name']}"
            hub.files.setdefault(name, {})
            return self._answer({"url": f"{hub.url}/{name}", "id": name})
        if parts == ["api", "validate-yaml"]:
            return self._answer({"warnings": [], "errors": []})
        repository = "/".join(parts[2:4])
        if parts[4] == "preupload":
            files = json.loads(body)["files"]
            modes = {"uploadMode": "regular", "shouldIgnore": False, "oid": None}
            return self._answer({"files": [{"path": each["path"], **modes} for each in files]})
        hub.commit(repository, [json.loads(line) for line in body.splitlines()])
        oid = "0" * 40
        return self._answer({"success": True, "commitUrl": f"{hub.url}/{repository}/commit/{oid}", "commitOid": oid})

    def _read(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        chunks = []
        while size := int(self.rfile.readline(), 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(chunks)

    def _answer(self, value: dict[str, Any]) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
