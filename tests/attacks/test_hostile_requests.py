"""Requests made to do harm: each is refused in words, and takes little memory."""

from __future__ import annotations

import gzip
import json
import random
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from tests.attacks import hostile_requests
from tests.attacks.hostile_requests import BINARY, EIGHT, GOOD, REQUESTS, Hostile, binary, one, raw, tensor, text
from trt_layering.service.body import HEADER_LENGTH
from trt_layering.service.protocol import parse_infer
from trt_layering.service.refusals import STATUS, Limits, ProtocolError

LIMITS = Limits()
SMALL = Limits(max_body=1 << 16, max_tensors=8, max_elements=1 << 14, max_objects=1 << 12)
MIB = 1 << 20


@contextmanager
def takes_at_most(nbytes: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < nbytes


@pytest.mark.parametrize("name", REQUESTS)
def test_it_is_refused_in_words(name):
    hostile = REQUESTS[name]
    with pytest.raises(ProtocolError) as caught:
        parse_infer(hostile.body, hostile.headers, LIMITS)
    error = caught.value
    assert error.kind == hostile.kind
    assert error.status == STATUS[hostile.kind]
    assert hostile.word in error.what + error.where
    assert error.where
    assert error.remedy
    assert len(str(error)) < 1000
    assert str(error).replace("\n", "").isprintable()


def test_what_the_corpus_was_made_from_is_not_refused():
    assert parse_infer(GOOD, {}, LIMITS).feeds["x"].tolist() == [1.5, 2.5]
    body, headers = binary(np.array([1.5, 2.5], np.float32).tobytes())
    assert parse_infer(body, headers, LIMITS).feeds["x"].tolist() == [1.5, 2.5]
    zipped = parse_infer(hostile_requests.ZIPPED, {"content-encoding": "gzip"}, LIMITS)
    assert zipped.feeds["x"].tolist() == [1.5, 2.5]


@pytest.mark.parametrize("content", [bytes(8 * MIB), b"[" * 8 * MIB, b'"' * 8 * MIB])
def test_a_bomb_takes_no_more_than_the_limit(content):
    limits = Limits(max_body=MIB)
    with takes_at_most(3 * MIB), pytest.raises(ProtocolError, match="inflates to more than"):
        parse_infer(gzip.compress(content), {"content-encoding": "gzip"}, limits)


@pytest.mark.parametrize(
    "body",
    [
        raw("[" * (2 * MIB)),
        raw('"' * (2 * MIB)),
        raw("[" * 64 + '"' + "\\" * (2 * MIB)),
        raw("[" * 64 + '"' + '\\"' * MIB),
        raw("[" + "[]," * (700 << 10)),
        raw("[" + "1," * MIB + "1]"),
        raw("[" + "1 " * MIB + "1]"),
        raw("9" * (2 * MIB)),
        b'{"inputs":[' + b"{}," * (700 << 10),
        b'{"parameters":{' + b'"":1,' * (400 << 10),
        b" " * (2 * MIB),
    ],
)
def test_two_megabytes_of_json_take_little_memory(body):
    with takes_at_most(16 * MIB), pytest.raises(ProtocolError):
        parse_infer(body, {}, Limits(max_objects=1 << 16))


@pytest.mark.parametrize("deep", [1, 47, 48])
def test_depth_is_of_what_is_no_text(deep):
    limits = Limits(max_json_depth=deep + 4)
    inner = "[" * deep + '"[[\\"[[\\\\"' + "]" * deep
    body = raw('["' + "[{" * 100 + '", "b"]', "BYTES")[:-1] + f', "more": {inner}}}'.encode()
    assert parse_infer(body, {}, limits).feeds["x"].tolist() == ["[{" * 100, "b"]
    with pytest.raises(ProtocolError, match="deeper"):
        parse_infer(body, {}, Limits(max_json_depth=min(deep, 3)))


def test_texts_across_pieces_of_the_depth_check():
    long = "[" * (3 * MIB // 2)
    assert parse_infer(raw(f'["{long}", "{long}"]', "BYTES"), {}, LIMITS).feeds["x"][1] == long


class TestFuzzed:
    """Seeded: valid requests with bytes changed, random bytes, and values of all sorts in all places."""

    ROUNDS = 2000

    def seeds(self) -> list[tuple[bytes, dict[str, str]]]:
        texts = b"\x01\x00\x00\x00a\x00\x00\x00\x00"
        return [
            (GOOD, {}),
            (text(tensor(), tensor(name="y", shape=[2, 1], data=[[1], [2]]), id="7", outputs=[{"name": "z"}]), {}),
            (one(datatype="BYTES", data=["a", "\u00e9"]), {}),
            binary(EIGHT),
            binary(texts, datatype="BYTES"),
            binary(b"\x00\x01", datatype="BOOL"),
            (hostile_requests.ZIPPED, {"content-encoding": "gzip"}),
            *((hostile.body, dict(hostile.headers)) for hostile in BINARY.values()),
        ]

    def judge(self, body: bytes, headers: dict[str, str]) -> bool:
        """Whether it was taken; then it must hold together."""
        try:
            request = parse_infer(body, headers, SMALL)
        except ProtocolError:
            return False
        assert sum(array.size for array in request.feeds.values()) <= SMALL.max_elements * SMALL.max_tensors
        assert all(isinstance(each, str) for one in request.feeds.values() if one.dtype == object for each in one.flat)
        return True

    @pytest.mark.parametrize("seed", range(3))
    def test_changed_bytes(self, seed):
        chance, seeds = random.Random(seed), self.seeds()
        with takes_at_most(8 * MIB):
            taken = sum(self.judge(*self.mutated(chance, *chance.choice(seeds))) for _ in range(self.ROUNDS))
        assert 0 < taken < self.ROUNDS

    def mutated(self, chance: random.Random, body: bytes, headers: dict[str, str]) -> tuple[bytes, dict[str, str]]:
        changed = bytearray(body)
        for _ in range(chance.randint(1, 4)):
            self.MUTATIONS[chance.randrange(len(self.MUTATIONS))](chance, changed)
        if HEADER_LENGTH in headers and chance.random() < 0.3:
            headers = {**headers, HEADER_LENGTH: str(chance.randint(-1, 2 * len(body)))}
        return bytes(changed), headers

    MUTATIONS: tuple[Callable[[random.Random, bytearray], object], ...] = (
        lambda chance, body: body.__setitem__(slice(chance.randrange(len(body) + 1), None), b""),
        lambda chance, body: body and body.__setitem__(chance.randrange(len(body)), chance.randrange(256)),
        lambda chance, body: body.insert(chance.randrange(len(body) + 1), chance.choice(b'[]{},:"\\0123456789-.eE ')),
        lambda chance, body: body and body.pop(chance.randrange(len(body))),
        lambda chance, body: body.extend(chance.randbytes(chance.randrange(16))),
        lambda chance, body: body.__setitem__(slice(0, chance.randrange(8)), chance.randbytes(chance.randrange(8))),
    )

    def test_random_bytes(self):
        chance = random.Random(3)
        encodings = [{}, {"content-encoding": "gzip"}, {"content-encoding": "deflate"}, {HEADER_LENGTH: "16"}]
        with takes_at_most(8 * MIB):
            for _ in range(self.ROUNDS):
                start = chance.choice((b"", b"\x1f\x8b\x08\x00", b"\x78\x9c", b'{"inputs":['))
                assert not self.judge(start + chance.randbytes(chance.randrange(200)), chance.choice(encodings))

    @pytest.mark.parametrize("seed", range(3))
    def test_structured_garbage(self, seed):
        chance = random.Random(seed)
        with takes_at_most(8 * MIB):
            taken = sum(self.judge(*self.garbage(chance)) for _ in range(self.ROUNDS))
        assert 0 < taken < self.ROUNDS

    def garbage(self, chance: random.Random) -> tuple[bytes, dict[str, str]]:
        request = {"inputs": [tensor()], "outputs": [{"name": "y", "parameters": {}}], "parameters": {}, "id": ""}
        for _ in range(chance.randint(1, 3)):
            target = chance.choice((request, request["inputs"][0], request["outputs"][0], request["parameters"]))
            key = chance.choice((*tensor(), *request, "binary_data_size", "binary_data_output", "timeout", "priority"))
            if isinstance(target, dict):
                target[key] = self.value(chance, 3)
                if not all(isinstance(request.get(name), list) and request[name] for name in ("inputs", "outputs")):
                    break
        body = json.dumps(request).encode()
        return body + chance.randbytes(chance.choice((0, 0, 8))), chance.choice(({}, {HEADER_LENGTH: str(len(body))}))

    def value(self, chance: random.Random, depth: int) -> object:
        simple = (
            None,
            True,
            0,
            1,
            2,
            -1,
            1.5,
            1e39,
            2**31,
            2**63,
            2**64,
            10**40,
            float("nan"),
            "",
            "x",
            "BYTES",
            "UINT64",
        )
        if depth == 0 or chance.random() < 0.6:
            return chance.choice((*simple, "INT8", "BOOL", "FP16", "FP64", "\u0000", "\U0001f600"))
        parts = [self.value(chance, depth - 1) for _ in range(chance.randrange(4))]
        return parts if chance.random() < 0.7 else {str(key): part for key, part in enumerate(parts)}


def test_every_kind_of_refusal_is_in_the_corpus():
    assert {hostile.kind for hostile in REQUESTS.values()} == set(STATUS)
    assert all(isinstance(hostile, Hostile) for hostile in REQUESTS.values())
