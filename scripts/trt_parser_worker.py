"""Parses and builds ONNX files with NVIDIA's parser and builder, for check_trt_parser.py.

It runs in an environment of its own, where `tensorrt_bindings` stands over a library that shares TensorRT's parser and
builder and no more: nothing else may be called here.

Tasks come as lines of JSON on standard input, {"file", "profile": {input: [min, opt, max]}}; each is answered by one on
standard output, {"stage": "" | "parse" | "build", "words", "inputs", "layers", "plan"}, or the process dies of it.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import tensorrt_bindings as trt

_FIRST, _OTHER = 1, 64  # sizes of dims of which nothing is known, as trt_layering takes them


class _Log(trt.ILogger):  # type: ignore[misc]
    """Keeps what the library complains of."""

    def __init__(self) -> None:
        trt.ILogger.__init__(self)
        self.errors: list[str] = []

    def log(self, severity: Any, text: str) -> None:
        if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
            self.errors.append(text)


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    log = _Log()
    for line in sys.stdin:
        log.errors.clear()
        print(json.dumps(_checked(log, **json.loads(line))), file=answers, flush=True)


def _checked(log: _Log, file: str, profile: dict[str, list[list[int]]]) -> dict[str, Any]:
    builder = trt.Builder(log)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, log)
    if not parser.parse_from_file(file):
        errors = [parser.get_error(index) for index in range(parser.num_errors)]
        words = [f"{error.node_operator() or 'the graph'}: {error.desc()}" for error in errors]
        return {"stage": "parse", "words": "; ".join(words) or "; ".join(log.errors)}
    config = builder.create_builder_config()
    config.builder_optimization_level = 0
    config.add_optimization_profile(_profile(builder, network, profile))
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        return {"stage": "build", "words": "; ".join(log.errors) or "the builder says nothing"}
    found = {"inputs": network.num_inputs, "layers": network.num_layers, "plan": plan.nbytes}
    return {"stage": "", "words": "", **found}


def _profile(builder: Any, network: Any, known: dict[str, list[list[int]]]) -> Any:
    profile = builder.create_optimization_profile()
    for index in range(network.num_inputs):
        tensor = network.get_input(index)
        shape = list(tensor.shape)
        if -1 in shape:
            usual = [size if size >= 0 else _OTHER if axis else _FIRST for axis, size in enumerate(shape)]
            profile.set_shape(tensor.name, *known.get(tensor.name, [usual] * 3))
    return profile


if __name__ == "__main__":
    main()
