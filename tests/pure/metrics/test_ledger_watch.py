"""The watch that end-to-end tests keep over a run's token ledger."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from tests.e2e.ledger_watch import LedgerWatch
from tests.waiting import until

PAGE = """# HELP baton_tokens Ledger of accepted tokens.
baton_tokens{{fate="open",ident="buffer"}} {open}.0
baton_tokens{{fate="trained",ident="buffer"}} 90.0
baton_accepted_tokens_total{{ident="buffer"}} 100.0
"""


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[list[str]]:
    """A run's folder whose `/metrics` shows the first of these pages."""
    pages = [""]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(pages[0].encode())

        def log_message(self, *arguments: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        (tmp_path / "address.json").write_text(json.dumps({"url": f"http://127.0.0.1:{server.server_port}"}))
        yield pages
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(("n_open", "differences"), [(10, []), (7, [3.0])])
def test_a_ledger_that_does_not_close_is_kept(
    tmp_path: Path, serve: list[str], n_open: int, differences: list[float]
) -> None:
    serve[0] = PAGE.format(open=n_open)
    watch = LedgerWatch(tmp_path)
    until(lambda: watch.scrapes >= 1, 30)
    watch.stop()
    assert watch.open[:1] == differences
