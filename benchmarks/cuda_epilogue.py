"""The Triton epilogue alone: right on real sizes, and its speed; for `loss_cuda.py`."""

from __future__ import annotations

import torch
from cuda_run import Run
from torch import Tensor

from lmhead.loss import epilogue as torch_ops
from lmhead.loss import epilogue_triton as kernels
from lmhead.loss.options import Options
from lmhead.transform import HeadTransform

BLOCKS = [(4, 4096, 16), (2, 4096, 16), (2, 8192, 32), (4, 8192, 32), (4, 2048, 8), (1, 4096, 16)]


def check_epilogue(run: Run) -> None:
    everything = HeadTransform(0.5, -0.7, 4.0)
    big = 262144 if run.cuda else 301
    odd = 50257 if run.cuda else 131
    qwen = 151936 if run.cuda else 160
    bf16, fp16, fp32 = torch.bfloat16, torch.float16, torch.float32
    cases: list[tuple[int, torch.dtype, Options, str]] = [
        (qwen, bf16, Options(), ""),
        (qwen, bf16, Options(HeadTransform(valid_rows=qwen - 5)), ""),
        (odd, bf16, Options(), ""),
        (odd, bf16, Options(HeadTransform(softcap=30.0)), ""),
        (odd, bf16, Options(HeadTransform(0.5, 3.0)), "bias"),
        (odd, bf16, Options(label_smoothing=0.1, z_loss=1e-3), ""),
        (odd, bf16, Options(everything, 0.1, 1e-3), "bias, its gradient"),
        (odd, fp32, Options(everything, 0.1, 1e-3), "bias, its gradient"),
        (odd, fp16, Options(everything, 0.1, 1e-3), "bias, its gradient"),
        (big, fp32, Options(), ""),
        (big, bf16, Options(everything, 0.1, 1e-3), "bias"),
        (big, fp16, Options(z_loss=1e-3), "bias, its gradient"),
        (131, fp32, Options(everything, 0.1, 1e-3), "bias, its gradient"),
        (131, fp16, Options(), ""),
        (131, fp32, Options(), "offset") if run.cuda else (131, fp32, Options(), ""),
        (1, fp32, Options(), ""),
    ]
    columns = "".join(f"{x + ' ours':>9}{'torch':>8}" for x in ("loss", "lse", "grad", "bias"))
    print(f"{'V':>7} {'dtype':9}{columns}  options")
    for v, dtype, options, bias in cases:
        check_case(run, v, dtype, options, bias)
    if run.cuda:
        check_beyond_int32(run)
    run.say(f"correctness: {len(run.found['failed'])} wrong of {len(run.found['correctness'])}")


def check_case(run: Run, v: int, dtype: torch.dtype, options: Options, biased: str) -> None:
    n = 32 if run.cuda else 3
    torch.manual_seed(v)
    product = (3 * torch.randn(n, v, device=run.device)).to(dtype)
    if biased == "offset":  # the interpreter's multiply-add rounds twice: not there
        product += 1e4
    labels = torch.randint(options.rows(v), (n,), device=run.device)
    coef = torch.randn(n, device=run.device)
    bias = torch.randn(v, device=run.device) if "bias" in biased else None

    raw = product.double().requires_grad_()
    wide = None if bias is None else bias.double().requires_grad_()
    x, e = options.transform.logits(raw, wide)[:, : options.rows(v)], options.label_smoothing
    lse, label = x.logsumexp(-1), x.gather(-1, labels[:, None])[:, 0]
    loss = (1 - e) * (lse - label) + e * (lse - x.mean(-1)) + options.z_loss * lse**2
    (loss @ coef.double()).backward()
    right = {"loss": loss, "lse": lse, "gradient": raw.grad}
    if "its" in biased:
        assert wide is not None
        right["bias's gradient"] = wide.grad

    found: list[dict[str, Tensor]] = []
    for module in (kernels, torch_ops):
        copy = product.clone()
        sums = torch.zeros(v, device=run.device) if "its" in biased else None
        rows = module.epilogue(copy, labels, options, coef=coef, bias=bias, grad_bias=sums)
        got = {"loss": rows.loss, "lse": rows.lse, "gradient": copy}
        found.append(got if sums is None else got | {"bias's gradient": sums})
    rounding = 2e-6
    if not run.cuda and dtype == torch.bfloat16:
        rounding = 2**-7  # the interpreter cuts bfloat16 off
    line = f"{v:7} {str(dtype)[6:]:9}"
    for name, truth in right.items():
        assert truth is not None
        ours, theirs = (
            ((got[name].double() - truth).norm() / truth.norm().clamp(min=1e-2)).item()
            for got in found
        )
        ok = ours <= 1.01 * theirs + rounding  # also false for NaN
        row = {"V": v, "dtype": str(dtype)[6:], "of": name, "triton": ours, "torch": theirs}
        run.found["correctness"].append(row | {"options": str(options), "bias": biased, "ok": ok})
        line += f" {ours:8.1e} {theirs:7.1e}"
        if not ok:
            run.fail(f"epilogue, V={v} {dtype} {options} {biased}: {name} {ours} against {theirs}")
    print(f"{line:97}  {short(options)} {biased}", flush=True)


