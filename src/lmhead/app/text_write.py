"""The texts of the tabs Write and Layers, in English and in Chinese; see `text`."""

from __future__ import annotations

WRITE_TEXTS: dict[str, tuple[str, str]] = {
    "write.model": ("Model", "模型"),
    "write.second": ("Beside it", "并排比较"),
    "write.alone": ("no other", "无"),
    "write.prompt": ("Prompt", "提示"),
    "write.take": ("Take the word", "采用这个词"),
    "write.undo": ("Undo", "撤销"),
    "write.more": ("Ranking, temperature, nucleus", "排序、温度、核采样"),
    "write.by": ("Rank by", "排序依据"),
    "write.by.logit": ("logit", "logit"),
    "write.by.cosine": ("direction alone (cos θ)", "只看方向（cos θ）"),
    "write.temperature": ("Temperature", "温度"),
    "write.top_p": ("Nucleus (top-p)", "核采样（top-p）"),
    "write.rows": ("Rows", "行数"),
    "write.reads": ("The model reads {n} tokens:", "模型读入 {n} 个词元："),
    "write.tied": ("Both ends share one table", "两端共用一张表"),
    "write.untied": ("Each end has a table of its own", "两端各有一张表"),
    "write.anew": (
        "This model has another vocabulary: it reads the words taken as text, anew.",
        "这个模型的词表不同：已采用的词按文本重新切分后读入。",
    ),
    "write.caption": ("What {model} writes next", "{model} 接下来写什么"),
    "write.word": ("Next word", "下一个词"),
    "write.p": ("Probability", "概率"),
    "write.p_at": ("Probability at T = {t}", "概率（T = {t}）"),
    "write.logit": ("Logit", "Logit"),
    "write.by_logit": ("By logit", "按 logit"),
    "write.nucleus": (
        "At T = {t}, the nucleus of {p} holds {n} tokens with {mass} of the probability; the "
        "others are cut.",
        "T = {t} 时，top-p = {p} 的核含 {n} 个词元，占概率 {mass}；其余被截去。",
    ),
    "write.stay": (
        "{n} of the top {k} by logit stay by direction alone.",
        "logit 前 {k} 名中有 {n} 个只看方向时仍在其中。",
    ),
    "write.left": ("Out: {words}", "出局：{words}"),
    "write.why": ("Why {word} gets its logit", "{word} 的 logit 从何而来"),
    "write.h": (
        "length of the hidden state, the same for all words",
        "隐藏状态的长度，对所有词相同",
    ),
    "write.longer": ("the row's length: above {share} of all", "该行的长度：比 {share} 的行更长"),
    "write.nearer": ("its direction: place {rank} of {n}", "方向：{n} 行中第 {rank} 名"),
    "write.bias": ("the head's bias for the word", "输出头对该词的偏置"),
    "write.scale": ("the family's scale on logits", "该模型系列的 logit 缩放"),
    "write.cap": ("the family's cap on logits", "该模型系列的 logit 上限"),
    "write.ranked": ("place {rank} of {n}", "{n} 个词元中第 {rank} 名"),
    "write.beyond": (
        "This model does more to its logits than is known here: the product does not give them.",
        "这个模型对 logit 另有处理，仅凭乘积得不到它。",
    ),
    # Layers
    "layers.answer": ("The model writes {word} ({share})", "模型写出 {word}（{share}）"),
    "layers.always": (
        "It is the likeliest from the very input on.",
        "从输入起它就一直最可能。",
    ),
    "layers.stays": (
        "It becomes the likeliest at layer {stays} of {last}, and stays so.",
        "它在第 {stays} 层（共 {last} 层）成为最可能的词，此后不变。",
    ),
    "layers.first": (
        "It is the likeliest at layer {first} for the first time, and from layer {stays} of {last} "
        "on for good.",
        "它在第 {first} 层首次成为最可能的词，从第 {stays} 层（共 {last} 层）起不再改变。",
    ),
    "layers.caption": (
        "What the head of {model} would write from every layer's hidden state",
        "{model} 的输出头从每一层的隐藏状态会写出什么",
    ),
    "layers.layer": ("Layer", "层"),
    "layers.head": ("{n} · head", "{n} · 输出头"),
    "layers.embedding": ("0 · embedding", "0 · 嵌入"),
    "layers.share": ("Probability of {word}", "{word} 的概率"),
    "layers.rank": ("Its rank", "名次"),
    "layers.best": ("The head would write", "输出头会写出"),
    "layers.own": (
        "Row 0 is the input itself, the embedding's row of {read}. The ends are tied: the head "
        "compares it with the same row, and would write {read} again ({share}).",
        "第 0 行就是输入本身，即 {read} 的嵌入行。两端共用一张表：输出头用同一行与它比较，"
        "会再次写出 {read}（{share}）。",
    ),
    "layers.turned": (
        "Row 0 is the input itself, the embedding's row of {read}. The ends are tied, so the head "
        "holds the same row; yet after the final norm it would write {best}, and {read} with "
        "{share}.",
        "第 0 行就是输入本身，即 {read} 的嵌入行。两端共用一张表，输出头有同一行；"
        "但经过最后的归一化，它会写出 {best}，{read} 的概率为 {share}。",
    ),
    "layers.untied": (
        "Row 0 is the input itself, the embedding's row of {read}. The head has a table of its "
        "own: from there it would write {best}, and {read} with {share}.",
        "第 0 行就是输入本身，即 {read} 的嵌入行。输出头有自己的表："
        "从这里它会写出 {best}，{read} 的概率为 {share}。",
    ),
}
