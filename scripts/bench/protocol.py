"""How long does it take to read an inference request, and to write its answer?

    python scripts/bench/protocol.py [--calls 300]

A 1x3x224x224 float32 image (602 kB) and its 1x1000 answer, and an answer as large as the image; in binary, in JSON and
compressed. `arrive` is the body put together from pieces of 64 KiB, `parse` the request as arrays; `ready` is a tensor
used where it lies, `copied` one at an odd address. Medians and quartiles, in one thread; no server, no network.
Claimed: under 0.2 ms for each of the binary ones. Exit status 1 where that does not hold.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import measure
import numpy as np

from trt_layering.service.body import HEADER_LENGTH, Body
from trt_layering.service.encoding import compressed
from trt_layering.service.protocol import InferRequest, WantedOutput, infer_answer, parse_infer
from trt_layering.service.refusals import Limits

MOST_MS = 0.2
PIECE = 64 << 10
LIMITS = Limits()
IMAGE = np.random.default_rng(0).random((1, 3, 224, 224), np.float32)
SCORES = np.random.default_rng(1).random((1, 1000), np.float32)
REQUEST = InferRequest("", {}, (), True, None, None, {})


def binary_request() -> tuple[bytes, dict[str, str]]:
    tensor = {"name": "x", "shape": IMAGE.shape, "datatype": "FP32", "parameters": {"binary_data_size": IMAGE.nbytes}}
    text = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    body = text + IMAGE.tobytes()
    return body, {HEADER_LENGTH: str(len(text)), "content-length": str(len(body))}


def json_request() -> bytes:
    tensor = {"name": "x", "shape": IMAGE.shape, "datatype": "FP32", "data": IMAGE.ravel().tolist()}
    return json.dumps({"inputs": [tensor]}).encode()


def arrive(body: bytes, headers: dict[str, str]) -> Any:
    whole = Body(headers, LIMITS)
    for start in range(0, len(body), PIECE):
        whole.add(body[start : start + PIECE])
    return whole.finish()


def answer(array: np.ndarray[Any, Any], binary: bool, encoding: str | None = None) -> None:
    infer_answer(REQUEST, [WantedOutput("y", binary)], {"y": array}, "model", 1, encoding)


def subjects() -> dict[str, Callable[[], Any]]:
    body, headers = binary_request()
    text = json_request()
    zipped = compressed(body, "gzip")
    ready = arrive(body, headers)
    odd = memoryview(bytearray(len(body) + 64))
    start = (2 - np.frombuffer(odd, np.uint8).__array_interface__["data"][0] - int(headers[HEADER_LENGTH])) % 4
    odd = odd[start : start + len(body)]
    odd[:] = body
    return {
        "arrive, binary": lambda: arrive(body, headers),
        "parse, binary, ready": lambda: parse_infer(ready, headers, LIMITS),
        "parse, binary, copied": lambda: parse_infer(odd, headers, LIMITS),
        "answer, binary, 4 kB": lambda: answer(SCORES, True),
        "answer, binary, 602 kB": lambda: answer(IMAGE, True),
        "parse, JSON": lambda: parse_infer(text, {}, LIMITS),
        "parse, gzip": lambda: parse_infer(zipped, {**headers, "content-encoding": "gzip"}, LIMITS),
        "answer, JSON, 4 kB": lambda: answer(SCORES, False),
        "answer, gzip, 602 kB": lambda: answer(IMAGE, True, "gzip"),
    }


def times(call: Callable[[], Any], calls: int) -> list[float]:
    """Milliseconds of each call, after a few that do not count."""
    found = []
    for number in range(calls + 5):
        start = time.perf_counter()
        call()
        if number >= 5:
            found.append((time.perf_counter() - start) * 1e3)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=300, help="of each (default 300; of slow ones a tenth)")
    calls = parser.parse_args().calls
    held, rows = True, []
    for name, call in subjects().items():
        quick = "binary" in name
        low, median, high = np.percentile(times(call, calls if quick else max(3, calls // 10)), (25, 50, 75))
        held = held and (not quick or median < MOST_MS)
        rows.append([name, f"{median:.4f} ({low:.4f} to {high:.4f})"])
    measure.print_table("Open Inference Protocol", ["what", "ms, median (quartiles)"], rows)
    return 0 if held else 1


if __name__ == "__main__":
    sys.exit(main())
