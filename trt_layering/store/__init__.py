"""Bytes on disk: the manifest, the weight store, and reads from it."""
