"""Mixed load for as long as you like: nobody without an answer, nothing leaks, no token differs.

Clients of two tenants ask a server with small tiers for token ids and for chats in many
scripts, that share beginnings, with fixed seeds and stop strings, streamed or at once. They
hang up, lose patience, send nonsense, warm and pin prefixes and ask for more than the queue
takes; some answers are too long for the server's deadline. An operator evicts and flushes. The
store's process is killed and stopped, its file is cut and loses bits, its folder vanishes, its
writes fail, the file system fills up. Every text, whole or cut off, is compared with that of an
engine without a cache. Each minute the server's books are checked and the memory of its two
processes is read, which has to be flat after ten minutes.

    python -m benchmarks.soak [--minutes 60] [--source bundled]
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from benchmarks.common import machine, save
from benchmarks.soak.run import Plan, Soak, console, settings
from benchmarks.soak.watch import judge_memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--source", default="bundled", help="model.source; bundled by default")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument(
        "--copy-every-hit", action="store_true", help="engine.reuse_working_copies: false"
    )
    parser.add_argument("--name", default="soak", help="of the result")
    options = parser.parse_args()
    measured_on = machine()
    with tempfile.TemporaryDirectory() as name:
        config = settings(
            options.source,
            Path(name),
            device="32MiB",
            host="64MiB",
            disk="256MiB",
            quota="20MiB",
            deadline_seconds=30,
            reuse_working_copies=not options.copy_every_hit,
        )
        soak = Soak(config, Plan(options.minutes * 60, options.clients), Path(name))
        soak.run()
    tally = soak.tally
    memory = {
        "server": judge_memory(tally.minutes, "server"),
        "store": judge_memory(tally.minutes, "store", ("own_mib",)),  # it shares the server's pools
    }
    for process, verdict in memory.items():
        if verdict["is_flat"] is False:
            tally.fail(f"the memory of the {process} is not flat: {verdict}")
    result = {
        "outcomes": dict(tally.outcomes),
        "compared": dict(tally.compared),
        "orders": dict(tally.orders),
        "memory": memory,
        "at_the_end": soak.at_the_end,
        "failed": len(tally.failures),
        "failures": tally.failures[:20],
        "minutes": tally.minutes,
    }
    path = save(options.name, measured_on, result)
    console.print({key: value for key, value in result.items() if key != "minutes"})
    console.print(f"written to {path.name}")
    raise SystemExit(1 if tally.failures else 0)


if __name__ == "__main__":
    main()
