"""Draws the pictures of a bench again from its numbers, for instance those of the README.

trt-layering bench NAME --output FOLDER
python scripts/bench/pictures.py FOLDER/bench.json [--curve docs/curve.svg] [--timeline docs/timeline.svg] [--title T]
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from trt_layering.bench import figures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, metavar="BENCH.json")
    parser.add_argument("--curve", type=Path, metavar="FILE", help="draw latency over memory into this .svg or .png")
    parser.add_argument("--timeline", type=Path, metavar="FILE", help="draw two inferences into this .svg or .png")
    parser.add_argument("--title", help="of the curve, for instance what it shows")
    arguments = parser.parse_args()
    result = json.loads(arguments.results.read_text(encoding="utf-8"))
    if arguments.curve:
        print(figures.draw_curve(result, arguments.curve, arguments.title))
    if arguments.timeline:
        print(figures.draw_timeline(result, arguments.timeline))
    return 0


if __name__ == "__main__":
    sys.exit(main())
