"""Real package servers on loopback, and two ways in which the way to one goes wrong."""

import base64
import contextlib
import functools
import hashlib
import http.server
import os
import re
import secrets
import shutil
import socket
import subprocess
import threading
import time

import requests
from requests_toolbelt.multipart import MultipartDecoder

HOST = "127.0.0.1"
USER, PASSWORD = "team", "correct-horse"
JSON = "application/vnd.pypi.simple.v1+json"


def free_port():
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def running(command, ready, log):
    """Runs a server until the block ends; starts the block when the URL `ready` answers."""
    with open(log, "ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        deadline = time.monotonic() + 90
        while True:
            assert process.poll() is None, f"{command[0]} ended:\n{log.read_text()}"
            assert time.monotonic() < deadline, f"{command[0]} does not answer:\n{log.read_text()}"
            with contextlib.suppress(requests.ConnectionError):
                requests.get(ready, timeout=10)
                break
            time.sleep(0.1)
        yield process
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class PyPIServer:
    """pypiserver on a folder of packages, with one user."""

    def __init__(self, folder):
        self.packages, self.log, self.passwords = folder / "packages", folder / "log", folder / "htpasswd"
        self.packages.mkdir(parents=True)
        digest = base64.b64encode(hashlib.sha1(PASSWORD.encode()).digest()).decode()
        self.passwords.write_text(f"{USER}:{{SHA}}{digest}\n")
        self.port = free_port()
        self.upload_url = f"http://{HOST}:{self.port}/"
        self.index_url = f"{self.upload_url}simple/"

    def running(self):
        command = [shutil.which("pypi-server"), "run", "-i", HOST, "-p", str(self.port), "--disable-fallback"]
        command += ["-P", str(self.passwords), "-a", "update", str(self.packages)]
        return running(command, self.upload_url, self.log)


class Devpi:
    """devpi with a user, an index that is the user's, and one that is read-only."""

    def __init__(self, folder):
        self.data, self.log = folder / "data", folder / "log"
        folder.mkdir(parents=True)
        secret = folder / "secret"
        secret.write_text(secrets.token_urlsafe(48))
        secret.chmod(0o600)
        self.port = free_port()
        self.root = f"http://{HOST}:{self.port}"
        self.upload_url, self.index_url = f"{self.root}/{USER}/wheels/", f"{self.root}/{USER}/wheels/+simple/"
        self.read_only_url = f"{self.root}/{USER}/frozen/"
        command = [shutil.which("devpi-init"), "--serverdir", str(self.data), "--no-root-pypi"]
        subprocess.run([*command, "--root-passwd", PASSWORD], check=True, capture_output=True)
        self.command = [shutil.which("devpi-server"), "--serverdir", str(self.data), "--host", HOST]
        self.command += ["--port", str(self.port), "--offline-mode", "--threads", "4", "--secretfile", str(secret)]
        # By default it spends 20 seconds on deriving a key.
        self.command += ["--argon2-memory", "1024", "--argon2-time", "1", "--argon2-parallelism", "1"]

    @contextlib.contextmanager
    def running(self):
        with running(self.command, f"{self.root}/+api", self.log) as process:
            if requests.get(f"{self.root}/{USER}", timeout=60).status_code == 404:
                self._configure()
            yield process

    def _configure(self):
        """Through devpi's own JSON API."""
        answer = requests.post(f"{self.root}/+login", json={"user": "root", "password": PASSWORD}, timeout=60)
        token = base64.b64encode(f"root:{answer.json()['result']['password']}".encode()).decode()
        stage = {"type": "stage", "bases": [], "volatile": False}
        for path, value in (
            (USER, {"password": PASSWORD, "email": "team@example.com"}),
            (f"{USER}/wheels", {**stage, "acl_upload": [USER]}),
            (f"{USER}/frozen", {**stage, "acl_upload": ["root"]}),
        ):
            headers = {"X-Devpi-Auth": token, "Accept": "application/json"}
            requests.put(f"{self.root}/{path}", json=value, headers=headers, timeout=60).raise_for_status()


class StaticSite:
    """A folder over HTTP, as a plain file server gives it; with `negotiate`, as nginx with publishing.md's lines."""

    def __init__(self, folder, negotiate=False):
        self.folder, self.negotiate, self.requested = folder, negotiate, []

    def __enter__(self):
        handler = functools.partial(_Files, self)
        self.server = http.server.ThreadingHTTPServer((HOST, 0), handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://{HOST}:{self.server.server_address[1]}/"
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()


class _Files(http.server.SimpleHTTPRequestHandler):
    def __init__(self, site, *arguments):
        self.site = site
        super().__init__(*arguments, directory=os.fspath(site.folder))

    def do_GET(self):
        self.site.requested.append(self.path)
        if self.site.negotiate and self.path.endswith("/") and JSON in self.headers.get("Accept", ""):
            self.path += "index.json"
        super().do_GET()

    def guess_type(self, path):
        return JSON if self.site.negotiate and str(path).endswith("index.json") else super().guess_type(path)

    def log_message(self, *_):
        pass


class Uploads:
    """An index that takes uploads and lists them, and calls `first` when it is first asked for anything."""

    def __init__(self, first=lambda: None, stored=lambda data: data):
        self.first, self.stored, self.received, self.listed = first, stored, {}, {}

    def __enter__(self):
        self.server = http.server.ThreadingHTTPServer((HOST, 0), functools.partial(_Uploads, self))
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.url = f"http://{HOST}:{self.server.server_address[1]}/"
        return self

    def __exit__(self, *_):
        self.server.shutdown()
        self.server.server_close()

    def asked(self):
        first, self.first = self.first, lambda: None
        first()


class _Uploads(http.server.BaseHTTPRequestHandler):
    def __init__(self, index, *arguments):
        self.index = index
        super().__init__(*arguments)

    def do_GET(self):
        self.index.asked()
        links = "".join(
            f'<a href="/{name}#sha256={hashlib.sha256(data).hexdigest()}">{name}</a>'
            for name, data in self.index.listed.items()
        )
        self._answer(f"<!DOCTYPE html>{links}".encode())

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        for part in MultipartDecoder(body, self.headers["Content-Type"]).parts:
            named = re.search(rb'filename="([^"]+)"', part.headers[b"Content-Disposition"])
            if named:
                self.index.received[named[1].decode()] = part.content
                self.index.listed[named[1].decode()] = self.index.stored(part.content)
        self._answer(b"")

    def _answer(self, data):
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        pass


class CutWire:
    """Passes bytes on to a server, until `limit` bytes of an upload have passed: then calls `cut` and hangs up."""

    def __init__(self, port, limit, cut):
        self.target, self.limit, self.cut = port, limit, cut

    def __enter__(self):
        self.listener = socket.create_server((HOST, 0))
        self.url = f"http://{HOST}:{self.listener.getsockname()[1]}/"
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.listener.close()

    def _accept(self):
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._pass_on, args=(client,), daemon=True).start()

    def _pass_on(self, client):
        with client, contextlib.suppress(OSError), socket.create_connection((HOST, self.target)) as server:
            threading.Thread(target=self._answer, args=(server, client), daemon=True).start()
            seen, upload = 0, False
            while data := client.recv(16384):
                upload = upload or data.startswith(b"POST")
                seen += len(data)
                if upload and seen > self.limit:
                    self.cut()
                    return
                server.sendall(data)

    def _answer(self, server, client):
        with contextlib.suppress(OSError):
            try:
                while data := server.recv(16384):
                    client.sendall(data)
            finally:
                client.shutdown(socket.SHUT_RDWR)
