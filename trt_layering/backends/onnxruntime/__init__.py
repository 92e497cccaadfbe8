"""ONNX Runtime on the CPU: blocks are ONNX files over `weights.bin`; weights are bound by reference."""
