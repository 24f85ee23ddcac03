"""Target attention: a few query rows per sample over its history, and the projections around it."""
