"""A real client of the service: how long requests take, how many it answers, and whether it keeps its promises.

    python scripts/bench/serve_load.py drive CONFIG.yaml [--serve | --pid PID] [--rate 5] [--seconds 60] [--compare]
    python scripts/bench/serve_load.py trio [--minutes 10]
    python scripts/bench/serve_load.py waves | queue | cycles | budgets

`drive` asks a service that runs at the addresses of CONFIG.yaml, or starts one for the time being; without a rate it
asks for as much as is answered. Requests come from NVIDIA's `tritonclient.http`. At a fixed rate latency counts from
the moment at which a request was due, not from when a client had time to send it. With `--compare` every answer is
compared with what the chain answers when everything is in memory, or with what was stored.

The others start services of their own, and are what a release is judged by. Expected, before anything was measured:

trio     the OCR model, the MiniLM embedder and ResNet-152 at 40 % of their weights, mixed load that keeps the device
         busy for a third of the time, going by requests that came alone; 10 minutes: no error; no answer off by more
         than 1e-5 of the largest output; peak memory within the budget, the libraries and 33 MiB (25 MB the service,
         8 MiB the runtime); no deadline of 2 s missed, unless a model's prediction and the longest of the others'
         exceed it
waves    an encoder at 10 % of its weights, which waits for the drive, at saturation: with waves of 8 at least 3 times
         as many requests a second as without
queue    a queue of 2 that is full: 503 within 50 ms, with Retry-After in seconds
cycles   200 loads and unloads, 20 of them of a chain whose file is cut off: resident memory grows by at most 5 MB after
         the first fifth; each of the 20 is refused in words; every answer in between is right
budgets  the budget halved and restored 50 times under load, by SIGHUP: each change takes effect; no request fails; no
         answer is wrong

Results go to `.bench/results/serve-NAME.json`. Exit status 1 where something expected does not hold.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import load
import measure
import serve_cases
import serving
from measure import MIB

from trt_layering.errors import LayeringError

HEADER = [
    "model", "requests", "answered", "errors", "wrong", "misses", "requests/s", "p50 ms", "p90 ms", "p99 ms", "max ms",
    "requests a sweep",
]  # fmt: skip


def drive(arguments: argparse.Namespace) -> serve_cases.Found:
    """Load on any deployment: what `drive` of the command line does."""
    service = serving.Service(arguments.config, pid=arguments.pid)
    if arguments.serve:
        service.start()
    try:
        subjects = serving.subjects(
            service, inputs=arguments.inputs, compared=arguments.compare or arguments.answers is not None,
            weights=dict(arguments.weight), answers=arguments.answers, tolerance=arguments.tolerance,
        )  # fmt: skip
        work = load.Load(
            subjects, arguments.rate, arguments.seconds, arguments.workers, arguments.count, seed=arguments.seed
        )
        replies, before, after, used = serve_cases.under_load(service, work)
    finally:
        service.stop()
    found = serve_cases.Found("drive")
    numbers = serve_cases.by_model(replies, subjects)
    found.numbers = {
        "models": numbers, "all": load.summary(replies, {subject.name: subject.deadline for subject in subjects}),
        "waves": serving.mean_waves(before, after), "peak_bytes": used.peak, "rate": arguments.rate,
    }  # fmt: skip
    if not arguments.json:
        rows = [
            row(name, part, found.numbers["waves"]) for name, part in [*numbers.items(), ("all", found.numbers["all"])]
        ]
        measure.print_table("Latency from when a request was due", HEADER, rows)
        print(f"peak memory of the service: {used.peak / MIB:.1f} MiB" if used.peak else "no --pid: memory unknown")
    if not replies or found.numbers["all"]["errors"] or found.numbers["all"]["wrong"]:
        found.add("every request answered, and rightly", "yes", "no", held=False)
    return found


def row(name: str, part: Mapping[str, Any], waves: Mapping[str, float]) -> list[str]:
    errors = ", ".join(f"{count} x {kind}" for kind, count in part["errors"].items()) or "0"
    return [
        name, f"{part['requests']}", f"{part['answered']}", errors, f"{part['wrong']}", f"{part['misses']}",
        f"{part['per_second']:.2f}", *(f"{part[key] * 1e3:.1f}" for key in ("p50", "p90", "p99", "max")),
        f"{waves[name]:.2f}" if name in waves else "",
    ]  # fmt: skip


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output instead of tables")
    verbs = parser.add_subparsers(dest="verb", required=True)
    _add_drive(verbs.add_parser("drive", help="load on a deployment"))
    trio = verbs.add_parser("trio", help="three models at 40 %% of their weights")
    trio.add_argument("--minutes", type=_positive, default=10.0)
    waves = verbs.add_parser("waves", help="saturation with and without waves")
    waves.add_argument("--share", type=_positive, default=0.1, help="of the weights (default: %(default)s)")
    waves.add_argument("--wave", type=int, default=8)
    budgets = verbs.add_parser("budgets", help="the budget halved and restored under load")
    budgets.add_argument("--times", type=int, default=50)
    for verb in (trio, budgets):
        verb.add_argument(
            "--rate", type=_positive, help="requests a second (default: a third of what the device can do)"
        )
    queue = verbs.add_parser("queue", help="what a full queue answers")
    for verb in (waves, queue):
        verb.add_argument("--seconds", type=_positive, default=30.0)
    cycles = verbs.add_parser("cycles", help="loading and unloading")
    cycles.add_argument("--count", type=int, default=200)
    cycles.add_argument("--failing", type=int, default=20)
    return parser.parse_args(arguments)


def _add_drive(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("config", type=Path, metavar="CONFIG.yaml")
    running = verb.add_mutually_exclusive_group()
    running.add_argument("--serve", action="store_true", help="start the service, and end it afterwards")
    running.add_argument("--pid", type=int, help="of the running service, for its memory")
    verb.add_argument("--rate", type=_positive, help="requests a second (default: as many as are answered)")
    verb.add_argument("--seconds", type=_positive, default=30.0, help="(default: %(default)g)")
    verb.add_argument("--count", type=int, default=1_000_000, help="most requests (default: %(default)s)")
    verb.add_argument("--workers", type=int, default=16, help="most requests at once (default: %(default)s)")
    verb.add_argument("--inputs", type=int, default=4, help="different inputs of each model (default: %(default)s)")
    verb.add_argument("--seed", type=int, default=0, help="of the order in which models are asked")
    verb.add_argument("--weight", type=_weight, action="append", default=[], metavar="MODEL=NUMBER",
                      help="how often a model is asked (default: its priority)")  # fmt: skip
    verb.add_argument("--compare", action="store_true", help="compare with the chain when everything is in memory")
    verb.add_argument("--answers", type=Path, help="compare with FOLDER/MODEL.npz of arrays out/NUMBER/OUTPUT instead")
    verb.add_argument(
        "--tolerance", type=float, default=1e-5, help="of an output's largest value (default: %(default)s)"
    )


def _positive(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


def _weight(text: str) -> tuple[str, float]:
    name, _, number = text.partition("=")
    try:
        return name, _positive(number)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is not MODEL=NUMBER") from None


def measured(arguments: argparse.Namespace) -> serve_cases.Found:
    if arguments.verb == "drive":
        return drive(arguments)
    if arguments.verb == "trio":
        return serve_cases.trio(arguments.minutes, arguments.rate)
    if arguments.verb == "waves":
        return serve_cases.waves(arguments.seconds, arguments.share, arguments.wave)
    if arguments.verb == "queue":
        return serve_cases.queue(arguments.seconds)
    if arguments.verb == "cycles":
        return serve_cases.cycles(arguments.count, arguments.failing)
    return serve_cases.budgets(arguments.times, arguments.rate)


def main(arguments: Sequence[str] | None = None) -> int:
    given = parsed(arguments)
    try:
        found = measured(given)
    except LayeringError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    except (serving.ServiceFailed, load.Failed, measure.ChildError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    result = {"case": found.case, "held": found.held, "findings": [asdict(one) for one in found.findings],
              **found.numbers}  # fmt: skip
    if given.json:
        print(json.dumps(result))
    elif found.findings:
        lines = [[one.what, one.expected, one.measured, "yes" if one.held else "NO"] for one in found.findings]
        measure.print_table(found.case, ["what", "expected", "measured", "held"], lines)
    if given.verb != "drive":
        measure.RESULTS.mkdir(parents=True, exist_ok=True)
        (measure.RESULTS / f"serve-{found.case}.json").write_text(json.dumps(result, indent=1) + "\n")
    return 0 if found.held else 1


if __name__ == "__main__":
    sys.exit(main())
