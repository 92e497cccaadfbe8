"""The header of a serialized engine, read without TensorRT, and what a plan that cannot be used here is refused with.

May import errors, the store, `present` and words. A plan begins with `ftrt`; its bytes 24 to 27 are the version of the
TensorRT that built it. Whoever opens a chain asks `check` first: TensorRT itself answers a plan that does not suit it
with nothing. Damaged plans raise CorruptError, those of other machines ForeignError.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from trt_layering.backends.tensorrt import present
from trt_layering.errors import CorruptError, ForeignError, LayeringError, ReadError
from trt_layering.store.manifest import WEIGHTS_FILE, Backend, Chain, open_plain, rebuild_remedy
from trt_layering.store.reader import check_store
from trt_layering.words import printable

SAMPLE = 64 << 10
"""Bytes from a plan's beginning that are looked at."""

PLAN = "plan"
"""The tensor that is a block's whole plan, where the binding is `swap`."""

_MAGIC = b"ftrt"
_VERSION = slice(24, 28)
_HEADER = 28
_REPLACED = "\ufffd".encode()
_LEAST_LINES = 16
_GARBLED = (
    (rb"version https://git-lfs\.github\.com/", "a pointer of Git LFS, whose file was never fetched (git lfs pull)"),
    (rb"(\.\./)*(\.git|/)?/?annex/objects/", "a pointer of git-annex, whose file was never fetched (git annex get)"),
    (rb"\xef\xbb\xbfftrt", "a plan that an editor saved as text, with a byte order mark"),
    (rb"(\xff\xfe)?f\0t\0r\0t\0|(\xfe\xff)?\0f\0t\0r\0t", "a plan that was converted to UTF-16"),
    (rb"(?i:\s*<(!doctype\s+html|html|head|body))", "a page of HTML, as a failed download leaves"),
    (rb"\s*<\?xml", "a page of XML, as a failed download leaves"),
    (rb"\s*[\[{]\s*\"", "JSON, as a failed download leaves"),
    (rb"\s*ZnRy[dA-Za-z0-9+/]", "a plan that was encoded as base64 (base64 -d decodes it)"),
    (rb"\s*66747274", "a plan that was written out as hexadecimal digits"),
    (rb"\x1f\x8b", "compressed with gzip (gunzip unpacks it)"),
    (rb"PK\x03\x04", "a zip archive"),
    (rb"\x28\xb5\x2f\xfd", "compressed with zstd (unzstd unpacks it)"),
    (rb"\xfd7zXZ\0", "compressed with xz (unxz unpacks it)"),
    (rb"BZh[1-9]", "compressed with bzip2 (bunzip2 unpacks it)"),
    (rb"\0+\Z", "nothing but zeros, as a drive leaves that lost its power"),
)


@dataclass(frozen=True)
class Header:
    """What a plan says of itself: the version of the TensorRT that built it, major, minor, patch, build."""

    version: tuple[int, int, int, int]

    @property
    def words(self) -> str:
        """Like "10.3.0.26"."""
        return ".".join(map(str, self.version))

    def is_of(self, version: str) -> bool:
        """Whether TensorRT calls this version `version`, which may leave out the last numbers."""
        told = present.numbers(version)[:4]
        return bool(told) and all(mine == theirs & 0xFF for mine, theirs in zip(self.version, told, strict=False))


def read(source: bytes | Path, *, where: str = "") -> Header:
    """The header of a plan, from its first bytes (the first `SAMPLE` are best, to tell how it was damaged) or its file.
    Raises CorruptError for what is no plan, ReadError for a file that cannot be read."""
    if isinstance(source, Path):
        where = where or str(source)
        source = _beginning(source)
    fault = damage(source)
    if fault is not None:
        raise CorruptError(f"no TensorRT plan: {fault}", where=where, remedy="copy it again, or build the chain again")
    return Header((source[24], source[25], source[26], source[27]))


def damage(head: bytes) -> str | None:
    """What happened to a plan that begins with `head`, in words; None where nothing of it shows."""
    if not head:
        return "it is empty"
    for pattern, words in _GARBLED:
        if re.match(pattern, head):
            return f"it is {words}"
    if not head.startswith(_MAGIC[: len(head)]):
        return f"it begins with {head[:4].hex(' ')}, and plans begin with {_MAGIC.hex(' ')}"
    if len(head) < _HEADER:
        return f"it ends after {len(head)} bytes, within its header"
    return _recoded(head)


def _recoded(head: bytes) -> str | None:
    """What a transfer that took a plan for text did to it. Plans are dense: these are no accidents of theirs."""
    lines = head.count(b"\n")
    versioned = head[_VERSION.start :].startswith(b"\r\n")  # the version begins with 10, which ends a line
    if lines == head.count(b"\r\n") and (versioned or lines >= _LEAST_LINES):
        return "its line ends were converted, as by a transfer in text mode: each byte 0a is 0d 0a now"
    if head.count(_REPLACED) >= 2 or _REPLACED in head[:_HEADER]:
        return "it was converted to UTF-8: what was no text became the bytes ef bf bd, and is lost"
    if len(head) >= 1024 and _is_utf8(head) and not head.isascii():
        return "it was converted to UTF-8: every byte from 80 on became two"
    return None


