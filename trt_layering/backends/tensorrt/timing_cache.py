"""TensorRT's timing cache in a file that all builds on one machine share.

May import the store and the plan cache's writing. A damaged file is told in words and counts as empty; the next build
rewrites it. A file is replaced at once, under a lock that adds what others have written meanwhile.
"""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from trt_layering.backends.tensorrt.plan_cache import write_at_once
from trt_layering.store.writer import locked

if TYPE_CHECKING:
    import tensorrt as trt

_HEAD = b"trt-layering timing cache 1\n"
_DIGEST_BYTES = 16


def read(file: Path) -> tuple[bytes, str]:
    """TensorRT's bytes in `file`, none where there is no file yet; and in words what is wrong with it, or ""."""
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        return b"", ""
    except OSError as error:
        return b"", f"the timing cache {file} cannot be read and is begun anew: {error.strerror or error}"
    body = data[len(_HEAD) + _DIGEST_BYTES :]
    if data[: -len(body) or None] != _HEAD + xxhash.xxh3_128_digest(body):
        return b"", f"the timing cache {file} is damaged and is begun anew"
    return body, ""


def take_over(config: trt.IBuilderConfig, data: bytes, file: Path) -> str:
    """Whether `config` uses `data`, which `file` held; where TensorRT refuses it, it is given an empty cache, and the
    answer says so in words."""
    used = config.get_timing_cache()
    if used is not None and (not data or config.create_timing_cache(data) is not None):
        return ""
    config.set_timing_cache(config.create_timing_cache(b""), ignore_mismatch=False)
    return f"TensorRT does not take the timing cache {file}, which is begun anew"


def keep(config: trt.IBuilderConfig, file: Path) -> None:
    """Add to `file` what `config`'s cache has learnt. Raises OSError."""
    learnt = config.get_timing_cache()
    if learnt is None:
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    with locked(file.parent, fcntl.LOCK_EX) as alone:
        for draft in file.parent.glob("draft-*") if alone else ():
            draft.unlink()
        data, _ = read(file)
        known = config.create_timing_cache(data) if data else None
        if known is not None:
            learnt.combine(known, ignore_mismatch=False)
        body = bytes(learnt.serialize())
        write_at_once(file, _HEAD + xxhash.xxh3_128_digest(body) + body)
