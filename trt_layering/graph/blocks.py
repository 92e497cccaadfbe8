"""One block's subgraph: a run of nodes cut out of a model as a model of its own.

May import onnx_ir, errors and dataflow. The source is never changed and tensors are shared, not copied. A graph that is
not sorted raises ModelError.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import onnx_ir as ir

from trt_layering.graph.dataflow import Dataflow


class Cutter:
    """Cuts blocks out of `model`, which must stay unchanged meanwhile. Analysis happens once, here; each `extract` is
    linear in the size of its block."""

    def __init__(self, model: ir.Model) -> None:
        self._model = model
        self._flow = Dataflow(model.graph)
        self._input_order = {value: i for i, value in enumerate(model.graph.inputs)}
        self._output_order = {value: i for i, value in enumerate(model.graph.outputs)}

    def extract(self, start: int, stop: int) -> ir.Model:
        """Nodes [start, stop) of the graph as an independent model.

        Inputs: the model's that it reads, in the model's order, then activations in the order in which they are made.
        Outputs: the model's, in the model's order, then activations that later nodes read. Initializers: those used, in
        subgraphs too. Nodes that decode weights come along where they are needed instead of where they stand, and nodes
        on which no output depends not at all. Opset imports, IR version and metadata are the model's.
        """
        flow = self._flow
        placed = [i for i in range(start, stop) if flow.placed(i)]
        decoders = {decoder for i in placed for decoder in flow.decoders(i)}
        members = sorted(decoders.union(placed))
        reads = dict.fromkeys(value for i in members for value in flow.reads[i])
        made = {output for i in members for output in flow.nodes[i].outputs}
        inputs = (value for value in reads if value not in made and not value.is_initializer())
        view = ir.GraphView(
            sorted(inputs, key=lambda value: self._rank(value, self._input_order)),
            sorted(self._passed_on(placed, stop), key=lambda value: self._rank(value, self._output_order)),
            nodes=[flow.nodes[i] for i in members],
            initializers=[value for value in reads if value.is_initializer()],
            opset_imports=self._model.graph.opset_imports,
            name=self._model.graph.name,
            doc_string=self._model.graph.doc_string,
            metadata_props=self._model.graph.metadata_props,
        )
        return self._as_model(view.clone())

    def _passed_on(self, placed: Iterable[int], stop: int) -> list[ir.Value]:
        made = (output for i in placed for output in self._flow.nodes[i].outputs)
        return [v for v in made if v in self._output_order or self._flow.last_read.get(v, 0) >= stop]

    def _rank(self, value: ir.Value, named: Mapping[ir.Value, int]) -> tuple[int, int, int]:
        """Sort key: the model's own inputs or outputs as it names them, then activations as they are made."""
        if value in named:
            return 0, named[value], 0
        producer = value.producer()
        assert producer is not None  # Dataflow has refused values that nothing makes
        return 1, self._flow.position[producer], value.index() or 0

    def _as_model(self, graph: ir.Graph) -> ir.Model:
        model = self._model
        return ir.Model(
            graph,
            ir_version=model.ir_version,
            producer_name=model.producer_name,
            producer_version=model.producer_version,
            domain=model.domain,
            model_version=model.model_version,
            doc_string=model.doc_string,
            functions=[function.clone() for function in model.functions.values()],
            metadata_props=dict(model.metadata_props),
        )


def extract(model: ir.Model, start: int, stop: int) -> ir.Model:
    """`Cutter(model).extract(start, stop)`, for a single block; linear in the size of the model."""
    return Cutter(model).extract(start, stop)
