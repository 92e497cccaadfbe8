"""What a chain needs in memory, known from its manifest before anything is opened. May import the manifest,
units, words and `backends`.

A budget under the floor raises BudgetError, which carries the floor and its parts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trt_layering import backends
from trt_layering.errors import BudgetError, MemoryLimitError, UsageError
from trt_layering.runtime.activations import Packing
from trt_layering.runtime.meter import available_bytes
from trt_layering.store.manifest import PAGE, Chain, read_manifest, resolve
from trt_layering.units import format_size
from trt_layering.words import quoted

_PACKED_PERCENT = 2
"""By how much prepacked weights are larger than they are in the store, rounded up."""
USUAL_WAVE = 8
MOST_WAVE = 64


@dataclass(frozen=True)
class Footprint:
    """Bytes by what they are for: `largest_block` in the arena, `activations` passed between blocks, `scratch` inside
    blocks, `engines` with the inference library's own state, and where a device executes `staging` that reads land in
    and `slots` for engines that come and go with their weights; `weights` an arena that holds all blocks, without the
    `tables` that are read by rows, and `resident` what it takes to keep everything, laid out as engines like it best.
    `request` is what each request of a wave takes beside the first, and `wave` how many there must be room for."""

    largest_block: int
    activations: int
    scratch: int
    engines: int
    weights: int
    tables: int
    resident: int
    request: int = 0
    wave: int = 1
    staging: int = 0
    slots: int = 0

    @classmethod
    def of(cls, chain: Chain, wave: int = 1) -> Footprint:
        """The footprint of a built chain in this process, opened for waves of `wave` requests. UsageError for a wave
        that is none."""
        sizes = [chain.block_bytes(index) for index in range(len(chain.blocks))]
        memory, each = chain.memory, backends.engine_overhead(chain.backend.name)
        packed = chain.weights_bytes * (100 + _PACKED_PERCENT) // 100 if chain.optimised else chain.loaded_bytes
        engines = memory.engines + each * len(chain.whole or chain.blocks)
        packing = Packing.of(chain, chain.blocks)
        needs = cls(
            largest_block=max(sizes, default=0),
            activations=memory.activations,
            scratch=memory.scratch,
            engines=memory.engines + each * sum(block.rows is None for block in chain.blocks),
            weights=sum(sizes),
            tables=chain.loaded_bytes - sum(sizes),
            resident=packed + memory.activations + memory.scratch + engines + memory.staging,
            request=max(memory.activations, packing.nbytes + packing.output_bytes),
            wave=checked_wave(wave),
            staging=memory.staging,
            slots=memory.slots,
        )
        return replace(needs, resident=max(needs.resident, needs.floor))

    @property
    def fixed(self) -> int:
        """Bytes needed beside the arena and the further requests of a wave."""
        return self.activations + self.scratch + self.engines + self.staging + self.slots

    @property
    def waves(self) -> int:
        """Bytes that the further requests of a wave must have. Where all weights fit, requests run one by one."""
        return min((self.wave - 1) * self.request, self.weights - self.largest_block)

    @property
    def floor(self) -> int:
        """The smallest budget that can run."""
        return self.fixed + self.waves + self.largest_block

    @property
    def parts(self) -> dict[str, int]:
        """What the floor is made of."""
        parts = {
            "largest_block": self.largest_block,
            "activations": self.activations,
            "scratch": self.scratch,
            "engines": self.engines,
            **{key: size for key, size in (("staging", self.staging), ("slots", self.slots)) if size},
        }
        return parts if self.wave == 1 else {**parts, "waves": self.waves}

    def arena(self, budget: int, chain: Chain) -> int:
        """Bytes of arena that `budget` leaves beside what must be and the requests of a wave, a multiple of a page and
        at most all weights, tables included only where everything fits; never less for a larger budget. BudgetError
        under the floor, MemoryLimitError if the machine has less to give than the budget takes up."""
        if budget < self.floor:
            raise self.refusal(budget, chain)
        needed, available = min(budget, self.resident), available_bytes()
        if available and needed > available:
            raise MemoryLimitError(
                f"the chain would take {format_size(needed)} and the machine has {format_size(available)} to give",
                where=f"chain {chain.name!r}",
                remedy=f"give it a smaller budget, from {format_size(self.floor)} up, or stop other programs",
            )
        room = budget - self.fixed
        if room >= self.weights:
            return self.weights + (self.tables if budget >= self.resident else 0)
        return (room - self.waves) // PAGE * PAGE

    def refusal(self, budget: int, chain: Chain) -> BudgetError:
        """What to say to a budget under the floor."""
        return BudgetError(
            f"a budget of {format_size(budget)} is under the floor of {format_size(self.floor)}: "
            + ", ".join(f"{name.replace('_', ' ')} {format_size(size)}" for name, size in self.parts.items()),
            floor=self.floor,
            parts=self.parts,
            where=f"chain {chain.name!r}",
            remedy=self._lever(chain),
        )

    def _lever(self, chain: Chain) -> str:
        """What would lower the floor: the largest part says it."""
        largest = max(self.parts, key=self.parts.__getitem__)
        if largest == "largest_block" and self.largest_block > chain.block_size:
            return (
                f"give at least {format_size(self.floor)}; one tensor is larger than the block size and was not split"
            )
        if largest == "largest_block":
            return f"give at least {format_size(self.floor)}, or build with a smaller --block-size"
        if largest == "waves":
            return f"give at least {format_size(self.floor)}, or open it for smaller waves"
        if largest == "engines":
            return f"give at least {format_size(self.floor)}, or build with a larger --block-size, for fewer engines"
        if largest in ("staging", "slots"):
            return f"give at least {format_size(self.floor)}, or build with a smaller --block-size or --binding inputs"
        if largest == "scratch" and any(block.saved_bytes for block in chain.narrowed):
            return (
                f"give at least {format_size(self.floor)}, or build with a smaller --block-size: the largest weight of "
                f"{chain.weights} is widened there"
            )
        return f"give at least {format_size(self.floor)}, or build for smaller inputs with --shape"


def checked_wave(wave: Any) -> int:
    """`wave`, if so many requests can make a wave; UsageError if not."""
    if isinstance(wave, bool) or not isinstance(wave, int) or not 1 <= wave <= MOST_WAVE:
        raise UsageError(f"a wave is 1 to {MOST_WAVE} requests, not {quoted(wave)}", remedy=f"try {USUAL_WAVE}")
    return wave


def footprint(name: str, *, repository: str | Path = "engines", version: int | None = None, wave: int = 1) -> Footprint:
    """The footprint of the newest finished version (or `version`) of chain `name`, opened for waves of `wave` requests.
    Raises StoreError and its kinds, and UsageError for a wave that is none."""
    return Footprint.of(read_manifest(resolve(Path(repository), name, version)), wave)
