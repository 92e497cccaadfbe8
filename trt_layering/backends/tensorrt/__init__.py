"""Builds and runs chains with NVIDIA's TensorRT. Importing this imports neither TensorRT nor PyCUDA."""
