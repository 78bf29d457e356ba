"""Everything that paam reads from users, corrupted in thousands of ways: it is read or refused in one sentence.

    python tests/support/fuzz.py [--count 3000] [--seed 0] [--kind image] [--number 17]

Anything else (another exception, a hang, a process started, memory beyond a limit) ends the script with the kind and
number of the input, which reproduce it.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import io
import json
import os
import pickle
import resource
import struct
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import safetensors.torch
import torch
from PIL import Image
from rich.console import Console
from torch import nn

import paam
from fuzz_hostile import KINDS as HOSTILE
from fuzz_hostile import Attempt, check_told
from mutations import damaged, revalued, reworded
from paam.artifacts.saved import PLAN_FILE, WEIGHTS_FILE
from paam.artifacts.weights import load_weights
from paam.config.recipe import load_recipe, parse_override
from paam.config.schedule import Schedule
from paam.data import cifar10, load_folder
from paam.data.safe_unpickle import safe_load
from paam.errors import DataError, PaamError
from paam.files.tensors import read_tensors, write_tensors
from paam.graph.plan import Plan
from paam.methods import phases_of
from paam.report.page import write_report
from paam.runs.beginning import restore
from paam.runs.checkpoint import KIND, read_newest_checkpoint, write_checkpoint
from paam.runs.directory import find_changes, portable, started_events
from paam.runs.record import RECORD_FILE, read_events
from paam.train.engine import Engine
from paam.train.state import engine_state
from paam.views.listing import RunRow, list_runs
from paam.views.live_layout import frame
from paam.views.state import RunState, after
from paam.views.summary import summary

ROOM = 3 << 30
"""Bytes of address space allowed beyond that of the process after its imports."""
PATIENCE = 60
"""Timeout in seconds for one input."""
FORBIDDEN = (
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.fork",
    "subprocess.Popen",
    "pickle.find_class",
    "socket.connect",
)


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.Flatten(), nn.Linear(64, 3)
    )


def engine() -> Engine:
    """A small network halfway through its schedule."""

    class Batches:
        steps = 2

        def epoch(self, epoch: int, start: int):
            for _ in range(start, self.steps):
                yield torch.randn(4, 1, 8, 8), torch.tensor([0, 1, 2, 0])

    recipe = load_recipe("digits-resnet20-kq", {"target.keep_filters": 0.5, "score.lr": 0.1})
    recipe = replace(recipe, schedule=Schedule(1, 1, 1, 1, 1))
    torch.manual_seed(0)
    pruner = paam.Pruner(network(), torch.zeros(1, 1, 8, 8), inplace=True)
    return Engine(pruner, recipe, phases_of(recipe), Batches(), seed=0, emit=lambda event: None)


# ---------------------------------------------------------------- one function per kind: corrupt one input and read it


def recipes() -> Attempt:
    folder = Path(paam.__file__).parent / "config" / "recipes"
    texts = [path.read_text("utf-8") for path in sorted(folder.glob("*.toml"))]

    def attempt(rng: Random, here: Path) -> None:
        text = rng.choice(texts)
        if rng.random() < 0.2:
            parse_override(reworded("finetune.lr=0.05", rng))
        content = reworded(text, rng).encode(errors="surrogatepass") if rng.random() < 0.6 else b""
        (here / "own.toml").write_bytes(content or damaged(text.encode(), rng, texts[0].encode()))
        load_recipe(str(here / "own.toml"))

    return attempt


def plans() -> Attempt:
    pruner = paam.Pruner(network(), torch.zeros(1, 1, 8, 8), scorer="free")
    pruner.select(keep_filters=0.5)
    text = pruner.selection.plan.to_json()
    folder = Path(tempfile.mkdtemp())
    paam.save(pruner.compact(), folder)
    weights = (folder / WEIGHTS_FILE).read_bytes()
    state, _ = read_tensors(folder / WEIGHTS_FILE, "weights")

    def attempt(rng: Random, here: Path) -> None:
        plan = json.dumps(revalued(json.loads(text), rng)) if rng.random() < 0.6 else ""
        (here / PLAN_FILE).write_bytes(plan.encode() or damaged(text.encode(), rng))
        Plan.read(here / PLAN_FILE)
        if rng.random() < 0.3:
            (here / WEIGHTS_FILE).write_bytes(damaged(weights, rng))
        else:  # as if the weights belonged to it
            write_tensors(here / WEIGHTS_FILE, "weights", state, {"plan": (here / PLAN_FILE).read_text("utf-8")})
        paam.load(here, network())

    return attempt


def records() -> Attempt:
    recipe = load_recipe("digits-resnet20-kq")
    path = Path(__file__).parents[2] / "results" / "demo" / RECORD_FILE
    lines = path.read_text("utf-8").splitlines()
    start = {**json.loads(lines[0]), "recipe": portable(recipe), "seed": 0}
    lines = [json.dumps(start), *lines[20:30], lines[-1]]

    def attempt(rng: Random, here: Path) -> None:
        place = rng.choice((0, len(lines) - 1, rng.randrange(len(lines))))
        new = [*lines]
        if rng.random() < 0.6:
            new[place] = json.dumps(revalued(json.loads(lines[place]), rng))
            content = "\n".join(new).encode()
        else:
            content = damaged("\n".join(new).encode(), rng)
        (here / RECORD_FILE).write_bytes(content)
        assert len(rows_of(here)) == 1
        if rng.random() < 0.3:
            write_report([here / RECORD_FILE], here / "page.html")
        events = started_events(here)
        if events:
            find_changes(here, events, recipe, 0)
            state = RunState()
            for event in read_events(here / RECORD_FILE):
                state = after(state, event)
            frame(state, 80, 24, hint="", news=[])
            if state.start and state.end:
                Console(file=io.StringIO()).print(summary(state.start, state.end))

    return attempt


def rows_of(folder: Path) -> list[RunRow]:
    """The listing refuses nothing: whatever one run is like, the others must be shown."""
    try:
        return list_runs(folder)
    except PaamError as error:
        raise AssertionError("one run took the listing down") from error


def checkpoint_files() -> Attempt:
    trained = engine()
    states = {}
    for epoch in range(4):
        trained.run_epoch(epoch, None)
        tensors, header = engine_state(trained, epoch + 1)
        states[epoch + 1] = {name: value.clone() for name, value in tensors.items()}, {"events": 1, **header}

    def attempt(rng: Random, here: Path) -> None:
        epoch = rng.randrange(1, 5)
        tensors, header = states[epoch]
        for old in here.iterdir():
            old.unlink()
        if rng.random() < 0.4:  # a complete file with invalid content
            header = json.loads(json.dumps({"epoch": epoch, "step": 0, **header}))
            layouts = header.pop("layouts")  # so many values that the others would hardly ever be hit
            header, layouts = (
                (revalued(header, rng), layouts) if rng.random() < 0.5 else (header, revalued(layouts, rng))
            )
            header["layouts"] = layouts
            if rng.random() < 0.3:
                name = rng.choice(list(tensors))
                tensors = {**tensors, name: rng.choice((torch.zeros(3), torch.zeros(0), tensors[name].double()))}
            tensors = {name: value for name, value in tensors.items() if rng.random() < 0.99}
            write_tensors(here / f"epoch-{epoch:06d}-step-000000.safetensors", KIND, tensors, header)
        else:
            write_checkpoint(here, (epoch, 0), tensors, header)
            (path,) = here.iterdir()
            path.write_bytes(damaged(path.read_bytes(), rng))
        saved, _ = read_newest_checkpoint(here)
        if saved is not None:
            restore(engine(), saved, here)

    return attempt


def dense_weights() -> Attempt:
    trained = network().state_dict()
    content = safetensors.torch.save(trained)

    def attempt(rng: Random, here: Path) -> None:
        path = here / "dense.safetensors"
        if rng.random() < 0.3:
            odd = (torch.zeros(3), torch.zeros(2**62, 0), torch.zeros(1).double(), torch.tensor(1))
            path.write_bytes(safetensors.torch.save({**trained, rng.choice([*trained, "x"]): rng.choice(odd)}))
        else:
            path.write_bytes(damaged(content, rng))
        load_weights(network(), path, "model.weights")

    return attempt


def cifar_binary() -> Attempt:
    content = bytes([3]) + bytes(range(256)) * 12
    content *= cifar10.IMAGES_PER_FILE

    def attempt(rng: Random, here: Path) -> None:
        path = here / "test_batch.bin"
        if not path.exists() or path.stat().st_size != len(content):
            path.write_bytes(content)
        with path.open("r+b") as file:
            if rng.random() < 0.5:
                place = rng.choice((0, rng.randrange(10_000) * 3073, rng.randrange(len(content))))
                file.seek(place)
                file.write(rng.randbytes(1))
            else:
                file.truncate(
                    rng.choice((0, 1, len(content) - 1, len(content) + 1, 1 << 40, rng.randrange(len(content))))
                )
        cifar10._read_split(cifar10.BINARY, here, cifar10.TEST_BATCHES)

    return attempt


class Evil:
    """A pickle that runs a command if unpickled without restrictions."""

    def __reduce__(self) -> tuple:
        return os.system, ("touch /tmp/paam-fuzz-was-here",)


def cifar_pickles() -> Attempt:
    content = {b"data": np.zeros((4, 3072), np.uint8), b"labels": [1, 2, 3, 4], b"filenames": [b"a.png"] * 4}
    seeds = [pickle.dumps(content, protocol) for protocol in (2, 3, 4, 5)]
    evil = [pickle.dumps({b"data": Evil()}, protocol) for protocol in (0, 2, 4)]

    def attempt(rng: Random, here: Path) -> None:
        raw = rng.choice(evil) if rng.random() < 0.1 else damaged(rng.choice(seeds), rng, rng.choice(evil))
        (here / "test_batch").write_bytes(raw)
        safe_load(here / "test_batch")
        with contextlib.suppress(DataError):  # all of these are far smaller than a batch of CIFAR-10
            cifar10._read_python(here / "test_batch")

    return attempt


def png(width: int, height: int, depth: int = 8, colour: int = 2, data: bytes = b"") -> bytes:
    """A handmade PNG, whose header may contain anything."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


