"""What reading a checkpoint costs: CPU seconds beyond the interpreter's own start, and values.

Headers of a 70 B model in 30 and in 100 shards (target: 0.3 s), with and without a tokenizer.json
of 128,000 tokens; a GGUF file of 150,000 tokens (target: 0.5 s); the bytes and the numbers of a
bfloat16 table against `cat` and `cmp` on the same files (target: 1.3 times `cmp`). All files are
made here (weights are sparse files) and removed again.

    python benchmarks/inspect_speed.py [--rounds 5] [--mib 512] [--inspect]
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import resource
import statistics
import struct
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

LAYERS, WIDTH, INNER, KEYS, VOCAB = 80, 8192, 28672, 1024, 128256
OPEN = "import sys, lmhead; lmhead.open_checkpoint(sys.argv[1])"
INSPECT = "import sys, lmhead; lmhead.inspect(sys.argv[1])"
BYTES = """
import sys, numpy as np
from lmhead import open_checkpoint
from lmhead.checkpoint.values import blocks, read_bytes
a, b = (open_checkpoint(name).entry("w") for name in sys.argv[1:])
one, two = np.empty(2**24, np.uint8), np.empty(2**24, np.uint8)
for start, stop in blocks(a):
    assert np.array_equal(read_bytes(a, start, stop, one), read_bytes(b, start, stop, two))
"""
NUMBERS = """
import sys
from lmhead import open_checkpoint
from lmhead.checkpoint.values import blocks
ckpt = open_checkpoint(sys.argv[1])
for start, stop in blocks(ckpt.entry("w")):
    ckpt.rows("w", start, stop)
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, default=512, help="size of the table of values")
    parser.add_argument("--inspect", action="store_true", help="lmhead.inspect, not only opening")
    options = parser.parse_args()
    code = INSPECT if options.inspect else OPEN
    print(f"{platform.platform()}, Python {platform.python_version()}, numpy {version('numpy')}")
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        headers(root, code, options.rounds)
        values(root, options.mib, options.rounds)


def headers(root: Path, code: str, rounds: int) -> None:
    for shards in (30, 100):
        write_70b(root / f"shards-{shards}", shards)
    write_70b(root / "tokenizer", 30)
    write_tokenizer(root / "tokenizer", 128_000)
    write_gguf(root / "vocabulary.gguf", 150_000)
    bare = cpu([sys.executable, "-c", "import sys"], rounds)
    print(f"interpreter alone                     {bare:6.3f} s of CPU")
    for what, target in (
        ("shards-30", 0.3),
        ("shards-100", 0.3),
        ("tokenizer", 0.3),
        ("vocabulary.gguf", 0.5),
    ):
        took = cpu([sys.executable, "-c", code, str(root / what)], rounds) - bare
        print(f"{what:36} +{took:6.3f} s of CPU (target {target} s)")


def values(root: Path, mib: int, rounds: int) -> None:
    rows = mib * 16
    head = {"w": {"dtype": "BF16", "shape": [rows, 2**15], "data_offsets": [0, rows * 2**16]}}
    one, two = root / "one.safetensors", root / "two.safetensors"
    text = json.dumps(head).encode()
    for path in (one, two):
        block = random.Random(0).randbytes(2**20)
        with path.open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for _ in range(mib):
                file.write(block)
    import_numpy = cpu([sys.executable, "-c", "import numpy, lmhead.checkpoint.values"], rounds)
    cat = cpu(["cat", str(one)], rounds)
    cmp = cpu(["cmp", str(one), str(two)], rounds)
    compared = cpu([sys.executable, "-c", BYTES, str(one), str(two)], rounds) - import_numpy
    numbers = cpu([sys.executable, "-c", NUMBERS, str(one)], rounds) - import_numpy
    told = subprocess.run(
        [sys.executable, "-c", NUMBERS, str(one)], check=True, capture_output=True, text=True
    )
    peak = int(told.stdout) // 1024
    print(f"{mib} MiB of bfloat16, CPU seconds beyond importing numpy ({import_numpy:.3f} s):")
    print(f"cat                     {cat:6.3f}")
    print(f"cmp                     {cmp:6.3f}")
    print(f"bytes of two, compared  {compared:6.3f} = {compared / cmp:.2f} x cmp (target 1.3)")
    print(f"rows in float32         {numbers:6.3f} = {numbers / cat:.2f} x cat")
    print(f"memory, rows in float32: {peak} MiB (target 200)")


