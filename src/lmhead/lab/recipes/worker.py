"""A process that trains one job of a run: `python -m lmhead.lab.recipes.worker RUN ARM SEED`.

It tells its parent, a JSON object a line, what to show or what went wrong, and ends when the parent
is gone; the checkpoint stands then.
"""

from __future__ import annotations

import json
import signal
import sys
from typing import Any

import torch

from lmhead.errors import LMHeadError
from lmhead.lab.recipes.job import RecipeRun
from lmhead.lab.recipes.run import job_of
from lmhead.lab.recipes.texts import read_words


def main(run: str, arm: str, seed: str) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    torch.set_num_threads(1)
    folder = RecipeRun(run)
    try:
        settings = folder.config()
        words = read_words(settings["text"]["folder"])
        job_of(folder, settings, words, arm, int(seed), lambda line: _say(line=line)).work()
    except InterruptedError:
        return 1
    except LMHeadError as error:
        _say(message=error.message, hint=error.hint)
    except OSError as error:
        _say(errno=[error.errno, error.strerror, error.filename])
    return 0


def _say(**values: Any) -> None:
    print(json.dumps(values), flush=True)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
