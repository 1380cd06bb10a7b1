"""The Anthropic SDK itself, in an environment of its own, against the dialect of Messages."""

from __future__ import annotations

import json
import subprocess
import threading
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from service.rollout.chat.chat import Chat
from tests.pure.agents.dialect_clients import CLIENTS, QUESTION, SEARCH, SYSTEM
from tests.pure.agents.dialect_server import DialectServer
from tests.pure.agents.test_dialects import REPLIES, TURNS, told

SDK = "anthropic==2.12.0"
PROGRAM = Path(__file__).with_name("anthropic_program.py")

pytestmark = [pytest.mark.full, pytest.mark.slow]


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of a fresh environment with the SDK."""
    folder = tmp_path_factory.mktemp("anthropic")
    venv.create(folder, with_pip=True)
    made = folder / "bin" / "python"
    subprocess.run([made, "-m", "pip", "install", "--quiet", SDK], check=True, timeout=500)
    return made


@contextmanager
def listening(server: DialectServer) -> Iterator[str]:
    """The address of a server on this machine."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            served = server.post(self.path, self.rfile.read(int(self.headers["content-length"])))
            self.send_response(served.status)
            self.send_header("content-type", "text/event-stream" if served.is_stream else "application/json")
            self.send_header("content-length", str(len(served.body)))
            self.end_headers()
            self.wfile.write(served.body)

        def log_message(self, *_: object) -> None:
            pass

    http = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=http.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_port}"
    finally:
        http.shutdown()
        thread.join()
        http.server_close()


@pytest.mark.parametrize("kind", ["create", "stream"])
def test_the_anthropic_sdk_has_the_tokens_and_replies_of_the_openai_sdk(
    bytes_chat: Chat, python: Path, kind: str
) -> None:
    expected, server = DialectServer(bytes_chat, iter(REPLIES)), DialectServer(bytes_chat, iter(REPLIES))
    heard = [told(one) for one in CLIENTS["chat"](expected, False, TURNS)]
    tool = {"name": SEARCH["name"], "description": SEARCH["description"], "input_schema": SEARCH["parameters"]}
    asked = {"question": QUESTION, "system": SYSTEM, "tools": [tool], "turns": TURNS}
    with listening(server) as url:
        command = [python, PROGRAM, url, kind, json.dumps(asked)]
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=100)
    printed = json.loads(done.stdout)
    assert [(text, thinking, list(map(tuple, calls))) for text, thinking, calls in printed["heard"]] == heard
    tokens = [[call.token_ids().tolist() for call in one.tree.calls] for one in (expected, server)]
    assert tokens[0] == tokens[1]
    assert printed["counted"] == len(bytes_chat.prompt([{"role": "user", "content": QUESTION}]))
    assert "tool_choice" in printed["refused"]
