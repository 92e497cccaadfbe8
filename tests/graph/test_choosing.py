"""The choice among legal cuts is the best one, and keeps blocks within their size where that is possible at all."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import combinations, pairwise

import onnx_ir as ir
from hypothesis import given
from hypothesis import strategies as st

from trt_layering.graph.cuts import BLOCK_COST, Cut, choose_cuts

LIMIT = 10


def chain(weights: Sequence[Sequence[str]]) -> ir.Graph:
    """Nodes one after the other, each reading the value before it and the weights named."""
    kind, shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape([1])
    names = sorted({name for row in weights for name in row})
    tensor = ir.tensor([0.0], ir.DataType.FLOAT)
    initializers = {name: ir.Value(name=name, type=kind, shape=shape, const_value=tensor) for name in names}
    value = x = ir.Value(name="x", type=kind, shape=shape)
    nodes = []
    for row in weights:
        nodes.append(ir.node("Sum", [value, *(initializers[name] for name in row)]))
        value = nodes[-1].outputs[0]
    return ir.Graph([x], [value], nodes=nodes, initializers=list(initializers.values()), opset_imports={"": 17})


def fits(weights: Sequence[Sequence[str]], sizes: Mapping[str, int], runs: Sequence[tuple[int, int]]) -> bool:
    """Whether these uncuttable runs may be one block: within the limit, or only one of them has weights."""
    needed = [{name for row in weights[a:b] for name in row if sizes.get(name)} for a, b in runs]
    return sum(sizes[name] for name in set().union(*needed)) <= LIMIT or sum(map(bool, needed)) <= 1


@st.composite
def problems(draw: st.DrawFn) -> tuple[list[list[str]], dict[str, int], list[Cut]]:
    names = [f"w{i}" for i in range(8)]
    weights = draw(st.lists(st.lists(st.sampled_from(names), max_size=2, unique=True), min_size=1, max_size=9))
    sizes = {name: draw(st.integers(0, 14)) for name in names if draw(st.integers(0, 5))}
    positions = draw(st.sets(st.integers(1, max(1, len(weights) - 1)))) if len(weights) > 1 else set()
    cuts = [Cut(p, (), draw(st.integers(0, 4)) * BLOCK_COST // 2) for p in sorted(positions)]
    return weights, sizes, cuts


@given(problems(), st.data())
def test_the_choice_is_the_best_of_all(
    problem: tuple[list[list[str]], dict[str, int], list[Cut]], data: st.DataObject
) -> None:
    weights, sizes, cuts = problem
    required = {cut.position for cut in cuts if data.draw(st.booleans())}
    width = {cut.position: cut.width_bytes for cut in cuts}
    runs = list(pairwise([0, *width, len(weights)]))

    def cost(chosen: Sequence[int]) -> int:
        return sum(width[p] for p in chosen) + BLOCK_COST * (len(chosen) + 1)

    def possible(chosen: Sequence[int]) -> bool:
        blocks = pairwise([0, *chosen, len(weights)])
        return all(fits(weights, sizes, [(a, b) for a, b in runs if begin <= a and b <= end]) for begin, end in blocks)

    every = (chosen for k in range(len(width) + 1) for chosen in combinations(sorted(width), k))
    best = min(cost(chosen) for chosen in every if possible(chosen) and required <= {*chosen})
    got = choose_cuts(chain(weights), cuts, LIMIT, sizes, required)
    assert got == sorted(got)
    assert required <= {*got}
    assert possible(got)
    assert cost(got) == best


def test_a_tied_weight_counts_once() -> None:
    graph = chain([["w"], ["w"], ["w"], ["v"]])
    cuts = [Cut(p, (), 0) for p in (1, 2, 3)]
    assert choose_cuts(graph, cuts, 10, {"w": 10, "v": 1}) == [3]


def test_a_weight_that_is_too_large_takes_the_weightless_nodes_around_it_along() -> None:
    graph = chain([["a"], [], ["huge"], [], [], ["b"]])
    cuts = [Cut(p, (), p) for p in range(1, 6)]
    assert choose_cuts(graph, cuts, 10, {"a": 5, "huge": 100, "b": 5}) == [1, 3]


def test_narrow_cuts_are_preferred_to_wide_ones() -> None:
    graph = chain([["a"], [], [], ["b"]])
    cuts = [Cut(1, (), 3 << 20), Cut(2, (), 1 << 10), Cut(3, (), 2 << 20)]
    assert choose_cuts(graph, cuts, 10, {"a": 6, "b": 6}) == [2]


def test_five_thousand_nodes_with_one_huge_window_take_linear_time() -> None:
    graph = chain([[f"w{i}"] for i in range(5000)])
    cuts = [Cut(p, (), p % 7) for p in range(1, 5000)]
    sizes = {f"w{i}": 1 for i in range(5000)}
    start = time.process_time()
    assert choose_cuts(graph, cuts, 10_000, sizes) == []
    assert len(choose_cuts(graph, cuts, 1_000, sizes)) == 4
    assert time.process_time() - start < 2  # 0.1 s here
