"""Shards, good and bad, and servers for them: the parts that the tests of the data are made with."""

import argparse
import contextlib
import http.server
import io
import json
import multiprocessing
import random
import resource
import tarfile
import threading
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from pcmepp_openclip.data import DataSpec, resolve
from pcmepp_openclip.data.arguments import FLAGS, check_upsampling
from pcmepp_openclip.system.flags import CommandParser


def picture(seed: int = 0, size: tuple[int, int] = (24, 20), mode: str = "RGB", format: str = "JPEG", **save) -> bytes:
    """A random smooth picture."""
    channels = {"L": 1, "RGB": 3, "RGBA": 4, "CMYK": 4}.get(mode, 3)
    pixels = np.random.default_rng(seed).integers(0, 255, (4, 4, channels), dtype=np.uint8).squeeze()
    image = Image.fromarray(pixels, mode if mode in ("L", "RGB", "RGBA", "CMYK") else "RGB").resize(size)
    image = image if image.mode == mode else image.convert(mode)
    file = io.BytesIO()
    image.save(file, format, **save)
    return file.getvalue()


def pair(key: str, caption: str | bytes | None = None, image: bytes | None = None, suffix: str = "jpg") -> dict:
    """The members of a good sample, its key in its caption; None leaves the default."""
    caption = f"caption {key}" if caption is None else caption
    data = caption.encode() if isinstance(caption, str) else caption
    return {f"{key}.{suffix}": picture(hash(key) % 1000) if image is None else image, f"{key}.txt": data}


def several(key: str, count: int = 5) -> dict:
    """A sample with that many captions in its .json, the first of them in its .txt."""
    texts = [f"{key} caption {i}" for i in range(count)]
    return {**pair(key, texts[0]), f"{key}.json": json.dumps({"captions": texts, "split": "train"}).encode()}


def write_tar(path: Path, samples: Iterable[dict | list]) -> Path:
    """A tar of samples, each a dict or a list of (name, bytes)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for sample in samples:
            for name, data in sample.items() if isinstance(sample, dict) else sample:
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
    return path


def write_shards(folder: Path, counts: list[int], prefix: str = "") -> str:
    """Good shards of these numbers of samples, with keys that are unique in the folder; their pattern."""
    for number, count in enumerate(counts):
        write_tar(folder / f"{number:05d}.tar", [pair(f"{prefix}{number:03d}{i:05d}") for i in range(count)])
    return str(folder / f"{{00000..{len(counts) - 1:05d}}}.tar")


def arguments(train_data: str, *flags: str, **values) -> argparse.Namespace:
    """What open_clip's parser and ours leave, as far as the data look at it."""
    parser = data_parser()
    ours = vars(parser.read(flags))
    parser.mistakes.raise_all()
    stock: dict = {
        "train_data": train_data,
        "val_data": None,
        "dataset_type": "webdataset",
        "train_num_samples": None,
        "val_num_samples": None,
        "dataset_resampled": False,
        "train_data_upsampling_factors": None,
        "imagenet_val": None,
        "imagenet_v2": None,
        "workers": 0,
        "batch_size": 4,
        "world_size": 1,
        "rank": 0,
        "seed": 0,
        "distributed": False,
        "epochs": 1,
        "model": "PCMEpp-tiny",
        "force_image_size": None,
    }
    return argparse.Namespace(**{**stock, **ours, **values})


def data_parser() -> CommandParser:
    """Our flags of the training data alone."""
    parser = CommandParser("pcmepp train")
    for title, rows in FLAGS.items():
        parser.add_flags(title, rows)
    parser.check(check_upsampling)
    return parser


class Words:
    """A tokenizer whose tokens can be read back: one code point each, 0 for padding."""

    def __init__(self, context_length: int = 40):
        self.context_length = context_length

    def __call__(self, texts: list[str] | str) -> torch.Tensor:
        texts = [texts] if isinstance(texts, str) else texts
        out = torch.zeros(len(texts), self.context_length, dtype=torch.long)
        for row, text in zip(out, texts, strict=True):
            codes = [1, *(ord(letter) for letter in text), 2][: self.context_length]
            row[: len(codes)] = torch.tensor(codes)
        return out


