"""Downloads of CIFAR-10 from local servers that are good, broken, slow, wrong or missing."""

import gc
import hashlib
import io
import sys
import tarfile
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pooch
import pytest

from mcomb.errors import UserError
from mcomb.lab.data import cifar10 as data
from mcomb.lab.data import download

# The downloader leaves the socket of a silent server to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture
def archive(monkeypatch):
    """An archive in CIFAR-10's binary layout with two images per member, and its checksums as the official ones."""
    rng, buffer = np.random.default_rng(0), io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name in data.CIFAR10_BINARY:
            rows = rng.integers(0, 10, (2, 1 + 3 * 32 * 32), dtype=np.uint8)
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = rows.nbytes
            tar.addfile(member, io.BytesIO(rows.tobytes()))
            monkeypatch.setitem(data.CIFAR10_MEMBERS, name, hashlib.sha256(rows.tobytes()).hexdigest())
    return buffer.getvalue()


class Server(ThreadingHTTPServer):
    """A server that answers by `answer` and counts requests."""

    def __init__(self, answer):
        self.asked = 0

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.server.asked += 1
                answer(self)

            def log_message(self, *args):
                pass

        super().__init__(("127.0.0.1", 0), Handler)

    def handle_error(self, request, client_address):  # clients hang up on purpose
        pass


def send(handler, content, length=None, status=200):
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(content) if length is None else length))
    handler.end_headers()
    handler.wfile.write(content)


@pytest.fixture
def serve(monkeypatch, tmp_path):
    """Start a server for CIFAR-10, with an empty cache, no local copy and no TFDS."""
    monkeypatch.delenv(download.DATA_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setitem(sys.modules, "tensorflow_datasets", None)
    servers = []

    def start(answer):
        server = Server(answer)
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.01,)).start()
        monkeypatch.setenv(
            data.CIFAR10_DOWNLOAD.url_variable, f"http://127.0.0.1:{server.server_port}/cifar-10-binary.tar.gz"
        )
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def cached():
    return sorted(path.name for path in pooch.os_cache("mcomb").glob("*") if not path.name.startswith("."))


def test_download_happens_once(serve, archive, capsys):
    server = serve(lambda handler: send(handler, archive))
    first, second = data.CIFAR10.load(None), data.CIFAR10.load(None)
    assert server.asked == 1
    assert first.train.inputs.shape == (10, 32, 32, 3)
    np.testing.assert_array_equal(first.test.inputs, second.test.inputs)
    _, err = capsys.readouterr()
    assert err.count("downloading CIFAR-10 from http://127.0.0.1") == 1
    assert "CIFAR-10: 100%" in err


def test_download_replaces_damaged_copy(serve, archive, capsys):
    server = serve(lambda handler: send(handler, archive))
    first = data.CIFAR10.load(None)
    (pooch.os_cache("mcomb") / cached()[0]).write_bytes(archive[:1000])
    again = data.CIFAR10.load(None)
    assert server.asked == 2
    np.testing.assert_array_equal(first.train.inputs, again.train.inputs)
    assert "downloading it again" in capsys.readouterr().err


def broken(handler, archive):
    send(handler, archive[: len(archive) // 2], len(archive))
    handler.connection.close()


def wrong_pixels(handler, archive):
    """Return a complete archive of other images."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name in data.CIFAR10_BINARY:
            member = tarfile.TarInfo(name)
            member.size = 3073
            tar.addfile(member, io.BytesIO(bytes(3073)))
    send(handler, buffer.getvalue())


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (broken, "Cannot download"),
        (lambda handler, archive: send(handler, b"<html>Please log in.</html>"), "is not CIFAR-10"),
        (wrong_pixels, "is damaged"),
        (lambda handler, archive: send(handler, b"", status=404), "404"),
        (lambda handler, archive: time.sleep(3), "timed out"),
    ],
    ids=["broken", "a page", "other images", "not there", "slow"],
)
def test_download_of_other_file_is_rejected_and_removed(serve, archive, monkeypatch, answer, reason):
    monkeypatch.setattr(download, "TIMEOUT", 0.5)
    serve(lambda handler: answer(handler, archive))
    with pytest.raises(UserError, match=reason) as raised:
        data.CIFAR10.load(None)
    text = str(raised.value)
    assert "\n" not in text
    for remedy in (data.CIFAR10_DOWNLOAD.url_variable, download.DATA_VARIABLE, "--data-dir", "--setup mlp-digits"):
        assert remedy in text
    assert cached() == []
    serve(lambda handler: send(handler, archive))  # the same command succeeds later
    assert len(data.CIFAR10.load(None).test.labels) == 2
    del raised
    gc.collect(1)  # collect here and not in another test


def test_download_without_network_prints_remedy(serve, archive, monkeypatch):
    serve(lambda handler: None)
    unreachable = "http://127.0.0.1:9/cifar-10-binary.tar.gz"  # nothing listens there
    monkeypatch.setenv(data.CIFAR10_DOWNLOAD.url_variable, unreachable)
    with pytest.raises(UserError, match=r"Cannot download CIFAR-10 from http://127\.0\.0\.1:9/"):
        data.CIFAR10.load(None)
    assert cached() == []


def test_download_is_skipped_for_local_copy(serve, archive, tmp_path):
    server = serve(lambda handler: send(handler, archive))
    (tmp_path / "cifar-10-binary.tar.gz").write_bytes(archive)
    assert len(data.CIFAR10.load(tmp_path).train.labels) == 10
    assert server.asked == 0
