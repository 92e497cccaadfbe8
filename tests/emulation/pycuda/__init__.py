"""An emulated PyCUDA 2026.1: what of it the backend uses. See ../README.md."""

VERSION = (2026, 1)
VERSION_STATUS = ""
VERSION_TEXT = "2026.1"
EMULATED = True