def images() -> Attempt:
    rng = np.random.default_rng(0)
    noise = Image.fromarray(rng.integers(0, 256, (12, 10, 3), np.uint8))
    samples: list[bytes] = [b"", b"GIF89a", png(1 << 30, 1 << 30), png(60_000, 60_000), png(0, 5), png(7000, 7000)]
    samples += [png(7000, 7000, 8, 2, bytes(7000 * 21001))]  # 49,000,000 real pixels in 150 kB
    samples += [png(50_000_000, 1, 8, 0, bytes(50_000_001)), png(9, 9, 16, 0, bytes(9 * 19))]
    for mode in ("RGB", "L", "P", "RGBA", "1", "CMYK", "I;16", "LA", "F", "I"):
        for kind in ("PNG", "JPEG", "BMP", "WEBP", "GIF", "TIFF"):
            with contextlib.suppress(OSError, ValueError, KeyError):
                file = io.BytesIO()
                (Image.new("I;16", (9, 9), 4000) if mode == "I;16" else noise.convert(mode)).save(file, kind)
                samples.append(file.getvalue())
    frames = [noise.rotate(angle) for angle in (0, 90, 180)]
    for kind in ("GIF", "WEBP", "PNG", "TIFF"):
        file = io.BytesIO()
        frames[0].save(file, kind, save_all=True, append_images=frames[1:])
        samples.append(file.getvalue())

    def attempt(rng: Random, here: Path) -> None:
        for name in ("a", "b"):
            if not (here / name).is_dir():
                (here / name).mkdir()
                for number in range(2):
                    noise.save(here / name / f"{number}.png")
        content = rng.choice(samples)
        if rng.random() < 0.9:
            content = damaged(content, rng, rng.choice(samples))
        suffix = rng.choice((".png", ".jpg", ".gif", ".webp", ".tif", ".bmp"))
        path = here / "a" / f"odd{suffix}"
        path.write_bytes(content)
        try:
            if rng.random() < 0.3:  # streamed
                files = load_folder(here, 8, memory=0, workers=0).train.images
                read = torch.cat(list(files.blocks(torch.arange(len(files.files)), 2)))
            else:
                read = load_folder(here, 8).train.images
        finally:
            path.unlink()
        assert read.dtype == torch.uint8
        assert read.shape[1:] == (3, 8, 8)

    return attempt


