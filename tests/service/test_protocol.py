"""Inference as `tritonclient` asks for it: what its own objects write is read, and what is answered they read."""

from __future__ import annotations

import gzip
import json
import zlib
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tritonclient import http
from tritonclient.utils import np_to_triton_dtype, triton_to_np_dtype

from trt_layering.errors import ModelError
from trt_layering.service.body import ALIGNMENT, HEADER_LENGTH, Body
from trt_layering.service.datatypes import DATATYPES
from trt_layering.service.encoding import accepted, compressed, inflated
from trt_layering.service.protocol import (
    Answer,
    InferRequest,
    WantedOutput,
    infer_answer,
    parse_infer,
    wanted_outputs,
)
from trt_layering.service.refusals import Limits, ProtocolError, error_body
from trt_layering.store.manifest import Value

LIMITS = Limits()
NUMBERS = [one for one in DATATYPES.values() if one.nbytes]
SHAPES = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
ENCODINGS = st.sampled_from([None, "gzip", "deflate"])
BUFFERS = st.sampled_from([bytes, bytearray, memoryview])


@st.composite
def arrays(draw: st.DrawFn) -> tuple[str, np.ndarray[Any, Any]]:
    """A datatype, and an array of it with any bits that its form can hold."""
    datatype = draw(st.sampled_from(list(DATATYPES.values())))
    shape = draw(SHAPES)
    if not datatype.nbytes:
        return datatype.name, draw(hnp.arrays(object, shape, elements=TEXTS, fill=st.just("é")))
    if datatype.name == "BF16":
        return "BF16", draw(hnp.arrays(np.uint16, shape)).view(ml_dtypes.bfloat16)
    return datatype.name, draw(hnp.arrays(datatype.dtype, shape))


def in_json(array: np.ndarray[Any, Any]) -> bool:
    """Whether JSON can say it."""
    if array.dtype in (np.float16, ml_dtypes.bfloat16):
        return False
    return array.dtype.kind != "f" or bool(np.isfinite(array).all())


def ask(tensors: dict[str, tuple[str, np.ndarray[Any, Any], bool]], **options: Any) -> tuple[bytes, dict[str, str]]:
    """The body and headers that the client sends."""
    inputs = []
    for name, (datatype, array, binary) in tensors.items():
        one = http.InferInput(name, list(array.shape), datatype)
        inputs.append(one.set_data_from_numpy(array, binary_data=binary))
    body, size = http.InferenceServerClient.generate_request_body(inputs, **options)
    return body, {} if size is None else {HEADER_LENGTH: str(size)}


def read(answer: Answer) -> Any:
    """The answer as the client reads it."""
    size = answer.headers.get(HEADER_LENGTH)
    return http.InferenceServerClient.parse_response_body(
        answer.body,
        header_length=None if size is None else int(size),
        content_encoding=answer.headers.get("content-encoding"),
    )


def assert_same(found: np.ndarray[Any, Any], wanted: np.ndarray[Any, Any]) -> None:
    """Bit for bit, texts as texts."""
    assert found.shape == wanted.shape
    assert found.dtype == wanted.dtype
    assert found.flags.c_contiguous
    assert found.flags.aligned
    if wanted.dtype == object:
        assert found.tolist() == wanted.tolist()
    else:
        assert found.tobytes() == wanted.tobytes()


def asked(name: str, binary: bool) -> InferRequest:
    return InferRequest("", {}, (WantedOutput(name, binary),), binary, None, None, {})


@given(st.lists(st.tuples(arrays(), st.booleans()), min_size=1, max_size=4), ENCODINGS, BUFFERS)
def test_what_the_client_asks_is_read(given_arrays, encoding, buffer):
    tensors = {
        f"x{n}": (name, array, binary or not in_json(array)) for n, ((name, array), binary) in enumerate(given_arrays)
    }
    body, headers = ask(tensors, request_id="one")
    if encoding:
        body, headers = compressed(body, encoding), {**headers, "content-encoding": encoding}
    request = parse_infer(buffer(body), headers, LIMITS)
    assert request.id == "one"
    assert list(request.feeds) == list(tensors)
    for name, (_, array, _) in tensors.items():
        assert_same(request.feeds[name], array)


@given(st.lists(st.tuples(arrays(), st.booleans()), min_size=1, max_size=4), ENCODINGS)
def test_what_is_answered_the_client_reads(given_arrays, encoding):
    results = {f"y{n}": array for n, ((_, array), _) in enumerate(given_arrays)}
    wanted = [
        WantedOutput(f"y{n}", binary or not in_json(array)) for n, ((_, array), binary) in enumerate(given_arrays)
    ]
    request = InferRequest("seven", {}, (), True, None, None, {})
    answer = infer_answer(request, wanted, results, "model", 3, encoding)
    found = read(answer)
    response = found.get_response()
    assert (response["id"], response["model_name"], response["model_version"]) == ("seven", "model", "3")
    for n, ((datatype, array), _) in enumerate(given_arrays):
        assert found.get_output(f"y{n}")["datatype"] == datatype
        back = found.as_numpy(f"y{n}")
        if datatype == "BYTES":
            texts = [one.decode() if isinstance(one, bytes) else one for one in back.flat]
            assert texts == list(array.flat)
            assert back.shape == array.shape
        else:
            assert_same(np.ascontiguousarray(back).reshape(array.shape), array)


