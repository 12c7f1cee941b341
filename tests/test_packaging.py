"""What a release carries: one version everywhere, and the files that the package needs."""

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

import lmhead

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def test_one_version_everywhere():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text("utf-8"))
    changelog = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    found = {lmhead.__version__, PROJECT["version"], citation["version"], changelog[1]}
    assert found == {PROJECT["version"]}
    assert citation["license"] == PROJECT["license"] == "Apache-2.0"


def test_issue_templates_are_forms():
    for path in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        form = yaml.safe_load(path.read_text("utf-8"))
        if path.name != "config.yml":
            assert {"name", "description", "body"} <= set(form)


def tracked(folder=""):
    command = ["git", "ls-files", folder or "."]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return listed.stdout.splitlines()


def test_the_wheel_holds_all_that_the_package_reads(tmp_path):
    names = tracked()
    if not names:
        pytest.skip("no git repository here that tells which files are the package's")
    for name in filter(lambda name: (ROOT / name).is_file(), names):  # no old build beside them
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir=out"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-1000:]
    (wheel,) = tmp_path.glob("out/*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    package = {name.removeprefix("src/") for name in tracked("src") if (ROOT / name).is_file()}
    assert package <= held
    assert {name for name in held if ".dist-info/" not in name} == package
