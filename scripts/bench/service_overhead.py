"""What does the service add to a chain, in time and in memory?

    python scripts/bench/service_overhead.py [--rounds 40]

A 1x3x224x224 float32 image (602 kB) goes to a chain that is small, so that what is added shows: by `chain.run`, by a
deployment's `submit`, and by HTTP in binary form over one connection of the loopback, in turn, in one process that is
server and client. Memory is what the process holds more once the service has been imported, started and asked, than
when the deployment had answered as often. Medians; each of three processes measures both.
Claimed: at most 2 ms and 25 MB. Exit status 1 where that does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import statistics
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import measure
import numpy as np

MOST_MS, MOST_MB = 2.0, 25.0
SHAPE = (1, 3, 224, 224)
NAME = "image"
PROCESSES = 3


def make(folder: str) -> None:
    """Child function: a chain of a few blocks that takes an image."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    import trt_layering as tl

    rng = np.random.default_rng(0)
    weights = {"w": (16, 3, 7, 7), **{f"m{number}": (16, 16) for number in range(3)}}
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], strides=[4, 4]),
        helper.make_node("GlobalAveragePool", ["c"], ["p"]),
        helper.make_node("Flatten", ["p"], ["f0"]),
        *(helper.make_node("MatMul", [f"f{number}", f"m{number}"], [f"f{number + 1}"]) for number in range(3)),
    ]  # fmt: skip
    ends = [helper.make_tensor_value_info("x", TensorProto.FLOAT, SHAPE),
            helper.make_tensor_value_info("f3", TensorProto.FLOAT, (1, 16))]  # fmt: skip
    tensors = [numpy_helper.from_array(rng.random(shape, np.float32), name) for name, shape in weights.items()]
    graph = helper.make_graph(nodes, "image", ends[:1], ends[1:], tensors)
    file = Path(folder) / "image.onnx"
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), file)
    tl.build(file, name=NAME, repository=folder, backend="onnxruntime")


@contextlib.contextmanager
def served(deployment: Any, settings: Any) -> Iterator[int]:
    """The port at which a thread serves `deployment` as `serve` does."""
    from trt_layering.service.access import Access, listen
    from trt_layering.service.app import App
    from trt_layering.service.connections import Listener
    from trt_layering.service.metrics import metrics_app

    listening, scraped = listen("127.0.0.1", 0, "port"), listen("127.0.0.1", 0, "metrics_port")
    started: Future[tuple[asyncio.AbstractEventLoop, list[Listener]]] = Future()

    async def serve() -> None:
        with ThreadPoolExecutor(2) as threads:
            app = App(deployment, [NAME], settings, Access(), computing=threads, waiting=threads)
            listeners = [Listener(app, listening, idle_seconds=60),
                         Listener(metrics_app(deployment), scraped, idle_seconds=60)]  # fmt: skip
            started.set_result((asyncio.get_running_loop(), listeners))
            await asyncio.gather(*(one.run_until_told() for one in listeners))

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    loop, listeners = started.result()
    try:
        yield listening.getsockname()[1]
    finally:
        for one in listeners:
            loop.call_soon_threadsafe(setattr, one, "should_exit", True)
        thread.join()


def request(image: np.ndarray[Any, Any]) -> tuple[bytes, dict[str, str]]:
    """As `tritonclient` sends it."""
    tensor = {"name": "x", "shape": SHAPE, "datatype": "FP32", "parameters": {"binary_data_size": image.nbytes}}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    return head + image.tobytes(), {"Inference-Header-Content-Length": str(len(head))}


def compare(folder: str, rounds: int) -> dict[str, Any]:
    """Child function: seconds of each way, and the bytes that the service adds."""
    import trt_layering as tl
    from trt_layering import config
    from trt_layering.runtime.deployment import Deployment

    tl.share_thread_pool()
    image = np.random.default_rng(0).random(SHAPE, np.float32)
    content, headers = request(image)
    wanted = config.Deployment(repository=folder, models=(config.Model(name=NAME, onnx="image.onnx"),))
    deployment = Deployment(wanted)
    deployment.start()
    deployment.load(NAME)
    with contextlib.closing(deployment), tl.open_chain(NAME, repository=folder) as chain:

        def submit() -> None:
            deployment.submit(NAME, {"x": image}).result()

        for _ in range(100):
            submit()
        before = measure.usage().now
        with served(deployment, wanted.service) as port:
            client = http.client.HTTPConnection("127.0.0.1", port)

            def ask() -> None:
                client.request("POST", f"/v2/models/{NAME}/infer", content, headers)
                reply = client.getresponse()
                assert reply.status == 200, reply.read()
                reply.read()

            for _ in range(100):
                ask()
            added = measure.usage().now - before
            subjects = {"chain": lambda: chain.run({"x": image}), "submit": submit, "http": ask}
            samples = measure.interleave(subjects, rounds=rounds, batch=25)
            client.close()
    return {**samples, "added_bytes": added}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40, help="turns of 25 requests of each")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        measure.call(make, folder=folder)
        found = [measure.call(compare, folder=folder, rounds=arguments.rounds) for _ in range(PROCESSES)]
        machine = measure.describe_machine(Path(folder) / "image.onnx")
    print(machine.text())
    rows = []
    for one in found:
        milliseconds = {way: statistics.median(one[way]) * 1e3 for way in ("chain", "submit", "http")}
        rows.append(milliseconds | {"added_ms": milliseconds["http"] - milliseconds["chain"],
                                    "added_mb": one["added_bytes"] / 1e6})  # fmt: skip
    header = ["chain.run, ms", "submit, ms", "HTTP, ms", "added, ms", "added, MB"]
    measure.print_table(
        "A 1x3x224x224 image, medians", header, [[f"{value:.2f}" for value in row.values()] for row in rows]
    )
    print(measure.write_results("service_overhead", machine, rows))
    added_ms, added_mb = (statistics.median(row[key] for row in rows) for key in ("added_ms", "added_mb"))
    return 0 if added_ms <= MOST_MS and added_mb <= MOST_MB else 1


if __name__ == "__main__":
    sys.exit(main())
