"""Print the worked numbers of docs/scaling.md: `python scripts/traffic_table.py`."""

from __future__ import annotations

from lmhead.distributed.traffic import EndsTraffic, all_traffic
from lmhead.params import count_params

MODELS = ("gpt2", "gemma-3-270m", "qwen3-0.6b", "llama-3.2-1b", "llama-3-8b", "gemma-2-9b")
WORLD, TOKENS, NUMBER_BYTES = 8, 8192, 2
HEAD = """\
| model | V × d | ddp, fsdp2: sent | part of all that ddp sends | fsdp2, vocab-parallel: held | \
vocab-parallel: sent | pipeline: sent |
|---|---|---|---|---|---|---|"""


def lines() -> list[str]:
    """The table, one line a model; "a / b" is tied / untied."""
    found = HEAD.splitlines()
    for name in MODELS:
        count = count_params(name)
        traffic = all_traffic(
            count.vocab_size,
            count.d_model,
            world=WORLD,
            tokens=TOKENS,
            number_bytes=NUMBER_BYTES,
        )
        ends = {(one.scheme, one.tied): one for one in traffic}
        shares = (
            100 * tables * count.vocab_size * count.d_model / (total or count.total)
            for tables, total in ((1, count.if_tied), (2, count.if_untied))
        )
        name = f"{name} ({'tied' if count.tied else 'untied'})"
        cells = [
            name,
            f"{count.vocab_size:,} × {count.d_model:,}",
            both(ends, "ddp", "sent"),
            " / ".join(f"{share:.0f} %" for share in shares),
            both(ends, "fsdp2", "held"),
            size(ends["vocab-parallel", True].sent),
            both(ends, "pipeline", "sent"),
        ]
        found.append(f"| {' | '.join(cells)} |")
    return found


def both(ends: dict[tuple[str, bool], EndsTraffic], scheme: str, key: str) -> str:
    return " / ".join(size(getattr(ends[scheme, tied], key)) for tied in (True, False))


def size(n: float) -> str:
    return f"{n / 1e9:.2f} GB" if n >= 1e9 else f"{n / 1e6:.0f} MB"


if __name__ == "__main__":
    print("\n".join(lines()))
