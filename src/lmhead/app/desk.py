"""What the tabs Write and Layers have in common: the models by name, and waiting for them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import wait

from lmhead.app.sources import Models, Voice
from lmhead.app.write import Writer
from lmhead.runs import RunFolder

SAMPLES = ("今天天气真", "The capital of France is")
TICK = 0.25  # seconds


class Desk:
    """The models by name, and what they write.

    Args:
        known: the models, in the order that they are offered.
        models: opens them.

    Attributes:
        voices: the models by name.
        first: the name of the one shown first, None where there is none.
        prompt: a text to begin with that the first one can read.
        writer: makes what is shown.
    """

    def __init__(self, known: Sequence[Voice], models: Models) -> None:
        self.voices = {voice.name: voice for voice in known}
        self.first = next(iter(self.voices), None)
        self.prompt = _sample(known[0]) if known else SAMPLES[-1]
        self.writer = Writer(models)

    def wait(self, *known: Voice) -> Iterator[int]:
        """Begin to open models; yields the seconds it has taken until all are there.

        Raises:
            LMHeadError: one cannot be opened.
        """
        futures = [self.writer.models.start(voice) for voice in known]
        begin = time.monotonic()
        while wait(futures, TICK).not_done:
            yield int(time.monotonic() - begin)
        for future in futures:
            future.result()


def _sample(voice: Voice) -> str:
    """A text in a language that the model knows: a run's own vocabulary tells, unopened."""
    if voice.source.kind == "run":
        words = RunFolder(voice.source.path).tokenizer / "tokenizer.json"
        if words.is_file() and SAMPLES[0][0] in words.read_text("utf-8", "replace"):
            return SAMPLES[0]
    return SAMPLES[-1]
