"""The texts of the tabs Read, Decide and Cost, in English and in Chinese; see `text`."""

from __future__ import annotations

READ: dict[str, tuple[str, str]] = {
    "tab.read": ("Read", "读"),
    "read.model": ("Model", "模型"),
    "read.by": ("Nearest by", "按什么找近邻"),
    "read.by.cosine": ("cosine: direction alone", "余弦：只看方向"),
    "read.by.dot": ("dot product: direction and length", "点积：方向和长度"),
    "read.find": ("Find a word", "查找词"),
    "read.find.info": ("Part of a word, or #12 for row 12", "词的一部分；#12 表示第 12 行"),
    "read.found": ("Tokens found", "找到的词元"),
    "read.none": ("No token holds “{typed}”.", "没有词元包含“{typed}”。"),
    "read.own": ("Your own words on the map", "加到图上的词"),
    "read.own.info": (
        "Between commas or spaces; each must be one token",
        "用逗号或空格分隔；每个词须是一个词元",
    ),
    "read.loading": (
        "Reading the tables of {name}: {share} %. Nothing else of the model is needed.",
        "正在读取 {name} 的嵌入表和输出头：{share} %。不需要模型的其他部分。",
    ),
    "read.nothing": ("No model to read yet.", "还没有可读取的模型。"),
    "read.end.embedding": ("Embedding table: how it is read", "嵌入表：读入"),
    "read.end.head": ("Head: how it is written", "输出头：写出"),
    "read.end.table": ("The one table: read and written", "唯一的表：既读又写"),
    "read.one.tied": (
        "The ends are tied: one table reads and writes, so there is one list and one map.",
        "两端共用一张表，既读又写，因此只有一个列表和一张图。",
    ),
    "read.one.same": (
        "Both ends are stored and hold the same values: one list and one map stand for both.",
        "两端分别保存但数值相同：一个列表和一张图代表两者。",
    ),
    "read.one.alone": (
        "Of the two ends only this one can be shown here ({verdict}).",
        "两端之中这里只能显示这一端（{verdict}）。",
    ),
    "read.two": (
        "Two tables ({verdict}): the same word has a row in each.",
        "两张表（{verdict}）：同一个词在每张表中各有一行。",
    ),
    "read.row": ("row {row:,} of {rows:,}", "第 {row:,} 行，共 {rows:,} 行"),
    "read.norm": (
        "Length {norm:.3f}: longer than {share} of the rows.",
        "长度 {norm:.3f}：比 {share} 的行更长。",
    ),
    "read.cosine": (
        "Cosine between its two rows: <strong>{cosine:+.3f}</strong>. Of its {k} nearest in each "
        "table {shared} are the same.",
        "它的两行之间的余弦：<strong>{cosine:+.3f}</strong>。两张表中各自最近的 {k} 个词有 "
        "{shared} 个相同。",
    ),
    "read.widths": (
        "Its two rows have different widths, so there is no cosine between them. Of its {k} "
        "nearest in each table {shared} are the same.",
        "它的两行宽度不同，因此没有余弦。两张表中各自最近的 {k} 个词有 {shared} 个相同。",
    ),
    "read.heads.word": ("token", "词元"),
    "read.heads.cosine": ("cosine", "余弦"),
    "read.heads.dot": ("product", "点积"),
    "read.heads.norm": ("length", "长度"),
    "read.go": ("Look at {word}", "查看 {word}"),
    "read.map": ("A map of words", "词的地图"),
    "read.map.says": (
        "The two axes carry {first} and {second} of the words’ variance.",
        "两条轴分别占这些词方差的 {first} 和 {second}。",
    ),
    "read.map.about": (
        "{n} words, in the plane in which they differ most. Two axes never show all of it: what is "
        "near on the map need not be near in the table, the lists above are exact.",
        "{n} 个词，画在差别最大的平面上。两条轴不可能显示全部：图上靠近的词在表中未必靠近，"
        "上面的列表才是精确的。",
    ),
    "read.map.agrees": (
        "The head's map is turned, mirrored and scaled to lie over the embedding's (orthogonal "
        "Procrustes); then it explains {agreement} of it.",
        "输出头的图经过旋转、镜像和缩放，与嵌入表的图对齐（正交普氏分析）；"
        "对齐后能解释其中的 {agreement}。",
    ),
    "read.map.missing": ("Not one token here: {words}.", "在这里不是单个词元：{words}。"),
    "read.map.alt": (
        "Map of {n} words, {end}; among them {words}",
        "{n} 个词的地图，{end}；其中有 {words}",
    ),
    "read.key": (
        "● the word’s nearest, ■ the word; click a point to look at it.",
        "● 最近的词，■ 所选的词；点击任意点即可查看。",
    ),
}

