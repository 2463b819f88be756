"""What changes when USE_CUTE_SHARDING=1 is set for a DTensor program that knows nothing about it.

    python examples/demo.py

Runs transformer_block.py twice on four CPU processes, as it stands: with USE_CUTE_SHARDING=0 in the
environment, which leaves torch's own rules in force, and with USE_CUTE_SHARDING=1. Prints what each
run measured, side by side: views, slices, a cache, a chunk, training steps, and what a step of a
language model costs. A page with a picture of the latter is saved. Takes about a minute on two
cores, and exits with code 1 if the run with the flag has wrong data, misses a view that can be
free, or has a training step that is not as on a single device.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

FLAG = "USE_CUTE_SHARDING"
PROGRAM = Path(__file__).with_name("transformer_block.py")
PICTURE = Path("demo.html")
WORKERS = 4
TIMEOUT = 600  # seconds a run, on a machine that has other work
TAIL = 40  # lines of output shown of a run that fails and leaves no traceback

Record = dict[str, Any]


def run(flag: str) -> list[Record]:
    """The records of the program run with the flag so."""
    environment = {**os.environ, FLAG: flag, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        out, logs = Path(folder, "records.json"), Path(folder, "logs")
        launch = [
            "--standalone",
            f"--nproc-per-node={WORKERS}",
            "--redirects=3",
            f"--log-dir={logs}",
        ]
        command = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            *launch,
            str(PROGRAM),
            "--out",
            str(out),
        ]
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            output, _ = process.communicate(timeout=TIMEOUT)
            failure = f"exit code {process.returncode}" if process.returncode else None
        except subprocess.TimeoutExpired:
            process.terminate()  # not kill(): the launcher ends its workers before it goes
            output, _ = process.communicate()
            failure = f"not done after {TIMEOUT} s"
        if failure:
            print(first_traceback(logs) or "\n".join(output.splitlines()[-TAIL:]))
            sys.exit(f"{FLAG}={flag}: {failure}")
        return json.loads(out.read_text())


def first_traceback(logs: Path) -> str | None:
    """What the worker that failed first had to say; the others' errors, and the launcher's, follow
    from it. None where no worker said anything.
    """
    errors = []
    for file in logs.rglob("error.json"):  # written by torchrun's @record
        try:
            message = json.loads(file.read_text())["message"]
            traceback = message["extraInfo"]["py_callstack"]
            lost = any(
                word in traceback.strip().rpartition("\n")[2]
                for word in ("gloo", "Connection", "remote worker")
            )  # of another's end
            errors.append((lost, file.stat().st_mtime_ns, file.parent.name, traceback))
        except (ValueError, KeyError, TypeError):
            continue
    if errors:
        _, _, rank, traceback = min(errors)
        return f"rank {rank} failed first:\n{traceback}"
    # A worker that dies before its program begins, of an import say, leaves a traceback only.
    said = [
        (file.stat().st_mtime, file)
        for file in logs.rglob("stderr.log")
        if "Traceback" in file.read_text(errors="replace")
    ]
    return (
        "\n".join(min(said)[1].read_text(errors="replace").splitlines()[-TAIL:]) if said else None
    )


def cell(record: Record) -> str:
    if record["right"] is False:
        return "WRONG DATA"
    if record["outcome"] == "communicates":
        return f"communicates ({record['collectives']}, {record['elements']:,})"
    return record["outcome"]


def checked(record: Record) -> str:
    return {True: "equal", False: "NOT EQUAL", None: "nothing to check"}[record["right"]]


def table(rows: list[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = [
        "  ".join(entry.ljust(width) for entry, width in zip(row, widths)).rstrip() for row in rows
    ]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def complaints(record: Record) -> list[str]:
    """What should not be, of a record of the run with the flag."""
    found = []
    if record["right"] is False:
        found.append(
            f"wrong data ({', '.join(record['wrong'])})" if record.get("wrong") else "wrong data"
        )
    if record["kind"] != "view" and record["outcome"] == "raises":
        found.append(f"raises {record['error']}")
    if record.get("free_exists") and record["outcome"] != "free":
        found.append(
            f"can be free, but {cell(record)}"
            + (f": {record['error']}" if "error" in record else "")
        )
    return [f"{record['name']}: {what}" for what in found]


def patterns(stock: list[Record], flagged: list[Record]) -> str:
    """What views, slices and training steps do in both runs."""
    rows = [
        (
            "pattern",
            "PyTorch",
            "with the flag",
            "placements with the flag",
            "against a single device",
        )
    ]
    rows += [
        (b["name"], cell(a), cell(b), b.get("placements", "-"), checked(b))
        for a, b in zip(stock, flagged, strict=True)
        if b["kind"] != "model"
    ]
    return table(rows)


def costs(stock: Record, flagged: Record) -> str:
    """What a step of the language model costs in both runs."""
    from cute_sharding._words import bytes_text, seconds_text

    rows: list[tuple[str, ...]] = [("a step of a language model", "PyTorch", "with the flag")]
    for name, key, text in (
        ("received by the busiest rank", "received", bytes_text),
        ("collectives", "collectives", str),
        ("time of the fastest step", "seconds", seconds_text),
        ("memory for training, at most", "memory", bytes_text),
    ):
        rows.append(
            (name, *(text(run[key]) if key in run else run["outcome"] for run in (stock, flagged)))
        )
    rows.append(("losses, against a single device", checked(stock), checked(flagged)))
    return table(rows)


def save_picture(stock: Record, flagged: Record, path: Path) -> None:
    """A page with the bytes that each line of the language model receives in both runs."""
    from cute_sharding import _html
    from cute_sharding._words import bytes_text
    from cute_sharding.tools.drawing.charts import Bar, BarGroup, bar_chart

    kinds = ("PyTorch", "with the flag")
    runs = [run.get("lines", {}) for run in (stock, flagged)]
    most = sorted({*runs[0], *runs[1]}, key=lambda line: -max(run.get(line, 0) for run in runs))
    groups = [
        BarGroup(
            "",
            [
                Bar(kind, bytes_text(run.get(line, 0)), {kind: run.get(line, 0)})
                for kind, run in zip(kinds, runs)
            ],
            line,
        )
        for line in most
    ]
    title = "Received for each line of the language model, with its gradient"
    path.write_text(_html.page("A step of a language model", bar_chart(title, groups, kinds)))


def count(records: list[Record]) -> tuple[int, int, int]:
    """Views that can be free and are, rightly; records with wrong data; training steps as on a
    single device.
    """
    free = sum(
        bool(r.get("free_exists") and r["outcome"] == "free" and r["right"]) for r in records
    )
    return (
        free,
        sum(r["right"] is False for r in records),
        sum(bool(r["kind"] != "view" and r["right"]) for r in records),
    )


def main() -> int:
    if not entry_points(group="torch.backends", name="cute_sharding"):
        sys.exit(
            "cute_sharding is not installed in this Python: the flag would do nothing. Run `pip "
            "install .` in the repository first."
        )
    # Here, because without the package the lines above say what to do.
    from cute_sharding.tools.progress import progress

    start = time.perf_counter()
    what = f"views, slices, a cache and a language model on {WORKERS} processes"
    with progress(f"1 of 2: {what}, with PyTorch alone"):
        stock = run("0")
    with progress(f"2 of 2: {what}, with the flag"):
        flagged = run("1")
    seconds = time.perf_counter() - start

    print(patterns(stock, flagged))
    print(
        "\n(n, m): collectives, and the elements that they give rank 0. S(d): Shard. _S(d, f): "
        "_StridedShard, split factor f. R: Replicate. "
        "Training steps count forward and backward.\n"
    )
    print(costs(stock[-1], flagged[-1]))
    save_picture(stock[-1], flagged[-1], PICTURE)
    print(f"\nSaved {PICTURE}: the bytes of each line of the model.")

    problems = [line for record in flagged for line in complaints(record)]
    for line in problems:
        print(f"FAILED  {line}")
    can, steps = (
        sum(bool(r.get("free_exists")) for r in flagged),
        sum(r["kind"] != "view" for r in flagged),
    )
    (free, wrong, match), (stock_free, stock_wrong, stock_match) = count(flagged), count(stock)
    print(
        f"{'FAILED' if problems else 'OK'}: with the flag {free} of the {can} views that can be "
        f"free are (PyTorch {stock_free}), "
        f"{wrong} results are wrong data (PyTorch {stock_wrong}), {match} of {steps} training "
        f"steps match (PyTorch {stock_match}); {seconds:.0f} s."
    )
    folder = os.path.relpath(Path(sys.executable).parent)
    print(
        "Next, which lines of a program communicate, with the flag or without: "
        f"{FLAG}=1 {folder}/torchrun --nproc-per-node=4 -m cute_sharding profile examples/train.py"
    )
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
