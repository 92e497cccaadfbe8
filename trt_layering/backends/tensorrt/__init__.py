"""The TensorRT backend. Only `driver`, `present` and `plan_file` may be imported where it cannot be used."""