DECIDE: dict[str, tuple[str, str]] = {
    "tab.decide": ("Decide", "决定"),
    "decide.runs": ("Runs", "实验"),
    "decide.runs.info": (
        "Those that the page was given, and those in runs/",
        "启动时给出的实验，以及 runs/ 中的实验",
    ),
    "decide.again": ("Read again", "重新读取"),
    "decide.none": (
        "No comparison yet. `lmhead compare my-text.txt --budget 5m` trains a model tied and "
        "untied; its run then stands here.",
        "还没有对比实验。运行 `lmhead compare my-text.txt --budget 5m`，"
        "按共用和不共用一张表两种方式各训练一个模型，结果会出现在这里。",
    ),
    "decide.choose": ("Choose a run above.", "请在上方选择一个实验。"),
    "decide.scope": (
        "{model} on {text}, {tokens:,} tokens a model. Margin of equivalence: {margin}. Budget, "
        "rate and initial scale can turn the answer.",
        "{model}，文本 {text}，每个模型 {tokens:,} 个词元。等价界限：{margin}。"
        "预算、学习率和初始尺度都可能改变结论。",
    ),
    "decide.unfinished": (
        "Not finished: {done} of {jobs} trainings. Carry on with <code>{command}</code>",
        "尚未完成：已完成 {done} 次训练，共 {jobs} 次。继续运行：<code>{command}</code>",
    ),
    "decide.report": ("The whole report, to open in a browser:", "完整报告（用浏览器打开）："),
    "decide.arms": ("The arms", "各个方案"),
    "decide.arm": ("arm", "方案"),
    "decide.nats": ("nats/token", "纳特/词元"),
    "decide.characters": ("nats/character", "纳特/字符"),
    "decide.perplexity": ("perplexity", "困惑度"),
    "decide.params": ("parameters", "参数量"),
    "decide.speed": ("tokens/s", "词元/秒"),
    "decide.peak": ("peak memory", "内存峰值"),
    "decide.arms.note": (
        "Loss on held-out text at the end, mean over seeds; lower is better.",
        "训练结束时在留出文本上的损失，取各随机种子的平均；越低越好。",
    ),
    "decide.pairs": ("Pair by pair", "逐对比较"),
    "decide.pairs.says": (
        "Each bar is an interval of the difference in validation loss, nats a token; the upright "
        "stroke is the mean, dots are seeds. Clear of the zero line: a difference was measured. "
        "Inside the shaded margin: too small to matter. The thick bar decides.",
        "每条横线是验证损失之差的区间（纳特/词元）；竖线是平均值，圆点是各个种子。"
        "不碰零线：测出了差别；落在阴影之内：小到无关紧要。粗线决定结论。",
    ),
    "decide.pair": ("pair", "比较"),
    "decide.verdict": ("verdict", "结论"),
    "decide.difference": ("difference", "差"),
    "decide.interval": ("interval", "区间"),
    "decide.margin": ("margin", "界限"),
    "decide.seeds": ("seeds", "种子数"),
    "decide.loss": ("Loss while training", "训练过程中的损失"),
    "decide.valid": ("Validation loss", "验证损失"),
    "decide.train": ("Training loss", "训练损失"),
    "decide.tokens": ("training tokens", "训练词元"),
    "decide.valid.says": (
        "Held-out text, nats a token: the mean over seeds, the band spans them; the steep start is "
        "cut off.",
        "留出文本，纳特/词元：各种子的平均，色带为其范围；开头陡降的部分未画出。",
    ),
    "decide.train.says": (
        "Training text: lower here but not on held-out text means learnt by heart.",
        "训练文本：若只在这里更低而留出文本上不更低，就是死记硬背。",
    ),
    "decide.share": (
        "Who moves the table: the writing side’s share of the gradient",
        "谁在推动这张表：写端占梯度的份额",
    ),
    "decide.share.says": (
        "{norm}: what lies above the line, up to 1, is the reading side’s share.",
        "{norm}：曲线以上直到 1 的部分是读端的份额。",
    ),
    "decide.share.none": (
        "The ends were not watched in this run (`--no-watch`), so there are no gradient shares.",
        "这次实验没有观察两端（`--no-watch`），因此没有梯度份额。",
    ),
    "decide.size": ("Parameters", "参数"),
    "decide.size.says": (
        "Where the parameters are: a tied table counts once, as embedding.",
        "参数分布：共用的表只计一次，算作嵌入。",
    ),
    "decide.several": ("The runs side by side", "各实验并列"),
    "decide.run": ("run", "实验"),
    "decide.jobs": ("trainings", "训练次数"),
}

