"""One chain at work: arena, loader thread, execution, and what they measured."""