def read_back(texts: torch.Tensor) -> list[str]:
    return ["".join(chr(code) for code in row if code > 2) for row in texts.tolist()]


def to_tensor(image) -> torch.Tensor:
    return torch.tensor(np.asarray(image.resize((8, 8)))).permute(2, 0, 1).float() / 255


def jitter(image) -> torch.Tensor:
    """A transform with random numbers of all three kinds."""
    return to_tensor(image) + torch.rand(1) + random.random() + float(np.random.rand())


def load(args, transform=to_tensor, epoch: int = 0):
    """The train DataInfo, through the way in that training uses."""
    return get_data(args, (transform, transform), epoch=epoch, tokenizer=Words())["train"]


def get_data(args, preprocess_fns, epoch: int = 0, tokenizer=None) -> dict:
    """All data of a run with these arguments, as training gets them."""
    from open_clip_train.data import get_data as stock

    from pcmepp_openclip.data import build

    return build.get_data(stock, specify(args), args, preprocess_fns, epoch=epoch, tokenizer=tokenizer)


def specify(args, check: bool = False) -> DataSpec:
    """The training data of arguments that are not redacted."""
    data_parser().judge(args)
    return resolve(args, vars(args), ranks=args.world_size, check=check)


def captions(data) -> list[list[str]]:
    """The captions of each batch of the epoch that is set."""
    return [read_back(texts) for _, texts in data.dataloader]


def flat(data) -> list[str]:
    """The captions of the whole epoch."""
    return [caption for batch in captions(data) for caption in batch]


def within(seconds: float, function, *args, memory: int = 2 << 30):
    """What a function returns in a process of its own, which may take so long and 2 GB more than this one has."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)

    def run():
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + memory, used + memory))
        theirs.send(function(*args))

    process = context.Process(target=run)
    process.start()
    try:
        assert ours.poll(seconds), f"nothing came in {seconds} s"
        return ours.recv()
    finally:
        process.kill()
        process.join()


class Handler(http.server.BaseHTTPRequestHandler):
    """Files of `server.root`, with ranges, and with failures by path: see `serve`."""

    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        server = self.server
        path = self.path.partition("?")[0]
        server.log.append((self.command, self.path, dict(self.headers)))
        if server.login and self.headers.get("Authorization") != server.login:
            return self.answer(401)
        if server.refusals.get(path, 0) > 0:
            server.refusals[path] -= 1
            return self.answer(503)
        file = server.root / path.lstrip("/")
        if not file.is_file():
            return self.answer(404)
        data, start = file.read_bytes(), 0
        if server.ranges and (wanted := self.headers.get("Range")):
            start = int(wanted.removeprefix("bytes=").split("-")[0])
        body = data[start:]
        headers = {"Content-Length": str(len(body)), **({"Accept-Ranges": "bytes"} if server.ranges else {})}
        if "tag" in server.tells:
            headers["ETag"] = f'"{zlib.crc32(data)}"'
        if "date" in server.tells:
            headers["Last-Modified"] = self.date_time_string(file.stat().st_mtime)
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self.answer(206 if start else 200, headers)
        if self.command == "HEAD":
            return None
        if server.drops.get(path, 0) > 0:
            server.drops[path] -= 1
            body = body[: len(body) // 2]
            self.close_connection = True
        for at in range(0, len(body), 1 << 16):
            server.sent[path] = server.sent.get(path, 0) + self.wfile.write(body[at : at + (1 << 16)])
        return None

    def answer(self, status: int, headers: dict | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {"Content-Length": "0"}).items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *_) -> None:
        pass


@contextlib.contextmanager
def serve(root: Path, *, ranges: bool = True, login: str | None = None, tells: tuple = ("tag", "date")) -> Iterator:
    """An HTTP server of a folder on 127.0.0.1. `.drops[path] = n`: the next n answers break off in their middle;
    `.refusals[path] = n`: the next n are a 503; `.log`: all requests; `.sent[path]`: bytes of bodies that were sent.
    `tells`: what it says of a file's version."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.root, server.ranges, server.login = root, ranges, login
    server.drops, server.refusals, server.log, server.sent, server.tells = {}, {}, [], {}, tells
    server.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
