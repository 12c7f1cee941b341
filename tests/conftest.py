"""One thread: processes that each spin on every core slow each other down tenfold."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

LONG = (
    *("test_readme", "test_compare", "test_loss", "test_topk_adversarial", "test_recipes"),
    *("test_ray", "test_processes", "test_tied_ends", "test_vocab_parallel", "test_sharded"),
    *("test_notebook", "test_app_browser", "test_docs"),
)
SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real data beside the checkout; tests that need it skip without it."""
    if not SHARED.is_dir():
        pytest.skip("needs ../shared/data, which is not beside this checkout")
    return SHARED


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long go first, so that no process ends with one of them alone."""
    items.sort(key=lambda item: not item.path.name.startswith(LONG))