def cpu(command: Sequence[str], rounds: int) -> float:
    """Median CPU seconds (user and system) of a command."""
    took = []
    for _ in range(rounds + 1):
        before = children()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        took.append(children() - before)
    return statistics.median(took[1:])


def children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def write_70b(folder: Path, shards: int) -> None:
    """Headers, index and config of a Llama of 70 B parameters; the values are holes."""
    folder.mkdir()
    shapes = {"model.embed_tokens.weight": (VOCAB, WIDTH)}
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        for part, shape in (
            ("input_layernorm", (WIDTH,)),
            ("post_attention_layernorm", (WIDTH,)),
            ("self_attn.q_proj", (WIDTH, WIDTH)),
            ("self_attn.k_proj", (KEYS, WIDTH)),
            ("self_attn.v_proj", (KEYS, WIDTH)),
            ("self_attn.o_proj", (WIDTH, WIDTH)),
            ("mlp.gate_proj", (INNER, WIDTH)),
            ("mlp.up_proj", (INNER, WIDTH)),
            ("mlp.down_proj", (WIDTH, INNER)),
        ):
            shapes[f"{layer}.{part}.weight"] = shape
    shapes |= {"model.norm.weight": (WIDTH,), "lm_head.weight": (VOCAB, WIDTH)}
    names, weight_map, total = list(shapes), {}, 0
    each = -(-len(names) // shards)
    for i in range(shards):
        file, header, at = f"model-{i + 1:05}-of-{shards:05}.safetensors", {}, 0
        for name in names[i * each : (i + 1) * each]:
            n = 2
            for size in shapes[name]:
                n *= size
            header[name] = {"dtype": "BF16", "shape": shapes[name], "data_offsets": [at, at + n]}
            weight_map[name], at = file, at + n
        text = json.dumps(header).encode()
        with (folder / file).open("wb") as stream:
            stream.write(struct.pack("<Q", len(text)) + text)
            stream.truncate(8 + len(text) + at)
        total += at
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "vocab_size": VOCAB,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config))


def write_tokenizer(folder: Path, n: int) -> None:
    words = [f"tok{i}" for i in range(n)]
    content = {
        "version": "1.0",
        "added_tokens": [{"id": n + i, "content": f"<|{i}|>"} for i in range(256)],
        "model": {
            "type": "BPE",
            "vocab": {word: i for i, word in enumerate(words)},
            "merges": [[words[i % n], words[i * 7 % n]] for i in range(280_000)],
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(content, indent=2))


def write_gguf(path: Path, n: int) -> None:
    """A vocabulary of n tokens with scores, types and merges, as llama.cpp writes it."""

    def text(value: str) -> bytes:
        return struct.pack("<Q", len(value)) + value.encode()

    def array(key: str, kind: int, data: bytes, count: int) -> bytes:
        return text(key) + struct.pack("<IIQ", 9, kind, count) + data

    tokens = b"".join(text(f"tok{i}") for i in range(n))
    merges = b"".join(text(f"tok{i} tok{i * 7 % n}") for i in range(2 * n))
    pairs = [
        text("general.architecture") + struct.pack("<I", 8) + text("llama"),
        array("tokenizer.ggml.tokens", 8, tokens, n),
        array("tokenizer.ggml.scores", 6, bytes(4 * n), n),
        array("tokenizer.ggml.token_type", 5, bytes(4 * n), n),
        array("tokenizer.ggml.merges", 8, merges, 2 * n),
    ]
    info = text("token_embd.weight") + struct.pack("<IQQIQ", 2, 64, n, 1, 0)
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, len(pairs)) + b"".join(pairs) + info
    with path.open("wb") as file:
        file.write(head)
        file.truncate(-(-len(head) // 32) * 32 + 2 * 64 * n)


if __name__ == "__main__":
    main()
