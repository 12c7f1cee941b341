"""What the README shows of the demo. (A file of its own, so that it runs beside the others.)"""

import shlex

from test_readme import ROOT, SMALL, demo, run

from scripts.docs_output import BLOCK, masked


def test_demo_output_has_today_s_shape(tmp_path):
    """The demo's figures depend on the machine's speed; its lines and columns do not."""
    shown = (ROOT / "README.md").read_text("utf-8").split("<!-- output: demo -->")[1]
    shown = BLOCK.search(shown)[2]
    compare, predict = (shlex.split(line)[1:] for line in demo())
    out = "runs/shape"
    compare[compare.index("--out") + 1] = out
    predict[1] = out
    first = run([*compare, *SMALL.split()], tmp_path)
    second = run(predict, tmp_path)
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    for line in first.stdout.splitlines()[:4] + first.stdout.splitlines()[5:8]:
        wanted = masked(line.replace("-", "+"))
        assert any(masked(s.replace("-", "+")) == wanted for s in shown.splitlines()), line
    for word in ("model", "arm", "ends", "read", "‖h‖", "rank", "logit = ‖h‖ · ‖W‖ · cos θ"):
        assert any(line.startswith(word) for line in second.stdout.replace(" ", " ").splitlines())
        assert word in shown
