"""A real S3 server on loopback, in memory, that can be told to refuse."""

import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

KEYS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "not-a-secret",
    "AWS_EC2_METADATA_DISABLED": "true",
}
_REFUSAL = "<Error><Code>{code}</Code><Message>told so by the test</Message></Error>"


@dataclass
class ObjectStore:
    """`uri` names a prefix in a bucket. `refuse` gets (method, path) and may name an S3 error."""

    uri: str
    refuse: Callable[[str, str], str | None] = lambda *_: None
    requests: list[tuple[str, str]] = field(default_factory=list)


@contextmanager
def serve_store() -> Iterator[ObjectStore]:
    """Serve one bucket until the block ends."""
    backend = DomainDispatcherApplication(create_backend_app)
    store = ObjectStore("")

    def application(environ: dict[str, Any], start: Callable) -> Any:
        method, path = environ["REQUEST_METHOD"], environ["PATH_INFO"]
        store.requests.append((method, path))
        code = store.refuse(method, path)
        if code is None:
            return backend(environ, start)
        body = _REFUSAL.format(code=code).encode()
        start("403 Forbidden", [("Content-Type", "text/xml"), ("Content-Length", str(len(body)))])
        return [body]

    server = make_server("127.0.0.1", 0, application, threaded=True, request_handler=_QuietHandler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        host = f"127.0.0.1:{server.port}"
        put = urllib.request.Request(f"http://{host}/bucket", method="PUT")
        urllib.request.urlopen(put).close()
        options = f"endpoint_override={host}&scheme=http&region=us-east-1"
        store.uri = f"s3://bucket/runs/one?{options}"
        yield store
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
        _forget_everything()


class _QuietHandler(WSGIRequestHandler):
    def log_request(self, *_: Any) -> None:
        """No line for a request."""


def _forget_everything() -> None:
    from moto.core.base_backend import BackendDict  # every bucket lives in this process
    from moto.s3.models import s3_backends

    assert isinstance(s3_backends, BackendDict)
    for account in s3_backends.values():
        for backend in account.values():
            backend.reset()
