"""Loads and calls a model as Triton's Python backend does: config.pbtxt read by NVIDIA's own schema and handed over as
JSON, requests checked against it and passed on together."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

STAND_IN = Path(__file__).parent / "stand_in" / "triton_python_backend_utils.py"
Array = np.ndarray[Any, Any]


def module(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def read_config(path: Path) -> dict[str, Any]:
    """config.pbtxt as the dict that Triton makes of it; skips where NVIDIA's client is not installed."""
    client = pytest.importorskip("tritonclient")
    from google.protobuf import json_format, text_format

    schema = module(Path(client.__path__[0]) / "grpc" / "model_config_pb2.py", "triton_model_config")
    config = text_format.Parse(path.read_text(encoding="utf-8"), schema.ModelConfig())
    found: dict[str, Any] = json_format.MessageToDict(config, preserving_proto_field_name=True)
    found.setdefault("max_batch_size", 0)
    return found


class Served:
    """One model of a repository, loaded."""

    def __init__(self, folder: Path) -> None:
        self.config = read_config(folder / "config.pbtxt")
        assert self.config["name"] == folder.name
        self.utils = module(STAND_IN, "triton_python_backend_utils")
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "triton_python_backend_utils", self.utils)
            self.code = module(folder / "1" / "model.py", "model")
        self.model = self.code.TritonPythonModel()
        self.model.initialize(
            {
                "model_config": json.dumps(self.config), "model_instance_kind": "CPU",
                "model_instance_name": f"{folder.name}_0", "model_instance_device_id": "0",
                "model_repository": str(folder), "model_version": "1", "model_name": folder.name,
            }
        )  # fmt: skip

    def execute(self, requests: Sequence[Mapping[str, Array]], wanted: Sequence[str] | None = None) -> list[Any]:
        """The responses to requests that came together, which must be as many as the configuration allows."""
        assert len(requests) <= max(self.config["max_batch_size"], 1)
        names = [value["name"] for value in self.config["output"]]
        asked = [
            self.utils.InferenceRequest(
                inputs=[self.utils.Tensor(name, array) for name, array in feeds.items()],
                requested_output_names=names if wanted is None else wanted,
            )
            for feeds in requests
        ]
        responses = self.model.execute(asked)
        assert isinstance(responses, list)
        assert len(responses) == len(requests)
        assert all(isinstance(response, self.utils.InferenceResponse) for response in responses)
        return responses

    def fits(self, kind: str, name: str, array: Array) -> bool:
        """Whether Triton would pass this tensor on."""
        [value] = [value for value in self.config[kind] if value["name"] == name]
        dims = [int(dim) for dim in value["dims"]]
        if "reshape" in value:
            dims = [int(dim) for dim in value["reshape"].get("shape", [])]
        shape = array.shape[1:] if self.config["max_batch_size"] else array.shape
        return len(dims) == len(shape) and all(dim in (-1, size) for dim, size in zip(dims, shape, strict=True))

    def finalize(self) -> None:
        self.model.finalize()