@given(arrays())
def test_nested_data_is_the_same_as_flat(named):
    datatype, array = named
    if not in_json(array) or array.ndim == 0:
        return
    tensor = {"name": "x", "datatype": datatype, "shape": array.shape, "data": array.tolist()}
    request = parse_infer(json.dumps({"inputs": [tensor]}).encode(), {}, LIMITS)
    assert_same(request.feeds["x"], array)


@pytest.mark.parametrize("datatype", NUMBERS, ids=lambda one: one.name)
def test_the_bounds_of_each_datatype_fit(datatype):
    if not datatype.in_json or datatype.name == "BOOL":
        return
    bounds = np.iinfo(datatype.dtype) if datatype.dtype.kind in "iu" else np.finfo(datatype.dtype)
    array = np.array([bounds.min, bounds.max], datatype.dtype)
    body, headers = ask({"x": (datatype.name, array, False)})
    assert_same(parse_infer(body, headers, LIMITS).feeds["x"], array)


class TestMemory:
    ARRAY = np.arange(12, dtype=np.float64).reshape(3, 4)

    @pytest.mark.parametrize("name", ["x" * n for n in range(1, 9)])
    def test_a_body_that_arrived_here_is_not_copied(self, name):
        body, headers = ask({name: ("FP64", self.ARRAY, True)})
        whole = Body({**headers, "content-length": str(len(body))}, LIMITS)
        for start in range(0, len(body), 7):
            whole.add(body[start : start + 7])
        place = whole.finish()
        found = parse_infer(place, headers, LIMITS).feeds[name]
        assert_same(found, self.ARRAY)
        assert np.shares_memory(found, np.frombuffer(place, np.uint8))
        assert found.__array_interface__["data"][0] % ALIGNMENT == 0

    def test_at_an_odd_address_it_is_copied(self):
        body, headers = ask({"x": ("FP64", self.ARRAY, True)})
        shared = set()
        for shift in range(8):
            place = memoryview(bytearray(shift) + body)[shift:]
            found = parse_infer(place, headers, LIMITS).feeds["x"]
            assert_same(found, self.ARRAY)
            shared.add(bool(np.shares_memory(found, np.frombuffer(place, np.uint8))))
        assert shared == {True, False}

    def test_an_answer_does_not_share_the_results(self):
        results = {"y": self.ARRAY.copy()}
        answer = infer_answer(asked("y", True), [WantedOutput("y", True)], results, "m", 1)
        results["y"][:] = 0
        assert_same(read(answer).as_numpy("y"), self.ARRAY)

    def test_results_need_not_be_contiguous(self):
        for binary in (True, False):
            answer = infer_answer(asked("y", binary), [WantedOutput("y", binary)], {"y": self.ARRAY.T}, "m", 1)
            assert_same(np.ascontiguousarray(read(answer).as_numpy("y")), np.ascontiguousarray(self.ARRAY.T))


class TestBody:
    def test_without_an_announced_length(self):
        whole = Body({}, LIMITS)
        for piece in (b"a", b"", b"bc"):
            whole.add(piece)
        assert whole.finish() == b"abc"

    def test_half_of_it(self):
        whole = Body({"content-length": "4"}, LIMITS)
        whole.add(b"abc")
        with pytest.raises(ProtocolError, match="3 bytes of 4 came") as caught:
            whole.finish()
        assert caught.value.status == 400

    def test_more_than_announced(self):
        whole = Body({"content-length": "4"}, LIMITS)
        with pytest.raises(ProtocolError, match="more than the 4 bytes"):
            whole.add(b"abcde")

    def test_more_than_allowed(self):
        with pytest.raises(ProtocolError, match="a body of 5 bytes, where 4") as caught:
            Body({"content-length": "5"}, Limits(max_body=4))
        assert caught.value.status == 413
        whole = Body({}, Limits(max_body=4))
        whole.add(b"abcd")
        with pytest.raises(ProtocolError, match="more than 4 bytes"):
            whole.add(b"e")
        with pytest.raises(ProtocolError, match="a body of 5 bytes"):
            parse_infer(b"abcde", {}, Limits(max_body=4))

    @pytest.mark.parametrize("name", ["content-length", HEADER_LENGTH])
    @pytest.mark.parametrize("text", ["", "-1", "1.0", " 1", "1_0", "٣", "9" * 19])
    def test_a_length_that_is_none(self, name, text):
        with pytest.raises(ProtocolError, match="no length"):
            Body({name: text}, LIMITS)


