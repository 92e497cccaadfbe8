"""Pure functions over numbers: where blocks lie in the arena and who waits for whom. No I/O, no engines."""
