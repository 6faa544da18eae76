"""What `push` sends, received by a server that speaks as much of the hub's protocol as an upload needs."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import HfApi, constants

from blocktrain.cli.main import main
from blocktrain.errors import ConfigError, StorageError
from blocktrain.integrations.hub import push


class FakeHub(ThreadingHTTPServer):
    """Keeps what it is sent."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.address = f"http://127.0.0.1:{self.server_port}"
        self.refusing = False
        self.created: list[dict[str, Any]] = []
        self.files: dict[str, bytes] = {}


class Answers(BaseHTTPRequestHandler):
    server: FakeHub  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.server.refusing:
            self.answer({"error": "no"}, 403)
        elif self.path.endswith("/repos/create"):
            self.server.created.append(json.loads(body))
            self.answer({"url": f"{self.server.address}/me/mine"})
        elif self.path.endswith("/validate-yaml"):
            self.answer({"errors": [], "warnings": []})
        elif "/preupload/" in self.path:
            names = [file["path"] for file in json.loads(body)["files"]]
            self.answer({"files": [{"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in names]})
        elif "/commit/" in self.path:
            for line in body.splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    self.server.files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
            address = f"{self.server.address}/me/mine/commit/0123"
            self.answer({"success": True, "commitOid": "0123", "commitUrl": address})
        else:
            self.answer({}, 404)

    def do_GET(self) -> None:
        self.answer({"siblings": [], "sha": "0123", "id": "me/mine"})

    def answer(self, content: dict[str, Any], status: int = 200) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with FakeHub() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "README.md").write_text("# a model\n")
    (folder / "config.json").write_text("{}\n")
    return folder


@pytest.fixture
def api(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> HfApi:
    monkeypatch.setattr(constants, "ENDPOINT", hub.address)  # as HF_ENDPOINT does, which is read at import
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # this server is no hub
    return HfApi(endpoint=hub.address, token="hf_not_a_token")


@pytest.mark.parametrize("public", [False, True])
def test_every_file_is_sent(hub: FakeHub, api: HfApi, model: Path, public: bool) -> None:
    assert push(model, "me/mine", public=public, api=api) == f"{hub.address}/me/mine"
    assert hub.files == {path.name: path.read_bytes() for path in model.iterdir()}
    (created,) = hub.created
    assert created["name"] == "mine"
    assert created["organization"] == "me"
    assert created.get("private", created.get("visibility") == "private") is not public


def test_a_refusal_says_what_to_do(hub: FakeHub, api: HfApi, model: Path) -> None:
    hub.refusing = True
    with pytest.raises(StorageError, match="log in with 'hf auth login' and run 'hf upload me/mine"):
        push(model, "me/mine", api=api)


def test_a_bad_name_is_refused_before_the_export(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["export", str(tmp_path / "run"), str(tmp_path / "out"), "--push", "mine"]
    assert main(arguments) == 2
    assert "'mine' is not the name of a hub repository; write --push owner/name" in capsys.readouterr().err
    with pytest.raises(ConfigError):
        push(tmp_path, "a/b/c")


def test_no_network_and_a_wrong_answer_are_one_message(api: HfApi, hub: FakeHub, model: Path, monkeypatch) -> None:
    """Both came as tracebacks of the HTTP client and of the JSON decoder."""
    with pytest.raises(StorageError, match=r"could not be uploaded .*The folder itself is complete"):
        push(model, "me/mine", api=HfApi(endpoint="http://127.0.0.1:9", token="hf_not_a_token"))

    def answer(self: Answers, content: object, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "6")
        self.end_headers()
        self.wfile.write(b"<html>")

    monkeypatch.setattr(Answers, "answer", answer)
    with pytest.raises(StorageError, match="its answer is not that of a hub"):
        push(model, "me/mine", api=api)
