"""What 16 bits do to a chain, block by block: to weights that are stored so, and to nodes that compute so.

May import the manifest, and how sizes, words and columns are written. Cannot fail.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from trt_layering.store.manifest import Chain, Halved
from trt_layering.table import columns
from trt_layering.units import format_size
from trt_layering.words import first_of, printable


def costs(chain: Chain) -> list[dict[str, Any]]:
    """What storing weights in 16 bits did to each block: bytes before and after, the largest difference of an output as
    a part of its largest value, and the names of what was kept in float32."""
    blocks = {block.name: block for block in chain.blocks}
    told = []
    for one in chain.narrowed:
        extents = (chain.extents[index] for index in blocks[one.block].extents)
        after = sum(tensor.nbytes for extent in extents for tensor in extent.tensors)
        before = after + one.saved_bytes
        sizes = {"bytes_before": before, "bytes_after": after}
        told.append({"block": one.block, **sizes, "max_rel_diff": one.max_rel_diff, "kept": list(one.kept)})
    return told


def halves(chain: Chain) -> list[dict[str, Any]]:
    """What computing in float16 does to each block: the largest difference, as in `costs`, the number of nodes that do,
    the bytes that weights save, and those nodes that stay float32, with their operators and why."""
    return [
        {
            "block": one.block, "max_rel_diff": one.max_rel_diff, "halved": one.halved, "saved_bytes": one.saved_bytes,
            "kept": [{"name": node.name, "op_type": node.op_type, "reason": node.reason} for node in one.kept],
        }
        for one in chain.halved
    ]  # fmt: skip


def cost_lines(chain: Chain, most: int | None = None) -> list[str]:
    """Both for people: all of it in a line, then block by block, or only the `most` blocks that it changed most."""
    return [*_cost_lines(chain, most), *_half_lines(chain, most)]


def _cost_lines(chain: Chain, most: int | None) -> list[str]:
    told = costs(chain)
    if not told:
        return []
    worst = sorted(told, key=lambda one: (-one["max_rel_diff"], -len(one["kept"])))
    kept = {name for one in told for name in one["kept"]}
    summary = (
        f"weights in {chain.weights} change a block's output by {worst[0]['max_rel_diff']:.2g} of its largest value at "
        f"most; {len(kept) or 'no'} {'weight stays' if len(kept) == 1 else 'weights stay'} float32; "
    )

    def row(one: dict[str, Any]) -> tuple[str, ...]:
        sizes = (format_size(one[key]) for key in ("bytes_before", "bytes_after"))
        return one["block"], *sizes, f"{one['max_rel_diff']:.2g}", first_of(one["kept"])

    return _listed(summary, ("block", "before", "after", "changed by", "kept in float32"), told, worst, row, most)


def _half_lines(chain: Chain, most: int | None) -> list[str]:
    told = chain.halved
    if not told:
        return []
    worst = sorted(told, key=lambda one: (-one.max_rel_diff, -len(one.kept)))
    kept = sum(len(one.kept) for one in told)
    summary = (
        f"{sum(one.halved for one in told)} nodes compute in float16, {kept or 'none'} "
        f"{'stay' if kept > 1 else 'stays'} float32; that changes a block's output by {worst[0].max_rel_diff:.2g} of "
        "its largest value at most; "
    )

    def row(one: Halved) -> tuple[str, ...]:
        return one.block, str(one.halved), format_size(one.saved_bytes), f"{one.max_rel_diff:.2g}", _operators(one)

    heads = ("block", "in float16", "saved", "changed by", "in float32")
    return _listed(summary, heads, told, worst, row, most)


def _operators(one: Halved) -> str:
    """What stays float32: how many of which operators, and why."""
    kinds = Counter((node.op_type, node.reason) for node in one.kept)
    return printable(", ".join(f"{count} {kind} ({reason})" for (kind, reason), count in kinds.most_common()))


def _listed(
    summary: str,
    heads: tuple[str, ...],
    told: Sequence[Any],
    worst: Sequence[Any],
    row: Callable[[Any], tuple[str, ...]],
    most: int | None,
) -> list[str]:
    """The summary, and the blocks that were asked for in rows below it."""
    shown = told if most is None else worst[:most]
    which = f"the {most} of {len(told)} blocks that change most" if len(shown) < len(told) else "the blocks"
    more = [f"  and {len(told) - len(shown)} more"] if len(shown) < len(told) else []
    return [f"{summary}{which}:", *(f"  {line}" for line in columns([heads, *map(row, shown)])), *more]
