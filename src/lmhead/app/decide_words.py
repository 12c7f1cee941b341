"""The lab's verdicts and the words on its charts, in the page's language.

English ones are the lab's own; Chinese ones are made here from the same figures.
"""

from __future__ import annotations

import re
from html import escape

from lmhead.app.decide import Decision
from lmhead.app.text import Language
from lmhead.lab.intervals import Interval
from lmhead.lab.page import interval as lab_interval
from lmhead.lab.stats import MAYBE, Pair, percent

VERDICTS = {
    "tie": ("tie", "共用"),
    "tie-wide": ("tie, and widen the body", "共用，并加宽主体"),
    "no-difference": ("no measurable difference: tie", "没有可测的差别：共用"),
    "do-not-tie": ("do not tie", "不要共用"),
    "undecided": ("undecided", "证据不足"),
}
LEADS = {
    "tie": "共用，可省下 {saved:,} 个参数：",
    "tie-wide": "共用，并把省下的 {saved:,} 个参数用于主体：",
    "no-difference": "没有要紧的差别。共用可省下 {saved:,} 个参数：",
    "do-not-tie": "不要共用：",
    "undecided": "证据不足，请增加种子（--until-clear）或训练词元：",
}
# What stands on the charts of `lmhead.lab.charts`, longest first.
ON_CHARTS = {
    "← the first is better": "← 前者更好",
    "not enough evidence": "证据不足",
    "equivalent": "等价",
    "better": "更好",
    "worse →": "更差 →",
    "worse": "更差",
    "seeds": "种子",
    "seed": "种子",
    "text": "文本",
    "both": "两者",
    "embedding": "嵌入",
    "head": "输出头",
    "body": "主体",
}
_WORDS = re.compile("|".join(rf"(?<!\w){re.escape(word)}(?!\w)" for word in ON_CHARTS))
_OUTCOMES = {
    "better": "更好",
    "worse": "更差",
    "equivalent": "等价",
    "not enough evidence": "证据不足",
}


def verdict_words(one: Decision, language: Language) -> str:
    """The verdict in a few words."""
    return VERDICTS[one.result.verdict][0 if language == "en" else 1]


def sentence(one: Decision, language: Language) -> str:
    """The verdict with its evidence."""
    if language == "en":
        return one.result.sentence
    pairs = [pair for pair in one.result.pairs if pair.against == "untied"]
    said = "；".join(map(evidence, pairs)) or "还没有可比较的一对"
    lead = LEADS[one.result.verdict] if one.result.finished else "尚未完成。目前："
    return f"{lead.format(saved=one.saved)}{said}。"


def evidence(pair: Pair) -> str:
    """A pair's difference and its deciding interval, in Chinese."""
    side = "低" if pair.difference < 0 else "高"
    found = f"{pair.arm} 比 {pair.against} {side} {abs(pair.difference):.4f} 纳特/词元"
    if pair.both is None:
        return f"{found}（仅 1 个种子，没有区间）"
    over = "，含种子与文本两方面" if pair.text else ""
    where = f"{percent(pair.confidence)} 区间 {bounds(pair.both, 'zh')}{over}，{pair.n} 个种子"
    return f"{found}（{where}：{pair_words(pair, 'zh')}）"


def pair_words(pair: Pair, language: Language) -> str:
    """A pair's verdict and how it stands to the margin."""
    if language == "en":
        return pair.in_words
    word = _OUTCOMES[pair.verdict]
    if pair.in_words.endswith("by more than the margin"):
        return f"{word}，超出界限"
    if pair.in_words.endswith(MAYBE):
        return f"{word}，可能仍在界限之内"
    if "within the margin" in pair.in_words:
        return f"{word}（{_OUTCOMES[pair.outcome]}，但在界限之内）"
    return word


def bounds(interval: Interval | None, language: Language) -> str:
    """An interval as the lab writes it."""
    said = lab_interval(interval)
    return said if language == "en" else said.replace(" to ", " 至 ")


def part_names(language: Language) -> list[str]:
    """The parts of a model, in the order in which bars stack them."""
    parts = ["embedding", "head", "body"]
    return parts if language == "en" else [ON_CHARTS[part] for part in parts]


def in_chinese(chart: str, label: str) -> str:
    """A chart of the lab with its words in Chinese, under another alternative text."""

    def known(found: re.Match[str]) -> str:
        return ON_CHARTS[found[0]]

    said = re.sub(r">[^<>]+<", lambda words: _WORDS.sub(known, words[0]), chart)
    return re.sub(r'aria-label="[^"]*"', f'aria-label="{escape(label)}"', said, count=1)
