"""One thread: processes that each spin on every core slow each other down tenfold."""

import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real data beside the checkout; tests that need it skip without it."""
    if not SHARED.is_dir():
        pytest.skip("needs ../shared/data, which is not beside this checkout")
    return SHARED
