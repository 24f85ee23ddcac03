"""How ops are registered, launched and dispatched."""