COST: dict[str, tuple[str, str]] = {
    "tab.cost": ("Cost", "代价"),
    "cost.vocab": ("Vocabulary", "词表大小"),
    "cost.width": ("Width", "宽度"),
    "cost.layers": ("Layers", "层数"),
    "cost.dtype": ("Weights stored as", "权重的存储类型"),
    "cost.rule": (
        "A LLaMA: {heads} heads, 64 wide each, with keys and values of their own; feed-forward "
        "layers {feed_forward:,} wide (8/3 of the width, rounded up to a multiple of 256).",
        "LLaMA 结构：{heads} 个注意力头，每个宽 64，各有自己的键和值；前馈层宽 {feed_forward:,}"
        "（宽度的 8/3，向上取整到 256 的倍数）。",
    ),
    "cost.says": (
        "The table is <strong>{vocab:,} × {width:,} = {table:,}</strong> parameters. Tied, the "
        "ends are <strong>{tied}</strong> of the model, untied {untied}. Tying saves {saved:,} "
        "parameters: {stored} of {dtype} weights, {training} of training state.",
        "这张表有 <strong>{vocab:,} × {width:,} = {table:,}</strong> 个参数。共用时两端占模型的 "
        "<strong>{tied}</strong>，不共用时占 {untied}。共用可省下 {saved:,} 个参数："
        "{dtype} 权重 {stored}，训练状态 {training}。",
    ),
    "cost.part": ("ends", "两端"),
    "cost.tied": ("tied", "共用"),
    "cost.untied": ("untied", "不共用"),
    "cost.saving": ("tying saves", "共用省下"),
    "cost.ends": ("both ends", "两端参数"),
    "cost.body": ("body", "主体"),
    "cost.total": ("total", "合计"),
    "cost.share": ("share of the ends", "两端占比"),
    "cost.stored": ("weights", "权重"),
    "cost.training": ("training state", "训练状态"),
    "cost.table": ("Tied and untied", "共用与不共用"),
    "cost.training.note": (
        "Training state with Adam: 16 bytes a parameter (weights, gradients, two moments), without "
        "activations. 1 MB = 10⁶ bytes.",
        "使用 Adam 的训练状态：每个参数 16 字节（权重、梯度、两个矩），不含激活值。"
        "1 MB = 10⁶ 字节。",
    ),
    "cost.axis": ("parameters in all", "参数总量"),
    "cost.chart": ("Share of the ends over size", "两端占比随规模的变化"),
    "cost.chart.says": (
        "The ends’ part of all parameters, in per cent. Lines: this vocabulary and depth at other "
        "widths. Rings: the model of the sliders. Points: {n} models that exist, as they are.",
        "两端占全部参数的百分比。曲线：同样的词表和层数，其他宽度；"
        "圆环：滑块所示的模型；点：{n} 个现有模型。",
    ),
    "cost.alt": (
        "Share of the ends over the number of parameters: at {total} parameters {tied} tied and "
        "{untied} untied; beside {n} known models, whose share falls with size",
        "两端占比随参数总量的变化：共用时（{total} 个参数）占 {tied}，不共用时占 {untied}；"
        "另有 {n} 个现有模型，规模越大占比越低",
    ),
    "cost.near": ("Known models of about these sizes", "规模相近的现有模型"),
    "cost.model": ("model", "模型"),
    "cost.as": ("ends", "两端"),
    "cost.source": (
        "Counted from the models’ configs by `lmhead params`; `lmhead params --list` has them all.",
        "由 `lmhead params` 根据各模型的配置计算；`lmhead params --list` 列出全部。",
    ),
}

TAB_TEXTS = READ | DECIDE | COST