def _is_utf8(head: bytes) -> bool:
    try:
        head[:-4].decode()
    except UnicodeDecodeError as error:
        return len(head) - 4 - error.start < 4 and error.reason == "unexpected end of data"
    return True


def check(folder: Path, chain: Chain) -> None:
    """Raise unless the files of `chain`, which TensorRT built into `folder`, are as they were written and can be used
    by this machine: `check_store` and more.

    Reads plans and no weights. What is told says what the chain was built by, what this machine has, and the command
    that builds it again. CorruptError for damaged files, ForeignError for another TensorRT or GPU or none, ReadError
    where the drive fails.
    """
    for plan in _plans(folder, chain):
        fault = _fault(plan, chain)
        if fault is not None:
            raise CorruptError(f"{fault}; {_both(chain.backend)}", where=plan.where, remedy=rebuild_remedy(folder))
    require_machine(folder, chain.backend)
    try:
        check_store(folder, chain)
    except CorruptError as error:
        what = f"{error.what}; {_both(chain.backend)}"
        raise CorruptError(what, where=error.where, remedy=error.remedy) from error


def require_machine(folder: Path, backend: Backend) -> None:
    """Raise ForeignError unless this machine is like the one that built the chain in `folder`, which `backend` tells
    of."""
    remedy = rebuild_remedy(folder)
    try:
        present.require()
    except LayeringError as error:
        what = f"the chain was built by {_built(backend)}, which cannot be used here: {error.what}"
        raise ForeignError(what, where=str(folder), remedy=f"{error.remedy}; or {remedy}") from error
    strange = _different(backend)
    if strange:
        what = f"the chain is for another {' and another '.join(strange)}: {_both(backend)}"
        raise ForeignError(what, where=str(folder), remedy=remedy)


def _different(backend: Backend) -> list[str]:
    """In what this machine differs from the one that `backend` tells of, in words."""
    ours = present.fingerprint()
    names = {"gpu": "GPU", "sm": "SM", "memory": "kind of GPU memory", "machine": "processor"}
    strange = [] if backend.version == present.version() else ["TensorRT"]
    strange += [name for key, name in names.items() if key in ours and backend.fingerprint.get(key) != ours[key]]
    return strange or (["machine"] if backend.fingerprint != ours else [])


def described(head: bytes) -> str:
    """What shows of a plan that TensorRT did not take, for its error: what was done to it, or what it was built by and
    what this machine has. `head` is its beginning."""
    fault = damage(head)
    if fault is not None:
        return fault
    version = Header((head[24], head[25], head[26], head[27])).words
    return f"it was built by TensorRT {version}; this machine has {present.here()}"


@dataclass(frozen=True)
class _Plan:
    """Where a plan lies. `nbytes` is None where it is a file by itself."""

    path: Path
    offset: int
    nbytes: int | None
    where: str


def _plans(folder: Path, chain: Chain) -> Iterator[_Plan]:
    """The plans of all blocks, each once."""
    every = (*chain.blocks, *chain.whole, *(part.block for part in chain.joined))
    seen: set[str | int] = set()
    for block in every:
        if chain.tensorrt is None or chain.tensorrt.binding != "swap":
            if block.file not in seen:
                yield _Plan(folder / block.file, 0, None, str(folder / block.file))
            seen.add(block.file)
            continue
        for extent in (chain.extents[index] for index in block.extents):
            for tensor in extent.tensors:
                if tensor.name.startswith(PLAN) and extent.offset not in seen:
                    where = f"{folder / WEIGHTS_FILE}, the plan of block {block.name!r}"
                    yield _Plan(folder / WEIGHTS_FILE, extent.offset + tensor.offset, tensor.nbytes, where)
            seen.add(extent.offset)


def _fault(plan: _Plan, chain: Chain) -> str | None:
    """What keeps `plan` from being the one that the manifest tells of, in words."""
    name = plan.path.name
    head = _beginning(plan.path, plan.offset, SAMPLE if plan.nbytes is None else min(SAMPLE, plan.nbytes))
    fault = damage(head)
    if plan.nbytes is not None and len(head) < min(SAMPLE, plan.nbytes):
        fault = f"it ends after {len(head)} of {plan.nbytes} bytes"
    if fault is not None:
        return f"{name} is damaged: {fault}"
    header = Header((head[24], head[25], head[26], head[27]))
    if not header.is_of(chain.backend.version):
        return f"{name} holds a plan of TensorRT {header.words} in a chain of another"
    return None


def _built(backend: Backend) -> str:
    told = backend.fingerprint
    gpu, sm = (printable(told.get(key, "unknown"))[:80] for key in ("gpu", "sm"))
    return f"TensorRT {printable(backend.version)[:80]} on {gpu}, SM {sm}"


def _both(backend: Backend) -> str:
    return f"it was built by {_built(backend)}; this machine has {present.here()}"


def _beginning(path: Path, offset: int = 0, length: int = SAMPLE) -> bytes:
    descriptor = open_plain(path)
    try:
        return os.pread(descriptor, length, offset)
    except OSError as error:
        remedy = "look at the drive's health (dmesg)"
        raise ReadError(f"{path.name} cannot be read: {error.strerror}", where=str(path), remedy=remedy) from error
    finally:
        os.close(descriptor)
