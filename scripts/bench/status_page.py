"""Takes the picture of the status page for the docs: a real deployment under load, drawn by a real browser.

    python scripts/bench/status_page.py CONFIG.yaml [--seconds 60] [--output docs/status-page.png]

Opens the deployment, whose models must have been built, asks each model for one to three inferences at a time with
random inputs, then writes its page and has chromium take a picture. Needs chromium on PATH and Pillow.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageChops

from trt_layering import config, inputs
from trt_layering.runtime.deployment import Deployment
from trt_layering.service.page import page

_TALLEST = 4000
_COLOURS = 255
_MARGIN = 16
_OPENING_SECONDS = 120.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config", type=Path, metavar="CONFIG.yaml")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long to ask for inferences (default: 60)")
    parser.add_argument("--width", type=int, default=1000, help="of the browser's window, in pixels (default: 1000)")
    parser.add_argument("--output", type=Path, default=Path("docs/status-page.png"), metavar="FILE.png")
    arguments = parser.parse_args()
    browser = shutil.which("chromium")
    if browser is None:
        print("chromium is not on PATH: apt-get install --no-install-recommends chromium", file=sys.stderr)
        return 1
    text = served(config.load(arguments.config).deployment, arguments.seconds)
    taken(browser, text, arguments.width, arguments.output)
    print(f"{arguments.output}: {arguments.output.stat().st_size:,} bytes, of a page of {len(text.encode()):,}")
    return 0


def served(settings: config.Deployment, seconds: float) -> str:
    """The page of a deployment that has answered requests for so long."""
    with Deployment(settings) as deployment:
        until_ready(deployment)
        feeds = {
            model.name: inputs.seeded(deployment.model(model.name).inputs, shapes(model), seed=0)
            for model in settings.models
        }
        ask(deployment, feeds, time.monotonic() + seconds)
        return page(deployment)


def shapes(model: config.Model) -> Mapping[str, Sequence[int]]:
    """The shapes that the chain is best at, for inputs that the configuration names."""
    return {name: chosen.opt for name, chosen in model.shapes.items()}


def until_ready(deployment: Deployment) -> None:
    """Wait for all models to be ready, or for one that never will be."""
    end = time.monotonic() + _OPENING_SECONDS
    while any(state.state == "loading" for state in deployment.models()) and time.monotonic() < end:
        time.sleep(0.1)


def ask(deployment: Deployment, feeds: Mapping[str, Mapping[str, Any]], until: float) -> None:
    """Ask all models at once, in rounds of one to three requests for each."""
    turn = 0
    while time.monotonic() < until:
        turn += 1
        futures = [deployment.submit(name, fed) for name, fed in feeds.items() for _ in range(1 + turn % 3)]
        for future in futures:
            future.result()


def taken(browser: str, text: str, width: int, picture: Path) -> None:
    """Have `browser` draw the page `text`, and keep what is not empty of it, in few colours."""
    with tempfile.TemporaryDirectory() as folder:
        file, drawn = Path(folder, "page.html"), Path(folder, "page.png")
        file.write_text(text, encoding="utf-8")
        subprocess.run(
            [browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
             f"--user-data-dir={folder}/profile", f"--window-size={width},{_TALLEST}", f"--screenshot={drawn}",
             file.as_uri()],
            check=True, capture_output=True, timeout=120,
        )  # fmt: skip
        with Image.open(drawn) as opened:
            whole = opened.convert("RGB")
    empty = Image.new("RGB", whole.size, whole.getpixel((0, 0)))
    box = ImageChops.difference(whole, empty).getbbox() or (0, 0, *whole.size)
    cut = whole.crop((0, 0, width, min(box[3] + _MARGIN, whole.height)))
    cut.quantize(_COLOURS).save(picture, optimize=True)


if __name__ == "__main__":
    sys.exit(main())
