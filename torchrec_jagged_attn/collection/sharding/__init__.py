"""Sharded lookups with attention on the owner ranks of history rows.

Only this folder and ``pipeline/`` read or replace private names of TorchRec. The tests of
``tests/torchrec`` and ``tests/pipeline`` fail if these names change.
"""
