"""Audio and text through the loader, against reading the same with two processes and no loader.

Each kind is read by eight lanes and two workers into batches that nobody looks at, and by two processes that open
the same streams one after another and write them into one array of their own. The streams are the library's, so
that the ratio is what the loader costs:

- `audio`: 64 MP3 files of two minutes, resampled from 44,100 to 16,000 samples a second, mono, in windows of 1,600.
- `audio, overlapping`: the same in windows of 400 samples that begin every 160.
- `tokens`: 32 texts of 1 MB, by a BPE tokenizer of 8,000 words, inputs and targets, 256 time steps a batch.
- `characters`, `bytes`: the same texts, 64 of them of 4 MB, 4,096 time steps a batch.

Besides, `tokens of a file`: a file of tokens with documents of some 700, inputs and targets, 16 lanes of 1,024. The
loader keeps documents apart and in order; the usual loop of small language models takes windows at random offsets of
the mapped file, in the training process, and knows no documents. The start of workers is not counted.

Contenders take turns; see `interleaved`. Run it as `python benchmarks/audio_text.py [--quick] [--json PATH]`.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import av
import numpy as np
import torch
from interleaved import Result, figure, ratio, take_turns
from program import run
from store_rows import rate_of
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from stream_dataloader import Sections, StreamBatch, StreamDataLoader, StreamDataset, recurrent, stores
from stream_dataloader.streams import AudioStream, TextStream

LANES, WORKERS = 8, 2
ROWS, STEPS, END = 16, 1024, 0
FILE = "tokens of a file"
KINDS = ("audio", "audio, overlapping", "tokens", "characters", "bytes")
OURS, ALONE = "stream_dataloader", "2 processes"


class Work(NamedTuple):
    """Files that are read.

    Attributes:
        open_stream: Opens a source.
        item: Shape and dtype of an item's leaves, by name; "" for an item that is one array.
        time_steps: Items in a lane's window.
        least: The ratio that there should be.
    """

    sources: list[str]
    open_stream: Any
    item: dict[str, tuple[tuple[int, ...], str]]
    time_steps: int
    least: float = 0.9


def through_loader(work: Work) -> int:
    """Items that the loader delivers."""
    dataset = StreamDataset(work.sources, work.open_stream, LANES, time_steps=work.time_steps)
    loader = StreamDataLoader(dataset, WORKERS)
    for _ in loader:
        pass
    return loader.stats().items


def read(work: Work, sources: list[str]) -> int:
    """Items that this process reads."""
    leaves = {name: np.zeros((work.time_steps, *shape), dtype) for name, (shape, dtype) in work.item.items()}
    out, count = leaves.get("", leaves), 0
    for source in sources:
        stream = work.open_stream(source)
        while read := stream.read_into(out):
            count += read
        stream.close()
    return count


def without_loader(work: Work) -> int:
    """The same by two processes."""
    with multiprocessing.Pool(WORKERS) as pool:
        return sum(pool.map(partial(read, work), [work.sources[i::WORKERS] for i in range(WORKERS)], 1))


def write_music(path: Path, seconds: int, seed: int) -> str:
    """An MP3 file of some chords and noise."""
    rng, rate = np.random.default_rng(seed), 44100
    with av.open(str(path), "w") as container:
        track: Any = container.add_stream("libmp3lame", rate, layout="stereo")
        track.bit_rate = 128_000
        for _ in range(seconds):
            times = np.arange(rate) / rate
            chord = sum(np.sin(2 * np.pi * pitch * times) for pitch in rng.uniform(80, 2000, 4)) / 8
            samples = np.stack([chord + rng.normal(0, 0.02, rate) for _ in range(2)]).astype(np.float32)
            frame = av.AudioFrame.from_ndarray(samples, "fltp", "stereo")
            frame.sample_rate = rate
            container.mux(track.encode(frame))
        container.mux(track.encode(None))
    return str(path)


def write_text(path: Path, size_bytes: int, seed: int) -> str:
    """A text of made-up words, the frequent ones short."""
    rng = np.random.default_rng(seed)
    words = ["".join(map(chr, rng.integers(97, 123, 2 + i // 2000))) for i in range(16000)]
    chosen = np.minimum(rng.zipf(1.3, size_bytes // 4), len(words)) - 1
    lines = [" ".join(words[i] for i in chosen[start : start + 12]) for start in range(0, len(chosen), 12)]
    path.write_text("\n".join(lines)[:size_bytes])
    return str(path)


def train_tokenizer(path: str) -> Any:
    """A byte-pair encoding of 8,000 words (Sennrich et al. 2016)."""
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    tokenizer.train([path], trainers.BpeTrainer(vocab_size=8000, show_progress=False))
    return tokenizer


def all_works(folder: Path, quick: bool) -> dict[str, Work]:
    """Return the works to measure; a quick run has two files per lane, which are shorter."""
    part, size = (4, 8) if quick else (1, 1)
    music = [write_music(folder / f"{i}.mp3", 120 // size, i % 4) for i in range(4)] * (16 // part)
    texts = [write_text(folder / f"{i}.txt", (1 << 20) // size, i) for i in range(4)] * (4 if quick else 8)
    long_texts = [write_text(folder / f"long{i}.txt", (4 << 20) // part, i) for i in range(4)] * (16 // part)
    codes: dict[str, tuple[tuple[int, ...], str]] = {"input": ((), "int64"), "target": ((), "int64")}
    tokens = TextStream(tokenizer=train_tokenizer(texts[0]), targets=True)
    overlapping = AudioStream(window=400, hop=160, rate=16000, channels=1)
    return {
        "audio": Work(music, AudioStream(window=1600, rate=16000, channels=1), {"": ((1, 1600), "float32")}, 10),
        "audio, overlapping": Work(music, overlapping, {"": ((1, 400), "float32")}, 100),
        "tokens": Work(texts, tokens, codes, 256),
        "characters": Work(long_texts, TextStream(), {"": ((), "int64")}, 4096, 0.3),
        "bytes": Work(long_texts, TextStream(units="bytes"), {"": ((), "uint8")}, 4096, 0.3),
    }


def measure(name: str, work: Work, quick: bool) -> list[Result]:
    """Items a second of both."""

    def timed(run: Callable[[Work], int]) -> float:
        begin = time.perf_counter()
        items = run(work)
        return items / (time.perf_counter() - begin)

    contenders = {OURS: partial(timed, through_loader), ALONE: partial(timed, without_loader)}
    figures = take_turns(contenders, 2 if quick else 5, "items", warm_up=not quick)
    return [
        *(figure(name, contender, values, "it/s") for contender, values in figures.items()),
        ratio(name, f"{OURS} / {ALONE}", figures, OURS, ALONE, work.least, at_most=False),
    ]


def write_tokens(path: Path, count: int) -> Path:
    """A file of 16-bit tokens, in documents of 200 to 1,200 that end with `END`."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(1, 50_000, count).astype(np.uint16)
    ends = np.cumsum(rng.integers(200, 1_200, count // 200))
    tokens[ends[ends < count]] = END
    tokens.tofile(path)
    return path


def tokens_of_file(path: Path, ask: Callable[[StreamBatch], object], batches: int) -> float:
    """Tokens a second from the loader."""
    options: dict[str, Any] = {"stored_dtype": "uint16", "dtype": "int64", "eos_token": END, "targets": True}
    sources, tokens = stores.open(path, **options)
    cut: dict[str, Any] = {"windows": "packed", "sections": Sections(16 * STEPS, jitter=False), "padding_mode": "cycle"}
    dataset = StreamDataset(sources, tokens, ROWS, time_steps=STEPS, shuffle=True, seed=0, **cut)

    def asked() -> Iterator[StreamBatch]:
        for batch in StreamDataLoader(dataset, WORKERS):
            ask(batch)
            yield batch

    return rate_of(asked(), lambda _: ROWS * STEPS, 4, batches)


def random_offsets(path: Path, batches: int) -> float:
    """Tokens a second from windows at random offsets: inputs, and the same one further."""
    tokens = np.memmap(path, np.uint16, "r")

    def windows(begins: list[int]) -> torch.Tensor:
        return torch.stack([torch.from_numpy(tokens[begin : begin + STEPS].astype(np.int64)) for begin in begins])

    def drawn() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        while True:
            begins = torch.randint(len(tokens) - STEPS, (ROWS,)).tolist()
            yield windows(begins), windows([begin + 1 for begin in begins])

    return rate_of(drawn(), lambda _: ROWS * STEPS, 4, batches)


def measure_file(folder: Path, quick: bool) -> list[Result]:
    """Tokens a second, with `seq_idx` asked of each batch and without."""
    path, batches = write_tokens(folder / "tokens.bin", 20_000_000), 600 if quick else 3_000
    with_index, without, peer = f"{OURS}, seq_idx", f"{OURS}, no seq_idx", "random offsets"
    contenders = {
        with_index: partial(tokens_of_file, path, recurrent.seq_idx, batches),
        without: partial(tokens_of_file, path, id, batches),
        peer: partial(random_offsets, path, batches),
    }
    figures = take_turns(contenders, 3 if quick else 5, "tokens", warm_up=not quick)
    return [
        *(figure(FILE, contender, values, "it/s") for contender, values in figures.items()),
        ratio(FILE, f"{with_index} / {peer}", figures, with_index, peer, 1.2, at_most=False),
        ratio(FILE, f"{without} / {peer}", figures, without, peer, 1.2, at_most=False),
    ]


def main() -> None:
    """Run all parts; what they read is made once."""
    with tempfile.TemporaryDirectory() as folder:
        works = cache(partial(all_works, Path(folder)))

        def section(name: str, quick: bool) -> list[Result]:
            return measure(name, works(quick)[name], quick)

        run(__doc__, {**{name: partial(section, name) for name in KINDS}, FILE: partial(measure_file, Path(folder))})


if __name__ == "__main__":
    main()
