"""Who makes and who reads each value of a graph: the one analysis under cutting and extracting.

May import onnx_ir and errors. A graph that is not sorted, or reads what nothing makes, raises ModelError.

Control flow is one node: what its subgraphs capture counts as its inputs. A node whose inputs are all weights *decodes*
weights: DequantizeLinear, Cast, Transpose, Reshape of an initializer, and whatever follows from these alone. It belongs
to no place in the order: every block that needs its result has a copy of it, so that no seam parts a weight from its
decoding, and a result shared by distant nodes does not bridge all seams between them.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from trt_layering.errors import ModelError

# Copies of these would draw numbers of their own.
_RANDOM = {
    "Bernoulli",
    "Dropout",
    "Multinomial",
    "RandomNormal",
    "RandomNormalLike",
    "RandomUniform",
    "RandomUniformLike",
}
_KNOWN_DOMAINS = {"", "ai.onnx", "com.microsoft"}


class Dataflow:
    """A snapshot of `graph`: changing the graph later makes it untrue. Linear in nodes and inputs.

    `nodes` in graph order; per node `reads`, the distinct values it reads, captures included; `decodes`, whether it
    only decodes weights; `alive`, whether a graph output depends on it. `last_read` maps each value that a living node
    reads to the position of the last one that does.
    """

    def __init__(self, graph: ir.Graph) -> None:
        self.graph = graph
        self.nodes = list(graph)
        self.position = {node: i for i, node in enumerate(self.nodes)}
        self.reads = [self._checked_reads(i) for i in range(len(self.nodes))]
        self.decodes: list[bool] = []
        for i, node in enumerate(self.nodes):
            self.decodes.append(self._is_decoder(node, self.reads[i]))
        self.alive = self._living()
        self.last_read = {v: i for i, values in enumerate(self.reads) if self.alive[i] for v in values}

    def placed(self, index: int) -> bool:
        """Whether node `index` executes in exactly one block: it is alive and no decoder."""
        return self.alive[index] and not self.decodes[index]

    def decoders(self, index: int) -> set[int]:
        """Positions of the decoders that node `index` needs, directly or through one another."""
        found: set[int] = set()
        pending = [index]
        while pending:
            for value in self.reads[pending.pop()]:
                producer = value.producer()
                if producer is not None and self.decodes[maker := self.position[producer]] and maker not in found:
                    found.add(maker)
                    pending.append(maker)
        return found

    def weights(self, index: int) -> list[ir.Value]:
        """Initializers that node `index` needs, its decoders' included, each once."""
        needed = dict.fromkeys(v for i in (index, *sorted(self.decoders(index))) for v in self.reads[i])
        return [v for v in needed if v.is_initializer()]

    def _checked_reads(self, index: int) -> tuple[ir.Value, ...]:
        node = self.nodes[index]
        values = tuple(dict.fromkeys(outer_reads(node, self.graph)))
        for value in values:
            producer = value.producer()
            if value.graph is not self.graph or (producer is not None and self.position[producer] >= index):
                raise ModelError(
                    f"node {node.name!r} ({node.op_type}) reads {value.name!r} before anything makes it",
                    where=f"graph {self.graph.name!r}",
                    remedy="normalise the model first",
                )
        return values

    def _is_decoder(self, node: ir.Node, values: tuple[ir.Value, ...]) -> bool:
        return (
            node.domain in _KNOWN_DOMAINS
            and node.op_type not in _RANDOM
            and not any(True for _ in subgraphs(node))
            and not any(output.is_graph_output() for output in node.outputs)
            and all(self.is_constant(value) for value in values)
        )

    def is_constant(self, value: ir.Value) -> bool:
        """Whether `value` is a weight or what a decoder makes of weights."""
        producer = value.producer()
        if producer is None:
            return value.is_initializer() and not value.is_graph_input()
        return self.decodes[self.position[producer]]

    def _living(self) -> list[bool]:
        needed = set(self.graph.outputs)
        alive = [False] * len(self.nodes)
        for i in reversed(range(len(self.nodes))):
            if any(output in needed for output in self.nodes[i].outputs):
                alive[i] = True
                needed.update(self.reads[i])
        return alive


def subgraphs(node: ir.Node) -> Iterator[ir.Graph]:
    """The graphs that `node` holds as attributes, not those below them."""
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.GRAPH:
            yield attribute.as_graph()
        elif attribute.type == ir.AttributeType.GRAPHS:
            yield from attribute.as_graphs()


def outer_reads(node: ir.Node, graph: ir.Graph) -> Iterator[ir.Value]:
    """What `node` of `graph` reads: its inputs, then what its subgraphs at any depth capture from `graph`."""
    yield from (value for value in node.inputs if value is not None)
    for body in subgraphs(node):
        for inner in ir.traversal.RecursiveGraphIterator(body):
            yield from (value for value in inner.inputs if value is not None and value.graph is graph)


def own_values(graph: ir.Graph) -> Iterator[ir.Value]:
    """The values that `graph` itself defines, without those of its subgraphs."""
    yield from graph.inputs
    yield from (value for value in graph.initializers.values() if not value.is_graph_input())
    yield from (output for node in graph for output in node.outputs)
