"""How ops are registered, launched, recorded and replayed."""