class TestEncoding:
    @given(st.binary(max_size=2000), st.sampled_from(["gzip", "deflate"]))
    def test_there_and_back(self, body, encoding):
        assert inflated(compressed(body, encoding), encoding, len(body)) == body

    @pytest.mark.parametrize("size", [0, 1, 65536, 262143, 262144, 262145, 1 << 20])
    def test_sizes_around_a_step(self, size):
        body = np.random.default_rng(size).bytes(size // 2) + bytes(size - size // 2)
        for made in (gzip.compress(body), gzip.compress(body, 0)):
            assert inflated(made, "gzip", size) == body
        assert inflated(zlib.compress(body), "deflate", size) == body
        if size:
            with pytest.raises(ProtocolError, match="inflates to more"):
                inflated(gzip.compress(body), "gzip", size - 1)

    @pytest.mark.parametrize(
        ("header", "wanted"),
        [
            (None, None), ("", None), ("br", None), ("*", None), ("identity", None), ("gzip", "gzip"),
            ("deflate", "deflate"), ("GZIP", "gzip"), ("gzip, deflate, br", "gzip"), ("deflate, gzip", "deflate"),
            ("gzip;q=0.5, deflate;q=0.8", "deflate"), ("gzip;q=0", None), ("identity, gzip;q=0.5", None),
            ("gzip;q=nonsense", None), (",,;q=1,gzip ; q=1.0", "gzip"), (", " * 9999 + "gzip", None),
        ],
    )  # fmt: skip
    def test_what_is_accepted(self, header, wanted):
        assert accepted(header) == wanted

    def test_little_is_not_compressed(self):
        small = infer_answer(asked("y", True), [WantedOutput("y", True)], {"y": np.zeros(4, "f4")}, "m", 1, "gzip")
        large = infer_answer(asked("y", True), [WantedOutput("y", True)], {"y": np.zeros(4000, "f4")}, "m", 1, "gzip")
        assert "content-encoding" not in small.headers
        assert large.headers["content-encoding"] == "gzip"
        assert len(large.body) < 1000


def value(name: str, dtype: str = "float32") -> Value:
    return Value(name=name, dtype=dtype, shape=(1,))


ONE = {"x": ("FP32", np.zeros(1, np.float32), True)}


class TestOutputs:
    MODEL = (value("a"), value("b", "float16"), value("c", "string"))

    def wanted(self, *outputs: Any, **options: Any) -> tuple[WantedOutput, ...]:
        body, headers = ask(ONE, outputs=list(outputs), **options)
        return wanted_outputs(parse_infer(body, headers, LIMITS), self.MODEL)

    def test_all_in_binary_where_none_are_named(self):
        assert self.wanted() == tuple(WantedOutput(name, True) for name in "abc")

    def test_those_named_each_in_its_form(self):
        outputs = http.InferRequestedOutput("c", binary_data=False), http.InferRequestedOutput("b")
        assert self.wanted(*outputs) == (WantedOutput("c", False), WantedOutput("b", True))

    def test_json_where_nothing_is_said(self):
        tensor = {"name": "x", "shape": [1], "datatype": "FP32", "data": [1]}
        request = parse_infer(json.dumps({"inputs": [tensor]}).encode(), {}, LIMITS)
        assert wanted_outputs(request, self.MODEL[:1]) == (WantedOutput("a", False),)
        with pytest.raises(ProtocolError, match="float16 has no form in JSON"):
            wanted_outputs(request, self.MODEL)

    def test_one_that_the_model_has_not(self):
        with pytest.raises(ProtocolError, match="no output 'd'"):
            self.wanted(http.InferRequestedOutput("d"))

    def test_one_that_the_protocol_has_not(self):
        with pytest.raises(ModelError, match="no datatype for complex64"):
            infer_answer(asked("y", True), [WantedOutput("y", True)], {"y": np.zeros(1, "c8")}, "m", 1)

    @pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
    def test_what_json_cannot_say(self, number):
        results = {"y": np.array([1, number], np.float32)}
        with pytest.raises(ProtocolError, match="ask for this output in binary"):
            infer_answer(asked("y", False), [WantedOutput("y", False)], results, "m", 1)
        answer = infer_answer(asked("y", True), [WantedOutput("y", True)], results, "m", 1)
        assert_same(read(answer).as_numpy("y"), results["y"])


def test_what_a_request_says_beside_its_tensors():
    options = {"request_id": "é", "priority": 2, "timeout": 1500, "parameters": {"mine": "yes", "much": 1.5}}
    body, headers = ask(ONE, **options)
    request = parse_infer(body, headers, LIMITS)
    assert (request.id, request.priority, request.timeout) == ("é", 2, 0.0015)
    assert request.parameters == {"mine": "yes", "much": 1.5}
    plain = parse_infer(*ask(ONE), LIMITS)
    assert (plain.id, plain.priority, plain.timeout, plain.binary, dict(plain.parameters)) == ("", None, None, True, {})


def test_each_datatype_is_the_clients():
    for name, datatype in DATATYPES.items():
        assert np.dtype(triton_to_np_dtype(name)) == datatype.dtype
        assert np_to_triton_dtype(datatype.dtype) == name


def test_an_error_is_one_line_that_the_client_shows():
    error = ProtocolError("malformed", "what\x1b[2J", where="wh\nere", remedy="this")
    assert json.loads(error_body(error)) == {"error": "what\\x1b[2J; where: wh; ere; to do: this"}
