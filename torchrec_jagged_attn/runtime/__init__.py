"""Registration, launch and dispatch of ops."""
