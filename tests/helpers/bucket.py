"""A fake Google Cloud Storage server on the loopback address, for the real clients gcsfs and tensorstore.

The server implements the part of the JSON API that they use, stores whole objects with their generations, and checks
preconditions. Like the real service, it has no appends, renames or locks.
"""

import json
import re
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

BUCKET = "bucket"
OBJECT = re.compile(
    rf"(?:/download)?/storage/v1/b/{BUCKET}/o/(?P<name>[^/]+)(?:/rewriteTo/b/{BUCKET}/o/(?P<to>[^/]+))?"
)


class Bucket(ThreadingHTTPServer):
    """A server of gs://bucket, used as `with Bucket() as bucket:`.

    `objects` maps names to the stored objects. The server calls `before_writing(name)` before it writes an object.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.objects, self._generations, self.uploads, self.lock = {}, {}, [], threading.RLock()
        self.before_writing = lambda name: None

    def __enter__(self):
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *error):
        self.shutdown()
        self.server_close()

    def handle_error(self, request, client_address):
        """Ignore clients that have disconnected."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)

    @property
    def environment(self):
        """Return environment variables that direct clients to this server, without credentials."""
        url = f"http://127.0.0.1:{self.server_port}"
        return {
            "STORAGE_EMULATOR_HOST": url,
            "TENSORSTORE_GCS_HTTP_URL": url,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "none",
            "GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT": "false",
        }

    def generation(self, name):
        """Return the version of an object; 0 if it does not exist."""
        return self._generations.get(name, 0) if name in self.objects else 0

    def put(self, name, content):
        """Write a whole object."""
        with self.lock:
            self.objects[name] = content
            self._generations[name] = max(self._generations.get(name, 0) + 1, time.time_ns() // 1000)

    def about(self, name):
        """Return the API's description of an object."""
        generation = self.generation(name)
        when = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(generation / 1e6))
        numbers = {"size": str(len(self.objects[name])), "generation": str(generation), "metageneration": "1"}
        return {
            "kind": "storage#object",
            "bucket": BUCKET,
            "name": name,
            "updated": when,
            "timeCreated": when,
            **numbers,
        }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Bucket

    def do_GET(self):
        self.receive()
        match = OBJECT.fullmatch(self.path)
        if self.path == f"/storage/v1/b/{BUCKET}":
            return self.answer(200, {"kind": "storage#bucket", "name": BUCKET})
        if self.path == f"/storage/v1/b/{BUCKET}/o":
            return self.answer(200, self.listing())
        name = unquote(match["name"]) if match else None
        if name not in self.server.objects or not self.allowed(name):
            return (
                None if name in self.server.objects else self.answer(404, {"error": {"code": 404, "message": "none"}})
            )
        if self.query.get("alt") != "media":
            return self.answer(200, self.server.about(name))
        with self.server.lock:
            content, generation = self.server.objects[name], self.server.generation(name)
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        status, headers = 200, {"x-goog-generation": str(generation)}
        if wanted and content:
            first, last = int(wanted[1]), min(int(wanted[2] or len(content)), len(content) - 1)
            status, headers["Content-Range"] = 206, f"bytes {first}-{last}/{len(content)}"
            content = content[first : last + 1]
        return self.answer(status, content, headers)

    def do_POST(self):
        body = self.receive()
        if self.path.startswith("/batch/"):
            return self.batch(body)
        if (match := OBJECT.fullmatch(self.path)) and match["to"]:
            name, to = unquote(match["name"]), unquote(match["to"])
            self.server.put(to, self.server.objects[name])
            return self.answer(
                200, {"kind": "storage#rewriteResponse", "done": True, "resource": self.server.about(to)}
            )
        if upload := re.fullmatch(r"/upload/(\d+)", self.path):
            return self.go_on(int(upload[1]), body)
        if self.path != f"/upload/storage/v1/b/{BUCKET}/o":
            return self.answer(404, {"error": {"code": 404, "message": "no such bucket"}})
        name = self.query["name"]
        if self.query["uploadType"] == "resumable":
            self.server.uploads.append((name, bytearray()))
            place = f"http://{self.headers['Host']}/upload/{len(self.server.uploads) - 1}"
            return self.answer(200, b"", {"Location": place})
        return self.write(name, body)

    def go_on(self, upload, piece):
        """Continue a chunked upload, and create the object after the last chunk."""
        name, content = self.server.uploads[upload]
        content += piece
        if self.headers["Content-Range"].endswith("/*"):
            return self.answer(308, b"", {"Range": f"bytes=0-{len(content) - 1}"})
        return self.write(name, bytes(content))

    def write(self, name, content):
        self.server.before_writing(name)
        with self.server.lock:  # check the precondition and write atomically
            if self.allowed(name):
                self.server.put(name, content)
                self.answer(200, self.server.about(name))

    def do_DELETE(self):
        self.receive()
        name = unquote(OBJECT.fullmatch(self.path)["name"])
        if self.allowed(name):
            found = self.server.objects.pop(name, None)
            self.answer(204 if found is not None else 404, b"")

    def batch(self, body):
        """Delete one object for each part of the request."""
        answers = []
        for name in re.findall(rf"DELETE /storage/v1/b/{BUCKET}/o/(\S+) HTTP", body.decode()):
            found = self.server.objects.pop(unquote(name), None)
            answers.append(
                f"Content-Type: application/http\n\nHTTP/1.1 {'404 Not Found' if found is None else '204 OK'}\n"
            )
        text = "".join(f"--part\n{answer}\n" for answer in answers) + "--part--"
        self.answer(200, text.encode(), {"Content-Type": "multipart/mixed; boundary=part"})

    def listing(self):
        prefix, delimiter = self.query.get("prefix", ""), self.query.get("delimiter")
        items, folders = [], set()
        for name in sorted(self.server.objects):
            rest = name.removeprefix(prefix)
            if not name.startswith(prefix) or not self.query.get("startOffset", "") <= name:
                continue
            if "endOffset" in self.query and name >= self.query["endOffset"]:
                continue
            if delimiter and delimiter in rest:
                folders.add(prefix + rest.split(delimiter)[0] + delimiter)
            else:
                items.append(self.server.about(name))
        return {"kind": "storage#objects", "items": items, "prefixes": sorted(folders)}

    def allowed(self, name):
        """Return whether the request's preconditions hold, and send an error if not."""
        generation = self.server.generation(name)
        if int(self.query.get("ifGenerationMatch", generation)) != generation:
            return self.answer(412, b"")
        if int(self.query.get("ifGenerationNotMatch", -1)) == generation:
            return self.answer(304, b"")
        return True

    def receive(self):
        """Read the request's path and query; return its body."""
        url = urlsplit(self.path)
        self.path, self.query = url.path, {name: values[0] for name, values in parse_qs(url.query).items()}
        if self.headers.get("Transfer-Encoding") == "chunked":
            chunks = []
            while size := int(self.rfile.readline(), 16):
                chunks.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(chunks)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def answer(self, status, content, headers=()):
        """Send a response."""
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        kind = "application/octet-stream" if isinstance(content, bytes) else "application/json"
        for name, value in ({"Content-Type": kind, "Content-Length": str(len(body))} | dict(headers)).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        """Log nothing."""
