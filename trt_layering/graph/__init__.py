"""ONNX in, block subgraphs out; weights are named here, never held."""
