"""How long `lmhead app` takes: to a page, to its first table, and from a key to the next table.

    python benchmarks/app.py [SOURCE ...]

Wall-clock seconds and the server's CPU seconds, with Chromium on the same machine; run it alone.
"""

import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from browser import served, watched

TABLE = "#write-first-table tbody"


def cpu_seconds(process: int) -> float:
    """User and system seconds of a process so far (Linux)."""
    fields = Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main(*sources: str) -> None:
    begin = time.perf_counter()
    with served(*sources) as server:
        pid = server.process
        print(f"page          {server.seconds:6.2f} s   CPU {cpu_seconds(pid):6.2f} s")
        with watched(server) as seen:
            page = seen.page
            page.wait_for_selector(f"{TABLE} tr")
            took = time.perf_counter() - begin
            print(f"first table   {took:6.2f} s   CPU {cpu_seconds(pid):6.2f} s")
            walls, cpus = [], []
            for key in " and then we all":
                old = page.locator(TABLE).inner_html()
                start, used = time.perf_counter(), cpu_seconds(pid)
                page.locator("#write-prompt textarea").press_sequentially(key)
                changed = f"([old]) => document.querySelector('{TABLE}').innerHTML !== old"
                page.wait_for_function(changed, arg=[old])
                walls.append(time.perf_counter() - start)
                cpus.append(cpu_seconds(pid) - used)
    for name, pick in (("best", min), ("median", statistics.median)):
        print(f"key, {name:8} {pick(walls):6.2f} s   CPU {pick(cpus):6.2f} s")
    load = os.getloadavg()[0]
    print(f"{os.cpu_count()} CPUs, load average {load:.1f}, python {sys.version.split()[0]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
