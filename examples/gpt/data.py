"""Real text that every Python has: the sources of its own standard library, as bytes."""

import os
import sysconfig
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

# Third-party code, tests (not installed everywhere) and tables of numbers.
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings"}
HELD_OUT_EVERY = 20  # one file in so many is held out
MIN_BYTES = 10_000  # of either part


class Corpus(NamedTuple):
    """Text as ``uint8`` arrays; no file gives bytes to both."""

    train: np.ndarray
    held_out: np.ndarray


def source_files(root: Path) -> list[Path]:
    """The ``.py`` files under ``root``, sorted by relative path, without `SKIPPED` folders."""
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = set(subfolders) - SKIPPED
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    return sorted(files, key=lambda file: file.relative_to(root).as_posix())


def is_held_out(path: str) -> bool:
    """Whether a file is held out: by a checksum of its relative path, so by nothing else."""
    return zlib.crc32(path.encode()) % HELD_OUT_EVERY == 0


def load_corpus(root: Path | None = None) -> Corpus:
    """The standard library (with ``pydoc_data``) split by file; a text that occurs twice is taken
    once.

    Args:
      root: folder of sources; default the standard library of the running Python.

    Raises:
      ValueError: if there is too little text, as in a Python that ships without its sources.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    seen: set[bytes] = set()
    for file in source_files(root):
        text = file.read_bytes()
        if text not in seen:
            seen.add(text)
            parts[is_held_out(file.relative_to(root).as_posix())].append(text)
    train, held_out = (np.frombuffer(b"\n".join(parts[key]), np.uint8) for key in (False, True))
    if min(len(train), len(held_out)) < MIN_BYTES:
        raise ValueError(
            f"found {len(train):,} bytes to train on and {len(held_out):,} to hold out under "
            f"{root}; this example reads the .py files of the standard library, so run it with a "
            "Python that has them"
        )
    return Corpus(train, held_out)


def random_batches(text: np.ndarray, batch: int, context: int, seed: int) -> Iterator[np.ndarray]:
    """Endless random windows ``int32[batch, context + 1]``, the same for the same seed."""
    rng = np.random.default_rng(seed)
    while True:
        yield _windows(text, rng.integers(0, len(text) - context, size=batch), context)


def even_batches(text: np.ndarray, num: int, batch: int, context: int) -> list[np.ndarray]:
    """``num`` batches of windows ``int32[batch, context + 1]``, spread evenly over the text."""
    starts = np.linspace(0, len(text) - context - 1, num * batch).astype(int)
    return [_windows(text, part, context) for part in np.split(starts, num)]


def _windows(text: np.ndarray, starts: np.ndarray, context: int) -> np.ndarray:
    return text[starts[:, None] + np.arange(context + 1)].astype(np.int32)
