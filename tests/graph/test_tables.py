"""Which weights are tables of rows, and how the graph is ordered and cut for them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import helper, numpy_helper, parser

from tests.graph.execution import cut, run, run_chain
from trt_layering.graph import tables
from trt_layering.graph.cuts import choose_cuts, find_cuts
from trt_layering.graph.model import infer_shapes, normalise
from trt_layering.graph.tables import bring_forward, find_tables, rows_input, seams

ROWS, WIDTH = 20, 16


@pytest.fixture(autouse=True, scope="module")
def small_tables() -> Iterator[None]:
    """Tables of a KiB are tables, and weights of a KiB are heavy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tables, "TABLE_FROM", 1024)
        patch.setattr(tables, "_HEAVY_FROM", 1024)
        yield


def model(body: str, *, more: str = "", ends: str = "(int64[a, b] i) => (float y)") -> ir.Model:
    """A typed model of the nodes of `body` over the table `t` and `more` weights, all seeded."""
    weights = f"float[{ROWS},{WIDTH}] t" + (f", {more}" if more else "")
    proto = parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> g {ends} <{weights}> {{ {body} }}')
    rng = np.random.default_rng(0)
    for declared in proto.graph.value_info:
        kind = declared.type.tensor_type
        shape = [dim.dim_value for dim in kind.shape.dim]
        array = rng.integers(-3, 4, shape).astype(helper.tensor_dtype_to_np_dtype(kind.elem_type))
        proto.graph.initializer.append(numpy_helper.from_array(array, declared.name))
    del proto.graph.value_info[:]
    made = ir.from_proto(proto)
    normalise(made)
    infer_shapes(made)
    return made


def gathers_alone(graph: ir.Graph) -> list[int]:
    """Positions of the nodes that required seams make blocks of their own."""
    legal = find_cuts(graph)
    bounds = [0, *choose_cuts(graph, legal, 1 << 30, {}, seams(graph, [cut.position for cut in legal])), len(graph)]
    return [begin for begin, end in pairwise(bounds) if end - begin == 1 and graph[begin].op_type == "Gather"]


@pytest.mark.parametrize(
    "body",
    [
        "y = Gather (t, i)",
        "y = Gather <axis = -2> (t, i)",
        "j = Add (i, i) y = Gather (t, j)",
        "j = Cast <to = 6> (i) y = Gather (t, j)",
        "u = Gather (t, i) j = Neg (i) v = Gather (t, j) y = Add (u, v)",
    ],
)
def test_tables_of_rows(body: str) -> None:
    made = model(body)
    assert find_tables(made.graph) == {"t"}
    assert len(gathers_alone(made.graph)) == body.count("Gather")


@pytest.mark.parametrize(
    ("body", "more"),
    [
        ("y = Gather <axis = 1> (t, i)", ""),
        ("u = Gather (t, i) k = ReduceMax (t) y = Add (u, k)", ""),
        ("s = Transpose (t) y = Gather (s, i)", ""),
        ("k = ReduceMax <keepdims = 0> (i) y = Gather (t, k)", ""),  # a scalar, which no seam can part
        ("y = Gather (u, i)", f"float[{ROWS},4] u"),  # 320 bytes
        ("y = Gather (u, i)", "float[1000] u"),  # rows of four bytes
        ("y = Gather (t, k)", "int64[3] k"),  # always the same rows
        ("u = Gather (t, i) v = Gather (t, k) y = Add (u, v)", "int64[2] k"),
        (
            "c = ReduceMax <keepdims = 0> (i) d = Cast <to = 9> (c) "
            "y = If (d) <then_branch = q () => (float u) { u = Gather (t, i) },"
            " else_branch = r () => (float v) { v = Gather (t, i) }>",
            "",
        ),
    ],
)
def test_other_weights(body: str, more: str) -> None:
    made = model(body, more=more)
    assert not find_tables(made.graph)
    assert not seams(made.graph, [cut.position for cut in find_cuts(made.graph)])


def test_a_table_that_is_put_out_is_no_table() -> None:
    assert not find_tables(model("y = Gather (t, i)", ends="(int64[a, b] i) => (float y, float t)").graph)


def test_gathers_come_first_with_what_their_indices_need() -> None:
    made = model("a = Cast <to = 1> (i) b = Tanh (a) c = ReduceMean (b) j = Neg (i) u = Gather (t, j) y = Add (u, c)")
    bring_forward(made.graph)
    assert [node.op_type for node in made.graph] == ["Neg", "Gather", "Cast", "Tanh", "ReduceMean", "Add"]
    assert gathers_alone(made.graph) == [1]


def test_a_gather_whose_indices_take_a_layer_stays_behind_it() -> None:
    made = model(
        "a = Cast <to = 1> (i) b = Sin (a) c = MatMul (b, w) j = Cast <to = 7> (c) u = Gather (t, j) y = Tanh (u)",
        more="float[16, 16] w", ends="(int64[a, 16] i) => (float y)",
    )  # fmt: skip
    before = [node.op_type for node in made.graph]
    bring_forward(made.graph)
    assert [node.op_type for node in made.graph] == before
    assert gathers_alone(made.graph) == [4]


def test_only_a_block_that_gathers_has_rows() -> None:
    made = model("j = Neg (i) u = Gather (t, j) y = Tanh (u)")
    blocks = cut(made, [1, 2])
    assert [rows_input(block.graph) for block in blocks] == [None, "j", None]
    assert rows_input(made.graph) is None


@given(st.lists(st.sampled_from(["Neg", "Abs", "Gather", "Tanh", "Index"]), min_size=1, max_size=8), st.data())
def test_the_order_stays_sound_and_each_gather_is_a_block(kinds: list[str], data: st.DataObject) -> None:
    """Any graph of indices and of floats, which also make indices again."""
    integers, floats, lines = ["i"], ["z"], ["z = Cast <to = 1> (i)"]
    for number, kind in enumerate(kinds):
        name = f"n{number}"
        index, value = data.draw(st.sampled_from(integers)), data.draw(st.sampled_from(floats))
        if kind in ("Neg", "Abs"):
            lines.append(f"{name} = {kind} ({index})")
            integers.append(name)
        elif kind == "Index":
            lines.append(f"{name}f = ReduceMax <axes = [-1]> ({value}) {name} = Cast <to = 7> ({name}f)")
            integers.append(name)
        else:
            lines.append(f"{name} = Gather (t, {index})" if kind == "Gather" else f"{name} = Tanh ({value})")
            floats.append(name)
    made = model(" ".join([*lines, f"y = ReduceSum ({floats[-1]}) x = Neg ({integers[-1]})"]),
                 ends="(int64[a, b] i) => (float y, int64 x)")  # fmt: skip
    feeds = {"i": np.array([[1, 2, 0]])}
    wanted = run(made, feeds)
    bring_forward(made.graph)
    legal = find_cuts(made.graph)
    positions = choose_cuts(made.graph, legal, 1 << 30, {}, seams(made.graph, [cut.position for cut in legal]))
    blocks = cut(made, positions)
    got = run_chain(blocks, feeds)
    for name, array in wanted.items():
        assert got[name].tobytes() == array.tobytes()
    alive = sum(node.op_type == "Gather" for node in made.graph)
    assert sum(rows_input(block.graph) is not None for block in blocks) == alive
    assert alive or not positions
