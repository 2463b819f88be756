"""Patch 1: exact propagation of view ops, of sizes that are numbers."""
