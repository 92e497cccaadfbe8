"""A chain as a model of NVIDIA Triton's Python backend: `make_repository.py` puts this file where Triton looks for it.

Imports trt_layering, which the Python of the backend must have, and Triton's own module. A chain that cannot be opened
fails the loading of the model, and a request that cannot be answered fails alone, both with the words of our errors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

import trt_layering as tl

Array = np.ndarray[Any, Any]


class TritonPythonModel:
    """One instance, so one process and one budget. What it serves is in `parameters` of config.pbtxt: `chain`,
    whose newest version it opens, `repository`, and `budget` (everything in memory without one)."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Opens the chain; waves have as many requests as `max_batch_size` says."""
        config = json.loads(args["model_config"])
        given = {key: value["string_value"] for key, value in config.get("parameters", {}).items()}
        self._wave = max(int(config["max_batch_size"]), 1)
        tl.share_thread_pool()
        try:
            self._chain = tl.open_chain(
                given.get("chain", args["model_name"]),
                repository=given.get("repository", "engines"),
                budget=given.get("budget"),
                wave=self._wave,
            )
        except tl.LayeringError as error:
            raise pb_utils.TritonModelException(str(error)) from error

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """One response for each request, in order. Those that fit the model's inputs are answered in waves."""
        feeds = [{tensor.name(): tensor.as_numpy() for tensor in request.inputs()} for request in requests]
        answers = self._answers(feeds)
        return [_response(request, answer) for request, answer in zip(requests, answers, strict=True)]

    def finalize(self) -> None:
        """Ends the chain's threads and returns its memory."""
        self._chain.close()

    def _answers(self, feeds: Sequence[Mapping[str, Array]]) -> list[dict[str, Array] | tl.LayeringError]:
        """In waves; where a request does not fit, which is found before any work, each by itself."""
        try:
            return [*self._chain.run_many(feeds, wave=self._wave)]
        except tl.InputError:
            return [self._answer(one) for one in feeds]
        except tl.LayeringError as error:
            return [error] * len(feeds)

    def _answer(self, feeds: Mapping[str, Array]) -> dict[str, Array] | tl.LayeringError:
        try:
            return self._chain.run(feeds)
        except tl.LayeringError as error:
            return error


def _response(request: Any, answer: dict[str, Array] | tl.LayeringError) -> Any:
    """The outputs that were asked for, or the error."""
    if isinstance(answer, tl.LayeringError):
        return pb_utils.InferenceResponse(output_tensors=[], error=pb_utils.TritonError(str(answer), _code(answer)))
    wanted = request.requested_output_names()
    tensors = [pb_utils.Tensor(name, array) for name, array in answer.items() if name in wanted]
    return pb_utils.InferenceResponse(output_tensors=tensors)


def _code(error: tl.LayeringError) -> Any:
    """A client's mistake, something that may be gone the next time, or a fault."""
    if isinstance(error, tl.InputError):
        return pb_utils.TritonError.INVALID_ARG
    if isinstance(error, (tl.ReadError, tl.MemoryLimitError)):
        return pb_utils.TritonError.UNAVAILABLE
    return pb_utils.TritonError.INTERNAL