KINDS: dict[str, Callable[[], Attempt]] = {
    "recipe": recipes,
    "plan": plans,
    "record": records,
    "checkpoint": checkpoint_files,
    "weights": dense_weights,
    "cifar-binary": cifar_binary,
    "cifar-pickle": cifar_pickles,
    "image": images,
    **HOSTILE,
}
SHARE = {"checkpoint": 0.5, "cifar-binary": 0.1, "plan": 0.5, "bomb": 0.3}
"""Share of the count for kinds whose inputs take long."""


def fuzz(kind: str, count: int, seed: int, number: int | None = None) -> tuple[int, int]:
    """How many inputs were read and how many refused; anything else is raised, with its number."""
    attempt = KINDS[kind]()
    read = refused = 0
    with tempfile.TemporaryDirectory() as folder:
        for place in range(count) if number is None else [number]:
            faulthandler.dump_traceback_later(PATIENCE, exit=True)
            try:
                attempt(Random(f"{seed} {kind} {place}"), Path(folder))
                read += 1
            except PaamError as error:
                check_told(error)
                refused += 1
            except BaseException as error:
                error.add_note(f"python tests/support/fuzz.py --seed {seed} --kind {kind} --number {place}")
                raise
            finally:
                faulthandler.cancel_dump_traceback_later()
    return read, refused


def guard(event: str, arguments: tuple) -> None:
    if event in FORBIDDEN:
        raise SystemExit(f"input made paam do this: {event} {arguments}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=KINDS)
    parser.add_argument("--number", type=int)
    options = parser.parse_args()
    torch.set_num_threads(1)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    room = pages * resource.getpagesize() + ROOM
    resource.setrlimit(resource.RLIMIT_AS, (room, room))
    sys.addaudithook(guard)
    total = 0
    for kind in [options.kind] if options.kind else KINDS:
        count = int(options.count * SHARE.get(kind, 1))
        start = time.perf_counter()
        read, refused = fuzz(kind, count, options.seed, options.number)
        total += read + refused
        sys.stdout.write(f"{kind:14} {read:6} read {refused:6} refused {time.perf_counter() - start:7.1f} s\n")
        sys.stdout.flush()
    sys.stdout.write(f"{total} inputs: no other exception, no hang, no process started, {ROOM >> 30} GiB at most\n")


if __name__ == "__main__":
    main()