def short(options: Options) -> str:
    """What is not the default."""
    plain = vars(Options()) | vars(HeadTransform())
    values = vars(options) | vars(options.transform)
    del values["transform"]
    return " ".join(f"{k}={x}" for k, x in values.items() if x != plain[k])


def check_beyond_int32(run: Run) -> None:
    """The last rows of a product with more than 2**31 entries."""
    v, dtype = 151936, torch.bfloat16
    n = 2**31 // v // 16 * 16 + 64
    product = torch.zeros(n, v, dtype=dtype, device=run.device)
    product[-16:] = 3 * torch.randn(16, v, device=run.device)
    labels = torch.full((n,), v - 1, device=run.device)
    alone, coef = product[-16:].clone(), torch.ones(n, device=run.device)
    whole = kernels.epilogue(product, labels, Options(), coef=coef)
    part = kernels.epilogue(alone, labels[-16:], Options(), coef=coef[-16:])
    same = torch.equal(product[-16:], alone) and torch.equal(whole.loss[-16:], part.loss)
    first = whole.loss[0].item() - torch.tensor(float(v)).log().item()
    if not same or abs(first) > 1e-4:
        run.fail(f"a product of {n} × {v}: last rows {same}, first loss off by {first}")
    run.say(f"a product of {n} × {v} > 2**31 entries: same as its last rows alone: {same}")


def measure_epilogue(run: Run) -> None:
    sizes = [(2048, 151936, 151936), (2048, 50257, 50304), (2048, 50257, 50257)]
    print(f"{'n × V, stride, dtype':38} {'blocks':>14} {'ms':>8} {'GB/s':>7} {'forward':>8}")
    default = kernels.PARTS, kernels.LANES, kernels.WARPS
    for n, v, stride in sizes if run.cuda else [(3, 70, 70)]:
        for blocks in BLOCKS if stride % 64 == 0 else BLOCKS[:1]:
            if run.late(f"epilogue {n}×{v} {blocks}", 6):
                continue
            kernels.PARTS, kernels.LANES, kernels.WARPS = blocks
            buffer = torch.randn(n, stride, device=run.device).bfloat16()[:, :v]
            labels = torch.randint(v, (n,), device=run.device)
            coef = torch.full((n,), 1 / n, device=run.device)

            def step(coef: Tensor | None, buffer: Tensor = buffer, at: Tensor = labels) -> None:
                kernels.epilogue(buffer, at, Options(), coef=coef)

            step(None)
            forward = run.milliseconds(lambda step=step: step(None), most=0.1)
            step(coef)
            both = run.milliseconds(lambda step=step, coef=coef: step(coef), most=0.1)
            row = {"n": n, "V": v, "stride": stride, "blocks": blocks, "ms": both}
            rate = 3 * 2 * n * v / both / 1e6
            run.found["epilogue"].append(row | {"gb_per_s": rate, "forward_ms": forward})
            label = f"{n} × {v}, {stride}, bfloat16"
            print(f"{label:38} {blocks!s:>14} {both:8.3f} {rate:7.0f} {forward:8.3f}", flush=True)
    kernels.PARTS, kernels.LANES, kernels.WARPS = default
