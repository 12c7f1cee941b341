"""The Triton loss on a CUDA GPU: is it right, how fast is it. One run, under 4 minutes.

Four parts, the most needed first; what no longer fits the time is left out and named.
1. the Triton epilogue against float64 and the epilogue in torch operations, on real sizes;
2. the whole loss, forward and backward: the three products alone (the floor), plain, ours;
3. the epilogue alone, for several shapes of its blocks;
4. what others offer, where installed: torch.compile, torch's own, Cut Cross-Entropy, Liger.

    PYTHONPATH=src python3 benchmarks/loss_cuda.py
    PYTHONPATH=src python3 benchmarks/loss_cuda.py --device cpu   # tiny, in Triton's interpreter

Prints tables; writes $OUT/loss_cuda.json too where OUT is set. Times are medians by CUDA events,
memory is the peak beyond inputs and gradients, errors are relative (Frobenius) to a float64
computation of the same inputs. Logits have standard deviation 2, targets are random: no trained
model, so gradient filters (Cut Cross-Entropy) drop more of the gradient than they would there.
It exits with 1 where ours is wrong or fails; a peer's failure is a line of the table.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import sys
import time

if "cpu" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before the first import of triton

import cuda_epilogue
import cuda_losses
import torch
from cuda_run import Run

SHAPES = [  # tokens, width, vocabulary, dtype
    (8192, 4096, 151936, torch.bfloat16),
    (8192, 2304, 256000, torch.bfloat16),
    (4096, 4096, 128256, torch.bfloat16),
    (2048, 768, 50257, torch.bfloat16),
    (2048, 768, 50257, torch.float32),
]


def versions() -> str:
    found = []
    for name in ("torch", "triton", "cut-cross-entropy", "liger-kernel"):
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"{name} absent")
    return ", ".join(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--seconds", type=float, default=225, help="start nothing after that")
    options = parser.parse_args()
    run = Run(options.device, options.seconds)
    device = torch.cuda.get_device_name() if run.cuda else "CPU, Triton's interpreter"
    run.found |= {"device": device, "versions": versions(), "python": sys.version.split()[0]}
    run.say(f"{device}; {run.found['versions']}, Python {run.found['python']}")
    shapes = SHAPES if run.cuda else [(20, 16, 131, torch.bfloat16), (20, 16, 70, torch.float32)]
    if not run.cuda:
        cuda_losses.CHUNKS[:] = [8]
        cuda_epilogue.kernels.LANES = 64
        cuda_epilogue.BLOCKS[:] = [(2, 16, 4)]
    cuda_epilogue.check_epilogue(run)
    run.save()
    for shape in shapes:
        if run.late(f"ours at {shape}", 10):
            continue
        cuda_losses.measure_ours(run, cuda_losses.Problem(run, *shape))
        run.save()
    cuda_epilogue.measure_epilogue(run)
    run.save()
    for shape in [shapes[0], shapes[3], *shapes[1:3], shapes[4]] if run.cuda else []:
        cuda_losses.measure_peers(run, shape)
        run.save()
    run.found["seconds"] = time.monotonic() - run.began
    run.save()
    run.say(f"failed: {run.found['failed'] or 'nothing'}")
    return 1 if run.found["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
