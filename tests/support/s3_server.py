"""A local S3 server (moto's) whose requests fail, hang, come late or are lost where a test says."""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psutil

KEY, SECRET = "testing-key", "testing-very-secret-access-key-0123456789"
BUCKET = "runs"
Answer = Callable[..., Any]
ALL = frozenset({-1})


@dataclass
class Faults:
    """Which of the next requests meets a fault, and which: counted from `arm` on, those alone whose
    method and path hold `of`."""

    count: int = 0
    at: frozenset[int] = frozenset()
    of: str = ""
    how: str = ""
    met: int = 0
    requests: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def arm(self, how: str = "", at: Iterable[int] = (), of: str = "") -> None:
        with self.lock:
            self.count, self.at, self.how, self.of = 0, frozenset(at), how, of
            self.met, self.requests = 0, []

    def next(self, request: str) -> str:
        """The fault of this request, if any."""
        with self.lock:
            self.requests.append(request)
            self.count += self.of in request
            if self.of not in request or (self.count not in self.at and self.at != ALL):
                return ""
            self.met += 1
            return self.how


def kill(environ: dict[str, Any]) -> None:
    """Kills the process that a request came from, by the ports of its connection: another process
    may have the first one, to another server."""
    ends = int(environ["REMOTE_PORT"]), int(environ["SERVER_PORT"])
    found = [c for c in psutil.net_connections("tcp") if c.raddr]
    [process] = {c.pid for c in found if (c.laddr.port, c.raddr.port) == ends and c.pid}
    os.kill(process, signal.SIGKILL)
    psutil.wait_procs([psutil.Process(process)], timeout=0.1)


def faulty(app: Answer, faults: Faults) -> Answer:
    """The server's answers, with the faults."""

    def answer(environ: dict[str, Any], start: Answer) -> Any:
        request = f"{environ['REQUEST_METHOD']} {environ.get('PATH_INFO', '')}"
        how = faults.next(request)
        if how == "kill-before":
            kill(environ)
            return refused(start)
        if how == "fail":
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            return refused(start)
        if how == "denied":
            start("403 Forbidden", [("Content-Type", "application/xml")])
            said = f"{KEY} {SECRET}"
            return [f"<Error><Code>AccessDenied</Code><Message>{said}</Message></Error>".encode()]
        if how == "hang":
            time.sleep(30)
            return refused(start)
        if how == "late":
            time.sleep(1)
        if how == "kill-within":
            # The body was sent by half: nothing of it is taken.
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0) // 2)
            kill(environ)
            return refused(start)
        done = app(environ, start)
        if how == "kill-after":
            kill(environ)
        if how == "lost":  # it was carried out, and nobody hears of it
            environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
        return done

    return answer


def refused(start: Answer) -> list[bytes]:
    start("503 Slow Down", [("Content-Type", "application/xml")])
    return [b"<Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>"]


@contextmanager
def s3_server() -> Iterator[tuple[dict[str, str], Faults]]:
    """The variables by which clients reach a server that has the bucket `runs`, and its faults."""
    import boto3
    from moto.server import DomainDispatcherApplication, create_backend_app
    from s3fs import S3FileSystem
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Quiet(WSGIRequestHandler):
        def log(self, *_: object) -> None:
            pass

    faults = Faults()
    app = faulty(DomainDispatcherApplication(create_backend_app), faults)
    server = make_server("127.0.0.1", 0, app, threaded=True, request_handler=Quiet)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    variables = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{server.server_port}",
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    boto3.client(
        "s3", endpoint_url=variables["AWS_ENDPOINT_URL"], aws_access_key_id=KEY,
        aws_secret_access_key=SECRET, region_name="us-east-1",
    ).create_bucket(Bucket=BUCKET)  # fmt: skip
    S3FileSystem.clear_instance_cache()  # of a server before
    faults.arm()
    try:
        yield variables, faults
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
