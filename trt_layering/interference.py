"""What reading and executing do to each other: by how much each takes longer beside the other. For the process that
measures.

May import the runtime, the drive and the timing of blocks. Raises what opening, running and reading raise.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from trt_layering import backends
from trt_layering.inputs import Feeds
from trt_layering.runtime.chain import Chain as OpenChain
from trt_layering.store.manifest import Block, Chain, Value
from trt_layering.timing import open_at_floor, through

Read = Callable[[float], float]
_SAMPLES = (0.5, 1 / 6, 5 / 6)
_HELD_BYTES = 8 << 20
_SAMPLE_SECONDS = 0.1
_SLICES = 18
_ROUNDS = 2
_MOST = 1000.0


def slowdowns(
    folder: Path, chain: Chain, feeds: Feeds, execute: Sequence[float], read: Read, seconds: float
) -> tuple[float, float]:
    """How many times as long executing takes while the drive reads, and reading while blocks execute: the medians over
    blocks in which the chain, run on `feeds`, spends its time. `execute` is the seconds of each block; `read` reads for
    some seconds and returns the bytes per second. Takes about `seconds`."""
    pairs = []
    wanted = samples(chain.blocks, execute)[: 1 + int(seconds / _SAMPLE_SECONDS)]
    for block, inputs in _captured(folder, chain, feeds, wanted):
        with closing(open_at_floor(folder, _one_block(chain, block))) as opened:
            opened.start()
            execution = partial(_execution, opened, inputs)
            execution()
            pairs += [_disturbed(execution, read, seconds / _SLICES) for _ in range(_ROUNDS)]
    if not pairs:
        return 1.0, 1.0
    executing, reading = (statistics.median(ratios) for ratios in zip(*pairs, strict=True))
    return _slowdown(executing), _slowdown(reading)


def _slowdown(ratio: float) -> float:
    return min(max(ratio, 1.0), _MOST)


def samples(blocks: Sequence[Block], execute: Sequence[float]) -> list[int]:
    """Blocks that execute in the middle, early and late in a sweep, by its time, the middle first; none that gathers
    rows."""
    ends = list(itertools.accumulate(execute[: len(blocks)]))
    at = (next((i for i, end in enumerate(ends) if end >= share * ends[-1]), 0) for share in _SAMPLES)
    return [index for index in dict.fromkeys(at) if blocks[index].rows is None]


def _captured(folder: Path, chain: Chain, feeds: Feeds, wanted: Sequence[int]) -> list[tuple[Block, Feeds]]:
    """The blocks `wanted` with their inputs in one run on `feeds`: all of the first, of the others those that are no
    more than 8 MiB."""
    backend, found = backends.runtime(chain.backend.name), {}

    def keep(index: int, _: float, live: Mapping[str, Any]) -> None:
        if index + 1 in wanted:
            inputs = {value.name: backend.unwrap(live[value.name]) for value in chain.blocks[index + 1].inputs}
            if index + 1 == wanted[0] or sum(array.nbytes for array in inputs.values()) <= _HELD_BYTES:
                found[index + 1] = inputs

    if 0 in wanted:
        found[0] = {value.name: feeds[value.name] for value in chain.blocks[0].inputs}
    if any(wanted):
        with closing(open_at_floor(folder, through(chain, range(len(chain.blocks))))) as opened:
            opened.start()
            opened.observe(feeds, keep)
    return [(chain.blocks[index], inputs) for index, inputs in found.items()]


def _one_block(chain: Chain, block: Block) -> Chain:
    """A chain that is `block` alone, whose weights stay once they are read."""

    def of_any_shape(value: Value) -> Value:  # what a model declares of values inside it need not hold
        return msgspec.structs.replace(value, shape=None)

    alone = through(chain, ())
    inputs, outputs = tuple(map(of_any_shape, block.inputs)), tuple(map(of_any_shape, block.outputs))
    return msgspec.structs.replace(alone, blocks=(block,), inputs=inputs, outputs=outputs, optimised=False)


def _execution(opened: OpenChain, inputs: Feeds) -> float:
    """Seconds of one execution of a chain of one block."""
    found: list[float] = []
    opened.observe(inputs, lambda _index, took, _live: found.append(took))
    return found[0]


def _disturbed(execution: Callable[[], float], read: Read, seconds: float) -> tuple[float, float]:
    """By what factor executing takes longer, and reading, where both are done at once for `seconds` (or for an
    execution and a half) than each for as long alone."""
    alone, end = [execution()], time.perf_counter() + seconds
    while time.perf_counter() < end:
        alone.append(execution())
    undisturbed = statistics.median(alone)
    span = max(seconds, 1.5 * undisturbed)
    rate = read(span)
    with ThreadPoolExecutor(1) as pool:
        reading, both = pool.submit(read, span), []
        while not reading.done():
            both.append(execution())
        disturbed = statistics.median(both[:-1] or both or alone)  # the last one may have been alone
        return disturbed / max(undisturbed, 1e-9), rate / max(reading.result(), 1e-9)
