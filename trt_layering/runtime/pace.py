"""How fast the drive reads, at any moment, and where it reads much slower than it did when the chain was profiled.

May import the manifest. Pure arithmetic over the times it is given; nothing fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trt_layering.store.manifest import Extent, Profile

_STRETCH_BYTES = 64 << 20
_STRETCH_SECONDS = 0.5
_SLOW = 0.5
"""Below this part of the usual rate a stretch is slow."""


@dataclass(frozen=True)
class Stretch:
    """What the drive did for a while: `rate` in bytes per second, where `usual` was to be expected, until `end`, in
    seconds of the caller's clock."""

    end: float
    rate: float
    usual: float

    def __str__(self) -> str:
        part = self.rate / self.usual
        return f"the drive reads at {_rate(self.rate)}, {part:.2g} of the {_rate(self.usual)} that the profile measured"


class ReadMeter:
    """Told when reads begin and end. `slow` stretches of reading were slow, `first_slow` the first of them: a stretch
    is 64 MiB or half a second of reading, whichever is full first. Times are those of one clock, in seconds. Whoever
    tells it takes turns with others; anyone may ask at any moment."""

    def __init__(self) -> None:
        self.slow = 0
        self.first_slow: Stretch | None = None
        self._under_way = 0
        self._busy: tuple[float, float | None] = (0.0, None)
        """Seconds of reading until it last stopped, and since when it goes on."""
        self._begun = 0.0
        self._stretch_bytes = 0
        self._stretch_usual = 0.0

    def begin(self, now: float) -> None:
        """A read begins."""
        if self._under_way == 0:
            self._busy = (self._busy[0], now)
        self._under_way += 1

    def wait(self, now: float) -> None:
        """A read that began has to wait for its turn: it is none until it begins again."""
        self._under_way -= 1
        if self._under_way == 0:
            self._busy = (self.seconds(now), None)

    def end(self, now: float, length: int, usual: float) -> Stretch | None:
        """A read ends that brought `length` bytes, for which `usual` seconds are to be expected, 0 where nobody knows.
        Returns the stretch that ends with it, if it was slow."""
        self.wait(now)
        self._stretch_bytes += length
        self._stretch_usual += usual
        seconds = self.seconds(now) - self._begun
        if self._stretch_bytes < _STRETCH_BYTES and seconds < _STRETCH_SECONDS:
            return None
        return self._judged(now, seconds)

    def _judged(self, now: float, seconds: float) -> Stretch | None:
        """The stretch that ends now, after `seconds` of reading, if it was slow; another begins."""
        length, usual = self._stretch_bytes, self._stretch_usual
        self._begun, self._stretch_bytes, self._stretch_usual = self._begun + seconds, 0, 0.0
        if usual >= _SLOW * seconds or not usual:
            return None
        stretch = Stretch(now, length / seconds, length / usual)
        self.slow += 1
        self.first_slow = self.first_slow or stretch
        return stretch

    def seconds(self, now: float) -> float:
        """Seconds in which at least one read was under way, until now."""
        seconds, since = self._busy
        return seconds if since is None else seconds + now - since


def usual_seconds(extents: Sequence[Extent], profile: Profile) -> tuple[float, ...]:
    """Seconds that each byte of each extent takes by `profile`; 0 where it was never timed. Small extents may take
    longer than the drive's rate says, and all of them while blocks execute."""
    if not profile.execute_seconds or not profile.read_rate:
        return (0.0,) * len(extents)
    alone = profile.read_seconds or (0.0,) * len(extents)
    return tuple(
        profile.read_slowdown * max(1 / profile.read_rate, seconds / extent.length)
        for extent, seconds in zip(extents, alone, strict=True)
    )


def _rate(rate: float) -> str:
    return f"{rate / 1e9:.2f} GB/s" if rate >= 1e9 else f"{rate / 1e6:.3g} MB/s"
